"""Forward and backward of one mixture of experts on the CPU: ours, Hugging Face's Mixtral and Megatron-Core's.

Every contender has the same random weights and sees the same hidden states and the same gradient of its output. The
first run is checked against Hugging Face's layer in float32, in its own process, which loops over the experts.

Gate weights are drawn with a large standard deviation, so that no token is near a tie, unless every token goes to all
experts: dtypes round logits differently, and a token routed elsewhere is an error of the routing, not of the experts.

H hidden, F ffn hidden of an expert, E experts, K experts per token, T tokens.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.case import Case, Contender, First
from benchmarks.megatron_core import megatron_core_experts
from megalith.config import TransformerConfig
from megalith.numerics.tolerance import gradient_error
from megalith.optional import need
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.experts import SequentialMLP
from megalith.transformer.moe.moe_layer import MoELayer

__all__ = ["CASES", "TOLERANCE", "LayerStep", "Size", "flops", "ours", "prepare", "theirs"]

Layer = Callable[[Tensor], Tensor]  # [T, H] -> [T, H]
Gradients = Callable[[], dict[str, Tensor]]
# the names of the weights in our layer
_GATE, _ENTERING, _LEAVING = "gate.weight", "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class Size:
    """A layer of ``E`` experts, ``K`` for each of ``T`` tokens."""

    T: int
    H: int
    F: int
    E: int
    K: int


class LayerStep:
    """Forward and backward of ``layer``; ``gradients`` returns its gradients by our names."""

    def __init__(self, layer: Layer, model: nn.Module, dtype: torch.dtype, gradients: Gradients, folder: Path) -> None:
        self._layer, self._model, self._gradients, self._folder = layer, model, gradients, folder
        batch = load_file(folder / "batch.safetensors", device=str(next(model.parameters()).device))
        self._x, self._dy = batch["x"].to(dtype).requires_grad_(), batch["dy"].to(dtype)

    def first(self) -> First:
        """The first run; comparing its gradients is not timed."""
        start = time.perf_counter()
        y = self._forward_backward()
        seconds = time.perf_counter() - start
        judged = json.loads((self._folder / "reference.json").read_text())
        reference = load_file(self._folder / "gradients.safetensors")
        assert self._x.grad is not None, "the hidden states get a gradient"
        found = {name: dx.cpu() for name, dx in {"x": self._x.grad, **self._gradients()}.items()}
        assert found.keys() == reference.keys(), "the same parameter names"
        errors = [gradient_error(dx.float(), reference[name], judged["norm"]) for name, dx in found.items()]
        loss_error = abs((y.float() * self._dy.float()).sum().item() - judged["loss"])
        return First(seconds, loss_error, torch.tensor(errors).max().item())  # NaN if any is NaN

    def run(self) -> None:
        self._model.zero_grad()
        self._x.grad = None
        self._forward_backward()

    def _forward_backward(self) -> Tensor:
        y = self._layer(self._x)
        y.backward(self._dy)
        return y.detach()


def ours(size: Size, folder: Path, *, dtype: torch.dtype, sequential: bool = False, device: str = "cpu") -> LayerStep:
    """``MoELayer``, with its experts computed together or one at a time."""
    model = {
        "hidden_size": size.H,
        "num_attention_heads": 1,
        "num_layers": 1,
        "ffn_hidden_size": size.F,
        "vocab_size": 1,
        "moe": {"num_experts": size.E, "top_k": size.K},
    }
    layer = MoELayer(
        TransformerConfig.model_validate(model), BuildOptions(ProcessGroupCollection.single(), dtype), layer=0
    )
    layer.load_state_dict(_weights(folder))
    layer.to(device)
    if sequential:
        layer.experts.backend = SequentialMLP.backend
    context, gradients = LayerContext(), functools.partial(_gradients_of, layer)
    return LayerStep(lambda x: layer(x.unsqueeze(1), context).squeeze(1), layer, dtype, gradients, folder)


def theirs(size: Size, folder: Path, *, dtype: torch.dtype, experts: str, device: str = "cpu") -> LayerStep:
    """Hugging Face's ``MixtralSparseMoeBlock`` with its ``experts`` implementation."""
    block = _hugging_face_block(size, folder, experts).to(device, dtype)

    def gradients() -> dict[str, Tensor]:
        grads = _gradients_of(block)
        return {**grads, _ENTERING: grads[_ENTERING].view(size.E, 2, size.F, size.H)}

    return LayerStep(lambda x: block(x.unsqueeze(0)).squeeze(0), block, dtype, gradients, folder)


def _hugging_face_block(size: Size, folder: Path, experts: str) -> Any:
    transformers = need("transformers")
    config = transformers.MixtralConfig(
        hidden_size=size.H,
        intermediate_size=size.F,
        num_local_experts=size.E,
        num_experts_per_tok=size.K,
        experts_implementation=experts,
    )
    block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config).train()
    weights = _weights(folder)
    block.load_state_dict({**weights, _ENTERING: weights[_ENTERING].flatten(1, 2)})
    return block


