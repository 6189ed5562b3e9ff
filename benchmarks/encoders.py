"""Training steps of a BERT and of a T5 on the CPU: ours compared with Hugging Face's.

Hugging Face's model draws the weights and saves them to a folder that ours loads; both see the same rows and update
with torch's fused AdamW. The first step is checked against Hugging Face's model in float32: its loss, and the gradient
of its embedding, where every path of the backward ends.

L layers per stack, H hidden, A heads, F ffn hidden, V vocabulary, S sequence, T decoder sequence, B batch.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.case import Case, Contender
from benchmarks.step import Step
from megalith.config import TransformerConfig
from megalith.models.bert_model import BertOutput
from megalith.models.hf import open_folder
from megalith.models.kinds import MODELS
from megalith.numerics.tolerance import gradient_error
from megalith.optional import need
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks.bert_size import bert_flops_per_row
from megalith.training.tasks.t5_size import t5_costs
from megalith.training.tasks.weights import load_weights

__all__ = ["CASES", "Size"]

_EMBEDDING, _GRADIENT = "model.embed_tokens.weight", "embedding"
_ONE_IN = 7  # one in seven tokens of a BERT's row is predicted
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}  # as in ``step``


@dataclass(frozen=True)
class Size:
    """``T`` is 0 for a BERT."""

    L: int
    H: int
    A: int
    F: int
    V: int
    S: int
    T: int
    B: int


class _Step(Step):
    """Checked by the gradient of ``embedding``."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], folder: Path, embedding: nn.Parameter) -> None:
        super().__init__(model, loss, folder)
        self._embedding = embedding

    def _errors(self, loss: float) -> tuple[float, float]:
        judged = json.loads((self._folder / "reference.json").read_text())
        want = load_file(self._folder / "gradient.safetensors")[_GRADIENT]
        assert self._embedding.grad is not None, "it takes part in the loss"
        return abs(loss - judged["loss"]), float(gradient_error(self._embedding.grad, want, judged["gradient_norm"]))


def _ours(size: Size, folder: Path, *, dtype: torch.dtype) -> Step:
    config = open_folder(folder / "hf").config
    model = MODELS[config.kind](config, BuildOptions(ProcessGroupCollection.single(), dtype))
    load_weights(folder / "hf", {name: weight.detach() for name, weight in model.named_parameters()})
    batch = load_file(folder / "batch.safetensors")

    def loss() -> Tensor:
        if size.T:
            losses: Tensor = model(batch["tokens"], batch["decoder_tokens"], labels=batch["labels"])
            return losses.mean()
        found = model(batch["tokens"], labels=batch["labels"])
        assert isinstance(found, BertOutput), "of a model with the head of pretraining"
        return found.predictions.sum() / (batch["labels"] >= 0).sum()

    return _Step(model.train(), loss, folder, dict(model.named_parameters())[_EMBEDDING])


def _theirs(size: Size, folder: Path, *, dtype: torch.dtype, attention: str, autocast: bool = False) -> Step:
    model = _class_of(size).from_pretrained(folder / "hf", dtype=dtype, attn_implementation=attention).train()
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16) if autocast else contextlib.nullcontext
    their_loss = _their_loss(size, model, folder)

    def loss() -> Tensor:
        with context():
            return their_loss()

    return _Step(model, loss, folder, model.get_input_embeddings().weight)


def _their_loss(size: Size, model: Any, folder: Path) -> Callable[[], Tensor]:
    """In float32, as their Llama computes it; these models compute it in the logits' dtype, too coarse to check."""
    batch = load_file(folder / "batch.safetensors")
    labels = batch["labels"].flatten()
    given = {"input_ids": batch["tokens"]} | ({"decoder_input_ids": batch["decoder_tokens"]} if size.T else {})
    return lambda: nn.functional.cross_entropy(model(**given).logits.flatten(0, 1).float(), labels, ignore_index=-1)


def _class_of(size: Size) -> Any:
    transformers = need("transformers")
    return transformers.T5ForConditionalGeneration if size.T else transformers.BertForMaskedLM


