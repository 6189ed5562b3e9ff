"""What a run would do, without doing it: settings, size, memory, and its first batch as text."""

from megalith.config import RunConfig, dump_yaml
from megalith.data.gpt_dataset import GPTDataset
from megalith.errors import DataError
from megalith.observe.flops import flops_per_token, parameters
from megalith.observe.units import quantity
from megalith.training.preflight import load_tokenizer

__all__ = ["describe"]

_MASTER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 4, "float16": 4}
_SHOWN_TOKENS = 64


def describe(config: RunConfig, world_size: int) -> str:
    """Several lines for a person: the resolved settings, then what they mean."""
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "preflight has settled it"
    num_parameters = parameters(config.model, vocab_size)
    flops = flops_per_token(config.model, vocab_size, config.data.seq_length)
    layout = config.parallel.layout(world_size)
    tensor, replicate, shard = layout.tensor, layout.replicate, layout.shard
    # weights, gradients and two moments, each in the master dtype; activations come on top
    state_bytes = 4 * _MASTER_BYTES[config.precision.dtype] * num_parameters
    tokens = config.train.global_batch_size * config.data.seq_length
    return "\n".join(
        [
            dump_yaml(config).rstrip(),
            "",
            f"parameters            {num_parameters:,}",
            f"ranks                 {world_size} = tensor {tensor} x replicate {replicate} x shard {shard}",
            f"state on each rank    about {quantity(state_bytes / (tensor * shard))}B of {quantity(state_bytes)}B",
            f"tokens in a step      {tokens:,}, in all {tokens * config.train.steps:,}",
            f"operations per token  {quantity(flops)}",
            "first sample          the text, with [what no loss is taken on] in brackets:",
            *_first_sample(config),
        ]
    )


def _first_sample(config: RunConfig) -> list[str]:
    assert config.data.train is not None, "preflight has checked it"
    dataset = GPTDataset(
        config.data.train, config.data.seq_length, config.train.seed, mask_eod=config.data.eod_mask_loss
    )
    sample = dataset[0]
    labels, mask = sample.labels[:_SHOWN_TOKENS].tolist(), sample.loss_mask[:_SHOWN_TOKENS].tolist()
    try:
        tokenizer = load_tokenizer(config)
    except DataError:
        return ["  " + " ".join(str(label) if kept else f"[{label}]" for label, kept in zip(labels, mask, strict=True))]
    pieces: list[str] = []
    start = 0
    for end in range(1, len(labels) + 1):  # runs of equal mask decode together, so that no character is cut in two
        if end == len(labels) or mask[end] != mask[start]:
            text = tokenizer.decode(labels[start:end])
            pieces.append(text if mask[start] else f"[{text}]")
            start = end
    return ["  | " + line for line in "".join(pieces).splitlines()]