def _megatron_core(size: Size, folder: Path, *, dtype: torch.dtype) -> LayerStep:
    """Megatron-Core's ``MoELayer`` with its ``SequentialMLP``."""
    layer = megatron_core_experts(size.H, size.F, size.E, size.K, dtype)
    weights = {name: weight.to(dtype) for name, weight in _weights(folder).items()}
    experts = layer.experts.local_experts
    with torch.no_grad():
        layer.router.weight.copy_(weights[_GATE])
        for expert, entering, leaving in zip(experts, weights[_ENTERING], weights[_LEAVING], strict=True):
            expert.linear_fc1.weight.copy_(entering.flatten(0, 1))
            expert.linear_fc2.weight.copy_(leaving)

    def gradients() -> dict[str, Tensor]:
        entering = torch.stack([expert.linear_fc1.weight.grad for expert in experts])
        leaving = torch.stack([expert.linear_fc2.weight.grad for expert in experts])
        return {
            _GATE: layer.router.weight.grad,
            _ENTERING: entering.view(size.E, 2, size.F, size.H),
            _LEAVING: leaving,
        }

    return LayerStep(lambda x: layer(x.unsqueeze(1))[0].squeeze(1), layer, dtype, gradients, folder)


def _gradients_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


def _weights(folder: Path) -> Mapping[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def prepare(size: Size, folder: Path, device: str = "cpu") -> None:
    """Writes the weights, the batch, and the float32 reference's results for them on ``device``."""
    generator = torch.Generator().manual_seed(0)

    def draw(std: float, *shape: int) -> Tensor:
        # bfloat16 values, so that every dtype starts from the same numbers
        return (std * torch.randn(shape, generator=generator)).bfloat16().float()

    # with large logits, the last of all experts would get a weight near 1e-40, and denormals take 5 times as long
    gate = draw(1.0 if size.K < size.E else size.H**-0.5, size.E, size.H)
    weights = {
        _GATE: gate,
        _ENTERING: draw(0.02, size.E, 2, size.F, size.H),
        _LEAVING: draw(0.02, size.E, size.H, size.F),
    }
    save_file(weights, folder / "weights.safetensors")
    x = _far_from_ties(draw(1.0, 2 * size.T, size.H), gate, size)
    batch = {"x": x, "dy": draw(1.0, size.T, size.H) / size.T}
    save_file(batch, folder / "batch.safetensors")

    block = _hugging_face_block(size, folder, "eager").to(device)
    x = x.to(device).requires_grad_()
    y = block(x.unsqueeze(0)).squeeze(0)
    dy = batch["dy"].to(device)
    y.backward(dy)
    gradients = _gradients_of(block)
    gradients[_ENTERING] = gradients[_ENTERING].view(size.E, 2, size.F, size.H)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    assert x.grad is not None, "the hidden states get a gradient"
    save_file({"x": x.grad, **gradients}, folder / "gradients.safetensors")
    loss = (y * dy).sum().item()
    (folder / "reference.json").write_text(json.dumps({"loss": loss, "norm": norm}))


def _far_from_ties(x: Tensor, gate: Tensor, size: Size) -> Tensor:
    """The ``T`` rows whose K-th logit is farthest from the next one, in their original order; K may equal E."""
    if size.K == size.E:
        return x[: size.T].contiguous()
    logits = (x @ gate.T).sort(dim=1, descending=True).values
    margin = logits[:, size.K - 1] - logits[:, size.K]
    return x[margin.topk(size.T).indices.sort().values].contiguous()


def flops(size: Size) -> int:
    """Three matrix products per expert, once in the forward and twice in the backward."""
    return 3 * 2 * size.T * size.K * 3 * size.H * size.F


def _case(E: int, K: int, dtype: torch.dtype) -> Case:
    name = str(dtype).removeprefix("torch.")

    def contender(build: Callable[..., LayerStep], **options: Any) -> Contender:
        return Contender(functools.partial(build, dtype=dtype, **options), name, TOLERANCE[dtype])

    return Case(
        title=f"CPU mixture of experts, {E} experts, {K} per token, {name}",
        base="Hugging Face, eager",
        contenders={
            "Megalith": contender(ours),
            "Megalith, experts one by one": contender(ours, sequential=True),
            "Hugging Face, eager": contender(theirs, experts="eager"),
            "Hugging Face, grouped_mm": contender(theirs, experts="grouped_mm"),
            "Megatron-Core, SequentialMLP": contender(_megatron_core),
        },
        sizes={"full": Size(T=2048, H=512, F=1024, E=E, K=K), "quick": Size(T=32, H=16, F=32, E=E, K=K)},
        prepare=prepare,
        tokens=lambda size: size.T,
        flops=flops,
        loss_tolerance=TOLERANCE[dtype],
    )


# for the worst tensor; bfloat16 keeps 8 bits
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}

CASES = {
    f"experts-{E}-top{K}-{str(dtype).removeprefix('torch.')}": _case(E, K, dtype)
    for E in (8, 64)
    for K in (2, 8)
    for dtype in TOLERANCE
}
