"""The training step of a Llama or a Mixtral on the CPU: ours compared with Hugging Face's and Megatron-Core's.

Every contender starts from the same random weights, loaded by name, sees the same random batch, and updates with
torch's fused AdamW. The first step is checked against Hugging Face's model in float32, in its own process.

L layers, H hidden, A heads, F ffn hidden, V vocabulary, S sequence, B batch.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.case import Case, Contender, First
from benchmarks.hugging_face import causal_lm, load_by_name
from benchmarks.megatron_core import by_our_names, load_by_our_names, megatron_core_gpt
from megalith.config import TransformerConfig
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import parameter_shapes
from megalith.numerics.tolerance import gradient_error
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.training.freed_memory import page_returner
from megalith.training.tasks.gpt_size import flops_per_token

__all__ = [
    "CASE",
    "Size",
    "Step",
    "contender",
    "flops",
    "megatron_core",
    "ours",
    "ours_as_trained",
    "prepare",
    "theirs",
]

BF16 = torch.bfloat16
_STD_OF_GATES = 0.2  # and not 0.02, so that fewer tokens are near a tie between experts


@dataclass(frozen=True)
class Size:
    """A model, and its batch of ``B`` rows of ``S`` tokens."""

    config: TransformerConfig
    S: int
    B: int


def _size(L: int, H: int, A: int, F: int, V: int, S: int, B: int) -> Size:
    config = TransformerConfig(
        num_layers=L, hidden_size=H, num_attention_heads=A, ffn_hidden_size=F, vocab_size=V, layernorm_epsilon=1e-6
    )
    return Size(config, S, B)


class Step:
    """A model in training: ``loss()`` of the batch, backward, AdamW."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], folder: Path) -> None:
        self._model, self._loss, self._folder = model, loss, folder
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def first(self) -> First:
        """The first step; comparing its gradients is not timed."""
        start = time.perf_counter()
        loss = self._forward_backward()
        seconds = time.perf_counter() - start
        loss_error, error = self._errors(loss)
        start = time.perf_counter()
        self._update()
        return First(seconds + time.perf_counter() - start, loss_error, error)

    def run(self) -> None:
        self._forward_backward()
        self._update()

    def _forward_backward(self) -> float:
        loss = self._loss()
        loss.backward()
        return loss.item()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _errors(self, loss: float) -> tuple[float, float]:
        """The errors of the loss and of the worst gradient, relative to the reference."""
        judged = json.loads((self._folder / "reference.json").read_text())
        gradients, errors = self._gradients(), []
        with safe_open(self._folder / "gradients.safetensors", "pt") as reference:
            assert set(reference.keys()) == set(gradients), "the same parameter names"
            for name, gradient in gradients.items():
                whole = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                want = reference.get_tensor(name)
                errors.append(gradient_error(whole.view_as(want), want, judged["gradient_norm"]))
        return abs(loss - judged["loss"]), torch.tensor(errors).max().item()  # NaN if any is NaN

    def _gradients(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self._model.named_parameters()}
        missing = [name for name, gradient in gradients.items() if gradient is None]
        assert not missing, f"{missing} must get a gradient"
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}


class _StepAsTrained(Step):
    """A step whose process returns free memory after the first one, as training does."""

    def first(self) -> First:
        result = super().first()
        if (trim := page_returner()) is not None:
            trim(0)
        return result


class _StepWithMaster(Step):
    """A step that updates float32 copies of the weights: what FSDP2 does on one rank, without FSDP2."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], folder: Path) -> None:
        super().__init__(model, loss, folder)
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, fused=True)

    def _update(self) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None, "every weight takes part in the loss"
            master.grad, weight.grad = weight.grad.float(), None
        super()._update()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)


class _MegatronCoreStep(Step):
    """A step of Megatron-Core's model, whose gradients are compared by our names."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], folder: Path, config: TransformerConfig) -> None:
        super().__init__(model, loss, folder)
        self._config = config

    def _gradients(self) -> dict[str, Tensor]:
        return by_our_names(self._config, super()._gradients())


def ours(size: Size, folder: Path, *, dtype: torch.dtype, step: type[Step] = Step) -> Step:
    """``GPTModel`` with parameters in ``dtype``, on a single rank."""
    model = GPTModel(size.config, BuildOptions(ProcessGroupCollection.single(), dtype))
    model.load_state_dict(_weights(folder))
    return step(model, _our_loss(model, folder), folder)


def ours_as_trained(size: Size, folder: Path, *, compiled: bool) -> Step:
    """As in ``megalith train`` with ``precision.dtype=bfloat16``: float32 parameters, sharded over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pg_collection = ParallelState(RankGrid(1), device_type="cpu").collection()
    model = GPTModel(size.config, BuildOptions(pg_collection))
    model.load_state_dict(_weights(folder))
    if compiled:
        for layer in model.layers():
            layer.compile()
    units = model.fsdp_units()
    shard_model(model, units, pg_collection, compute_dtype=BF16, param_dtype=torch.float32, reshard_after_forward=False)
    return _StepAsTrained(model, _our_loss(model, folder), folder)


def theirs(
    size: Size,
    folder: Path,
    *,
    dtype: torch.dtype,
    autocast: bool = False,
    compiled: bool = False,
    experts: str = "eager",
) -> Step:
    """Hugging Face's ``LlamaForCausalLM``, or its ``MixtralForCausalLM`` with an ``experts`` implementation."""
    model = causal_lm(size.config, size.S, torch.float32, experts=experts)
    load_by_name(model, _weights(folder))
    model.to(dtype)
    if compiled:
        model.compile()
    context = functools.partial(torch.autocast, "cpu", BF16) if autocast else contextlib.nullcontext
    batch = load_file(folder / "batch.safetensors")

    def loss() -> Tensor:
        with context():
            return _hugging_face_loss(model, batch)

    return Step(model, loss, folder)