def _their_config(size: Size) -> Any:
    transformers, (L, H, A, F, V) = need("transformers"), (size.L, size.H, size.A, size.F, size.V)
    if size.T:
        shape = {"d_model": H, "num_layers": L, "num_heads": A, "d_kv": H // A, "d_ff": F}
        return transformers.T5Config(vocab_size=V, dropout_rate=0.0, feed_forward_proj="gated-gelu", **shape)
    shape = {"hidden_size": H, "num_hidden_layers": L, "num_attention_heads": A, "intermediate_size": F}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertConfig(vocab_size=V, max_position_embeddings=size.S, **shape, **drops)


def _prepare(size: Size, folder: Path) -> None:
    """Writes the weights, the batch, and the float32 reference's results for them."""
    torch.manual_seed(0)
    model = _class_of(size)(_their_config(size)).train()
    model.save_pretrained(folder / "hf")
    tokens = torch.randint(1, size.V, (size.B, size.S))  # no padding: its row gets no gradient in theirs
    if size.T:
        decoder_tokens, labels = torch.randint(1, size.V, (2, size.B, size.T))
        save_file({"tokens": tokens, "decoder_tokens": decoder_tokens, "labels": labels}, folder / "batch.safetensors")
    else:
        labels = torch.where(torch.arange(size.S) % _ONE_IN == 0, torch.randint(1, size.V, tokens.shape), -1)
        save_file({"tokens": tokens, "labels": labels}, folder / "batch.safetensors")
    loss = _their_loss(size, model, folder)()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    save_file({_GRADIENT: model.get_input_embeddings().weight.grad}, folder / "gradient.safetensors")
    (folder / "reference.json").write_text(json.dumps({"loss": loss.item(), "gradient_norm": norm.item()}))


def _flops(size: Size) -> int:
    shape = {"num_layers": size.L, "hidden_size": size.H, "num_attention_heads": size.A, "ffn_hidden_size": size.F}
    if size.T:
        kind = {"position_embedding_type": "relative", "activation": "geglu", "t5": {"num_decoder_layers": size.L}}
        costs = t5_costs(TransformerConfig(**shape, **kind), size.V, size.S, size.T)
        return size.B * (sum(costs.layers) + costs.head)
    config = TransformerConfig(**shape, activation="gelu", bert={"num_token_types": 2, "binary_head": False})
    return size.B * bert_flops_per_row(config, size.V, size.S, -(-size.S // _ONE_IN))


def _case(name: str, sizes: dict[str, Size], attentions: tuple[str, ...]) -> Case:
    ours = {
        f"Megalith, {dtype}": Contender(functools.partial(_ours, dtype=getattr(torch, dtype)), dtype, tolerance)
        for dtype, tolerance in _TOLERANCE.items()
    }
    theirs = {
        f"Hugging Face, {dtype}, {attention}": Contender(
            functools.partial(_theirs, dtype=getattr(torch, dtype), attention=attention), dtype, tolerance
        )
        for dtype, tolerance in _TOLERANCE.items()
        for attention in attentions
    }
    autocast = functools.partial(_theirs, dtype=torch.float32, attention=attentions[0], autocast=True)
    theirs["Hugging Face, autocast bfloat16"] = Contender(autocast, "bfloat16", _TOLERANCE["bfloat16"])
    return Case(
        title=f"CPU training step, {name}",
        base=next(iter(theirs)),
        contenders={**ours, **theirs},
        sizes=sizes,
        prepare=_prepare,
        tokens=lambda size: size.B * (size.S + size.T),
        flops=_flops,
    )


CASES: dict[str, Case] = {
    "bert-step": _case(
        "BERT",
        {
            "full": Size(L=6, H=512, A=8, F=2048, V=8192, S=128, T=0, B=16),
            "quick": Size(L=2, H=64, A=4, F=128, V=256, S=64, T=0, B=2),
        },
        ("sdpa", "eager"),
    ),
    "t5-step": _case(
        "T5 with a gated MLP",
        {
            "full": Size(L=4, H=512, A=8, F=1024, V=8192, S=128, T=48, B=16),
            "quick": Size(L=2, H=64, A=4, F=128, V=256, S=64, T=16, B=2),
        },
        ("eager", "sdpa"),
    ),
}
