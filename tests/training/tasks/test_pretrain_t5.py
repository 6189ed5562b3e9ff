"""T5 pretraining: losses and span accuracy computed from its logits, in every layout, and refusals."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from megalith.config import load_run
from megalith.data.special_tokens import t5_tokens
from megalith.data.t5_dataset import T5Sample
from megalith.errors import ConfigError
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.dry_run import describe
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.inference import evaluate_checkpoint
from megalith.training.pretrain import pretrain
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from megalith.training.tasks.pretrain_t5 import PretrainT5
from megalith.training.tasks.t5_size import t5_costs
from tests.rank_pool import ranks
from tests.tiny_masked import masked_settings
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences

T5: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "position_embedding_type": "relative",
    "tie_word_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "attention": {"scale": 1.0},
    "relative_position": {"num_buckets": 8, "max_distance": 16},
    "t5": {"num_decoder_layers": 2},
}


def t5_settings(folder: Any, **groups: Any) -> dict[str, Any]:
    tree = masked_settings(folder, **groups)
    tree["model"] = {**T5, "vocab_size": tree["model"]["vocab_size"], **groups.get("model", {})}
    return tree


def half_right(model: Any, sample: T5Sample) -> T5Sample:
    """``sample`` with the model's prediction as every second label: a random model is never right."""
    rows = sample.tokens[: sample.num_tokens], sample.decoder_tokens[: sample.num_decoder_tokens]
    with torch.no_grad():
        likeliest = model(*(torch.from_numpy(row[None]) for row in rows))[0].argmax(-1)
    labels, places = sample.labels.copy(), np.arange(0, sample.num_decoder_tokens, 2)
    labels[places] = likeliest.numpy()[places]
    return replace(sample, labels=labels)


def test_losses_and_accuracy_are_those_of_the_models_logits(tmp_path):
    task = task_of(load_run(t5_settings(tmp_path)))
    assert isinstance(task, PretrainT5)
    model = task.build_model(BuildOptions(ProcessGroupCollection.single(), torch.float64)).eval()
    special = t5_tokens(task.tokenizer)
    no_text = {*special.sentinels.tolist(), special.end}
    with torch.no_grad():  # so that both are predicted at some places
        model.model.embed_tokens.weight[[int(special.sentinels[0]), special.end]] *= 10.0
    dataset = task.train_dataset()
    samples = [half_right(model, dataset[number]) for number in range(6)]
    batch = task.collate(samples, range(6), [True] * 5 + [False])
    inputs = task.inputs(batch, 0, torch.device("cpu"))
    with torch.no_grad():
        found = task.sums(task.forward(model, inputs, None), inputs)
    loss = 0.0
    right = learned = of_text = 0
    right_without_text = set[int]()
    for sample in samples[:5]:  # each separately, without padding
        N, M = sample.num_tokens, sample.num_decoder_tokens
        logits = model(torch.from_numpy(sample.tokens[None, :N]), torch.from_numpy(sample.decoder_tokens[None, :M]))[0]
        labels = torch.from_numpy(sample.labels[:M])
        loss += cross_entropy(logits, labels, reduction="sum").item()
        is_text = torch.tensor([label not in no_text for label in labels.tolist()])
        hits = logits.argmax(-1) == labels
        right_without_text |= set(labels[hits & ~is_text].tolist())
        right += int((hits & is_text).sum())
        learned, of_text = learned + M, of_text + int(is_text.sum())
    assert 0 < right < of_text
    assert right_without_text >= {special.sentinels[0], special.end}, "predicted, but they do not count"
    assert task.counts(batch) == {"lm": learned, "span_accuracy": of_text}
    assert found["lm"].item() == pytest.approx(loss, rel=1e-9)
    assert found["span_accuracy"].item() == right
    model.train()
    assert task.sums(task.forward(model, inputs, None), inputs).keys() == {"lm"}