def megatron_core(size: Size, folder: Path, *, dtype: torch.dtype, fused: bool) -> Step:
    """Megatron-Core's ``GPTModel``, with parameters in ``dtype``."""
    model = megatron_core_gpt(size.config, size.S, dtype, fused=fused)
    load_by_our_names(size.config, model, _weights(folder))
    batch = load_file(folder / "batch.safetensors")
    positions = torch.arange(size.S).expand(size.B, -1)
    attention_mask = torch.ones(size.S, size.S, dtype=torch.bool).triu(1)[None, None]  # [1, 1, S, S], true for unseen

    def loss() -> Tensor:
        losses: Tensor = model(batch["tokens"], positions, attention_mask, labels=batch["labels"])  # [B, S]
        return losses.mean()

    return _MegatronCoreStep(model, loss, folder, size.config)


def _our_loss(model: GPTModel, folder: Path) -> Callable[[], Tensor]:
    batch = load_file(folder / "batch.safetensors")
    return lambda: model(batch["tokens"], labels=batch["labels"]).mean()


def _hugging_face_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    # passed as shift_labels, so that they are not shifted again
    loss: Tensor = model(input_ids=batch["tokens"], labels=labels, shift_labels=labels, use_cache=False).loss
    return loss


def _weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def prepare(size: Size, folder: Path) -> None:
    """Writes the weights, the batch, and the float32 reference's results for them."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in parameter_shapes(size.config).items():
        std = _STD_OF_GATES if name.endswith(".gate.weight") else 0.02
        noise = std * torch.randn(shape, generator=generator)
        weights[name] = 1 + noise if len(shape) == 1 else noise  # norm weights are about one
    V = parameter_shapes(size.config)["lm_head.weight"][0]
    tokens, labels = torch.randint(V, (2, size.B, size.S), generator=generator)
    save_file(weights, folder / "weights.safetensors")
    save_file({"tokens": tokens, "labels": labels}, folder / "batch.safetensors")

    model = causal_lm(size.config, size.S, torch.float32)
    load_by_name(model, weights)
    loss = _hugging_face_loss(model, {"tokens": tokens, "labels": labels})
    loss.backward()
    gradients = {name: parameter.grad.view_as(weights[name]) for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    save_file(gradients, folder / "gradients.safetensors")
    (folder / "reference.json").write_text(json.dumps({"loss": loss.item(), "gradient_norm": norm.item()}))


def flops(size: Size) -> int:
    assert size.config.vocab_size is not None, "every size has one"
    return size.B * size.S * flops_per_token(size.config, size.config.vocab_size, size.S)


# for the worst tensor; bfloat16 keeps 8 bits, and is off by up to 0.02 in ours and in theirs
_GRADIENT_TOLERANCES: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 0.05})


def contender(
    build: Callable[..., Step], matmuls: str, tolerances: Mapping[str, float] = _GRADIENT_TOLERANCES, **options: Any
) -> Contender:
    """What ``build`` makes with ``options``, held to the tolerance of the dtype ``matmuls``."""
    return Contender(functools.partial(build, **options), matmuls, tolerances[matmuls])


CASE = Case(
    title="CPU training step, Llama shape",
    base="Hugging Face, bfloat16",
    contenders={
        "Megalith, float32": contender(ours, "float32", dtype=torch.float32),
        "Megalith, bfloat16": contender(ours, "bfloat16", dtype=BF16),
        "Megalith, bfloat16 over float32, without FSDP2": contender(ours, "bfloat16", dtype=BF16, step=_StepWithMaster),
        "Megalith, bfloat16 over float32 (as trained)": contender(ours_as_trained, "bfloat16", compiled=False),
        "Megalith, as trained, layers compiled": contender(ours_as_trained, "bfloat16", compiled=True),
        "Hugging Face, float32 (its default)": contender(theirs, "float32", dtype=torch.float32),
        "Hugging Face, autocast bfloat16": contender(theirs, "bfloat16", dtype=torch.float32, autocast=True),
        "Hugging Face, bfloat16": contender(theirs, "bfloat16", dtype=BF16),
        "Hugging Face, bfloat16, compiled": contender(theirs, "bfloat16", dtype=BF16, compiled=True),
        "Megatron-Core, float32": contender(megatron_core, "float32", dtype=torch.float32, fused=False),
        "Megatron-Core, bfloat16": contender(megatron_core, "bfloat16", dtype=BF16, fused=False),
        "Megatron-Core, bfloat16, its fusions": contender(megatron_core, "bfloat16", dtype=BF16, fused=True),
    },
    sizes={
        "full": _size(L=6, H=512, A=8, F=1408, V=8192, S=512, B=4),
        "quick": _size(L=2, H=64, A=4, F=128, V=256, S=64, B=2),
    },
    prepare=prepare,
    tokens=lambda size: size.B * size.S,
    flops=flops,
)