def steps(tree: dict[str, Any], world_size: int) -> Trajectory:
    return first_steps(tree, world_size)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "context 2": (2, {"context": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "shard 2": (2, {"shard": 2}),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
    "replicate 2 x context 2": (4, {"replicate": 2, "context": 2}),
}


# `make test` takes the two cheapest: tests/training/test_t5_layouts.py has the other axes, without a tokenizer
IN_MAKE_TEST = ("pipeline 2", "shard 2")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_learns_the_same(layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = t5_settings(tmp_path)
    [want] = ranks(1, steps, {**tree, "train": {**tree["train"], "micro_batch_size": 8}}, 1)
    for found in ranks(num_ranks, steps, {**tree, "parallel": parallel}, num_ranks):
        assert differences(found, want) == []


def half_right_samples(tree: dict[str, Any]) -> list[T5Sample]:
    run = build_run(load_run(tree), torch.device("cpu"))
    held_out = run.task.evaluation_dataset(tree["data"]["train"])
    return [half_right(run.chunks[0].eval(), held_out[number]) for number in range(7)]


def evaluation(tree: dict[str, Any], world_size: int, samples: list[T5Sample]) -> Evaluation:
    run = build_run(load_run(tree, world_size=world_size), torch.device("cpu"))
    return evaluate(run.task, run.pipeline, samples, 2, options=run.options, device=run.device)


@pytest.mark.parametrize("parallel", [{"tensor": 2, "sequence": True}, {"context": 2}, {"pipeline": 2}])
def test_held_out_accuracy_is_the_same_in_every_layout(parallel, tmp_path):
    tree = t5_settings(tmp_path)
    [samples] = ranks(1, half_right_samples, tree)
    [want] = ranks(1, evaluation, tree, 1, samples)
    assert 0.0 < want.means["span_accuracy"] < 1.0
    for found in ranks(2, evaluation, {**tree, "parallel": parallel}, 2, samples):
        assert found.counts == want.counts
        assert found.means == pytest.approx(want.means, rel=1e-9)


def trained(tree: dict[str, Any]) -> list[str]:
    shown: list[str] = []
    pretrain(load_run(tree), shown.append, shown.append)
    return shown


def test_a_run_tells_its_accuracy_and_eval_measures_it_again(tmp_path):
    tree = t5_settings(tmp_path / "train")
    tree["data"]["valid"] = tree["data"]["train"]
    tree["run"] = str(tmp_path / "run")
    [lines] = ranks(1, trained, tree)
    [line] = (line for line in lines if "held-out" in line)
    told = re.search(r"loss (\S+) over .* tokens; span_accuracy (\S+)", line)
    assert told is not None, line
    [found] = evaluate_checkpoint(tmp_path / "run", None, None)
    assert [found.loss, found.means["span_accuracy"]] == pytest.approx([float(x) for x in told.groups()], abs=1e-3)


def test_the_first_sample_is_shown_with_its_missing_spans_in_place(tmp_path):
    tree = t5_settings(tmp_path)
    text = describe(load_run(tree), 1)
    assert "with [spans hidden from the encoder] in brackets" in text
    shown = text[text.index("  | ") :]
    assert re.search(r"\[[a-z ]+\]", shown)
    assert "extra_id" not in shown


def test_settings_of_another_kind_or_that_ranks_cannot_share_are_refused(tmp_path):
    tree = t5_settings(tmp_path)
    data = tree["data"]
    with pytest.raises(ConfigError, match=r"data.eod_mask_loss is for the rows of a GPT.*row of model.t5"):
        task_of(load_run({**tree, "data": {**data, "eod_mask_loss": True}}))
    odd = {**tree, "data": {**data, "decoder_seq_length": 18}, "parallel": {"context": 2}}
    with pytest.raises(ConfigError, match=r"data.decoder_seq_length \(18\) must be divisible by 4.*use 20"):
        task_of(load_run(odd, world_size=2))
    bert = masked_settings(tmp_path, data={"decoder_seq_length": 16})
    with pytest.raises(ConfigError, match=r"data.decoder_seq_length is for model.t5; model.bert has no decoder"):
        task_of(load_run(bert))
    short = {**tree, "data": {**data, "decoder_seq_length": 4}}
    with pytest.raises(ConfigError, match=r"data\.decoder_seq_length \(4\) must be at least \d+, for the masked"):
        task_of(load_run(short)).train_dataset()


def test_a_row_costs_what_torch_counts(tmp_path):
    Se, Sd, H, F, V = 24, 8, 32, 48, 67
    config = load_run(t5_settings(tmp_path)).model.model_copy(update={"vocab_size": V})
    x, y = torch.randn(1, Se, H), torch.randn(1, Sd, H)
    with FlopCounterMode(display=False) as encoder:
        attend(x, x)
        mlp(x, F)
    with FlopCounterMode(display=False) as decoder:
        attend(y, x)
        mlp(y, F)
        for _ in range(4):
            nn.Linear(H, H)(y)
    causal = 2 * 2 * H * Sd * Sd // 2  # half of what each sees, in two products
    with FlopCounterMode(display=False) as head:
        nn.Linear(H, V)(y)
    found = t5_costs(config, V, Se, Sd)
    assert found.layers == (3 * encoder.get_total_flops(),) * 2 + (3 * (decoder.get_total_flops() + causal),) * 2
    assert found.head == 3 * head.get_total_flops()


def attend(queries: torch.Tensor, keys: torch.Tensor) -> None:
    H = queries.shape[-1]
    q, k, v = nn.Linear(H, H)(queries), nn.Linear(H, H)(keys), nn.Linear(H, H)(keys)
    nn.Linear(H, H)(torch.softmax(q @ k.mT, dim=-1) @ v)


def mlp(x: torch.Tensor, width: int) -> None:
    H = x.shape[-1]
    nn.Linear(width, H)(nn.Linear(H, width)(x) * nn.Linear(H, width)(x))
