"""Upcycling: initializes a mixture of experts that computes the same function as a trained dense model.

An MLP of inner width G F is split into G shards of width F, each with the inner features [g F, (g + 1) F) of all its
matrices. The shards are repeated R = E / G times: expert e = r G + g is copy r of shard g. The router has the same row
for the G shards of a copy, so that they have the same logit and are chosen together. For K = t G every token is then
processed by t whole copies, and with weights that add up to W

    sum over the K experts of  w_e shard_e(x)  =  W / G (dense(x) - b)  +  W b'        b the bias of the last product

    exact       the last matrix times a = G / W, b' = b / W: the dense function, for every activation
    published   each of the three factors of a gated or squared unit times a^(1/3), each of the two of others times
                a^(1/2): exact only for squared ReLU and ReLU, because no other activation is homogeneous

W is constant if the weights are normalized. With softmax over all experts, or a single sigmoid, it is not, and its
value for equal logits is used.

Komatsuzaki et al. 2022, "Sparse Upcycling", arXiv:2212.05055; He et al. 2024, "Upcycling Large Language Models into
Mixture of Experts", arXiv:2410.07524.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megalith.config import MoEConfig, TransformerConfig
from megalith.errors import ConfigError
from megalith.numerics.initialization import normal_shard
from megalith.parallel.parameters import ParameterSpec
from megalith.transformer.moe.routing import weights_of

__all__ = ["Upcycling", "check_upcycling", "granularity", "inexact_for", "upcycled"]


@dataclass(frozen=True)
class Upcycling:
    """How experts are made from an MLP.

    Attributes:
        seed: for the router, the up and gate projections of shared experts, and noise.
        scaling: see the module docstring.
        noise: standard deviation of the noise that is added to the experts' weights to make copies differ, as a ratio
            to that of the weights.

    Raises:
        ConfigError: ``noise`` is negative.
    """

    seed: int
    scaling: Literal["exact", "published"] = "exact"
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not self.noise >= 0:
            raise ConfigError(f"the noise of upcycling must be 0 or more; got {self.noise}; use 0.01")


def check_upcycling(dense: TransformerConfig, config: TransformerConfig) -> None:
    """Raises ConfigError unless ``config`` is ``dense`` with experts that its MLPs can be split into."""
    if dense.moe is not None:
        raise ConfigError(
            f"upcycling needs a dense model; this one already has {dense.moe.num_experts} experts per layer; "
            "train it as it is with megalith train --from"
        )
    if config.moe is None:
        raise ConfigError(
            "upcycling needs experts; got none; set model.moe.num_experts=8, and model.moe.ffn_hidden_size, "
            "model.moe.top_k and other settings of model.moe as needed"
        )
    fields = type(dense).model_fields.keys() - {"moe", "preset"}
    changed = sorted(name for name in fields if getattr(dense, name) != getattr(config, name))
    if changed:
        told = ", ".join(f"model.{name} from {getattr(dense, name)} to {getattr(config, name)}" for name in changed)
        raise ConfigError(f"upcycling must not change settings of model except model.moe; got {told}; leave these out")
    moe, wide, narrow = config.moe, dense.ffn_hidden_size, config.expert_ffn_hidden_size
    if moe.latent_size is not None:
        raise ConfigError(
            f"latent experts (model.moe.latent_size={moe.latent_size}) have different inputs from the MLP and cannot "
            "be made from it; leave model.moe.latent_size out"
        )
    if wide % narrow:
        fitting = ", ".join(str(wide // G) for G in range(1, 9) if wide % G == 0)
        raise ConfigError(
            f"model.moe.ffn_hidden_size ({narrow}) must divide model.ffn_hidden_size ({wide}); use {fitting}"
        )
    if moe.num_experts % (wide // narrow):
        raise ConfigError(
            f"model.moe.num_experts ({moe.num_experts}) must be a multiple of {wide // narrow}, the number of shards "
            f"of an MLP of width {wide}; use {-(-moe.num_experts // (wide // narrow)) * (wide // narrow)}"
        )


def granularity(config: TransformerConfig) -> int:
    """Returns G, the number of experts that together are as wide as the MLP."""
    return config.ffn_hidden_size // config.expert_ffn_hidden_size


def inexact_for(config: TransformerConfig, how: Upcycling) -> Iterator[str]:
    """Yields reasons why the upcycled model does not initially match the dense one to rounding; none if it does."""
    moe, G = _moe(config), granularity(config)
    router = moe.router
    if moe.top_k % G:
        yield (
            f"model.moe.top_k ({moe.top_k}) is not a multiple of the {G} shards of an MLP, so tokens miss some shards; "
            f"use {-(-moe.top_k // G) * G}"
        )
    if router.num_groups is not None and moe.num_experts // router.num_groups % G:
        yield f"model.moe.router.num_groups ({router.num_groups}) puts shards of one MLP into different groups"
    if not _is_normalised(moe):
        yield "the router's weights do not sum to a constant; they are assumed to be those of equal logits"
    if moe.capacity is not None:
        yield "tokens past model.moe.capacity are dropped"
    if how.scaling == "published" and config.activation not in ("squared_relu", "relu"):
        yield f"published scaling is exact only for squared_relu and relu, not for {config.activation}"
    if how.noise:
        yield f"noise of {how.noise} times their standard deviation is added to the experts' weights"


def upcycled(
    name: str, spec: ParameterSpec, dense: Callable[[str], Tensor], config: TransformerConfig, how: Upcycling
) -> Tensor:
    """Returns the whole parameter ``name`` of the model ``config``, one that the dense model does not have.

    Experts are in float32, or the dtype of their MLP if that is wider; everything else is in float32.

    Args:
        spec: the declaration of ``name``.
        dense: returns a parameter of the dense model by name.
        config: a model that ``check_upcycling`` accepts.
    """
    mlp, _, part = name.rpartition(".mlp.")
    if part.startswith("experts."):
        return _of_experts(part.removeprefix("experts."), f"{mlp}.mlp", name, spec, dense, config, how)
    if part == "gate.weight":
        G = granularity(config)
        rows = (spec.shape[0] // G, *spec.shape[1:])
        return _drawn(name, rows, spec.std, how).repeat_interleave(G, dim=0)  # [E, H]
    # router biases, and shared experts, which contribute nothing until their down_proj has been trained
    adds_nothing = spec.init == "zeros" or part == "shared_experts.down_proj.weight"
    return torch.zeros(spec.shape) if adds_nothing else _drawn(name, spec.shape, spec.std, how)


def _of_experts(
    part: str,
    mlp: str,
    name: str,
    spec: ParameterSpec,
    dense: Callable[[str], Tensor],
    config: TransformerConfig,
    how: Upcycling,
) -> Tensor:
    """Returns the parameter ``part`` of the experts made from the MLP ``mlp``."""
    E, G = _moe(config).num_experts, granularity(config)
    kind = "bias" if part.endswith("_bias") else "weight"
    linear = part.removesuffix("_bias")
    if linear == "down_proj":
        whole = _wide(dense(f"{mlp}.down_proj.{kind}"))  # [H, G F], [H]
        # [G, H, F], [G, H]
        shards = whole.expand(G, -1) if kind == "bias" else whole.unflatten(1, (G, -1)).movedim(1, 0)
    else:
        entering = ("gate_proj", "up_proj") if linear == "gate_up_proj" else ("up_proj",)
        parts = [_wide(dense(f"{mlp}.{each}.{kind}")).unflatten(0, (G, -1)) for each in entering]  # [G, F, H], [G, F]
        shards = torch.stack(parts, dim=1) if len(parts) > 1 else parts[0]  # [G, 2, F, H], [G, 2, F]
    experts = (shards * _scale(linear, kind, config, how)).repeat(E // G, *[1] * (shards.dim() - 1))
    if how.noise and kind == "weight":
        experts += _drawn(name, spec.shape, how.noise * float(experts.std()), how)
    return experts


def _scale(linear: str, kind: str, config: TransformerConfig, how: Upcycling) -> float:
    """Returns the factor on the weight or bias (``kind``) of one linear layer of the experts."""
    a = granularity(config) / _total_weight(_moe(config))
    if (linear, kind) == ("down_proj", "bias"):
        return a / granularity(config)
    if how.scaling == "exact":
        return a if linear == "down_proj" else 1.0
    three_factors = config.gate_activation is not None or config.activation == "squared_relu"
    return math.pow(a, 1 / 3 if three_factors else 1 / 2)


def _total_weight(moe: MoEConfig) -> float:
    """Returns W, the sum of the weights of a token's experts if all logits are equal."""
    logits = torch.zeros(1, moe.num_experts, dtype=torch.float64)
    return float(weights_of(logits, torch.arange(moe.top_k)[None], moe.router).sum())


def _is_normalised(moe: MoEConfig) -> bool:
    """Whether the weights of a token's experts add up to the same number whatever the logits."""
    over_all = moe.router.pre_softmax or moe.router.selection == "sinkhorn"
    return moe.top_k > 1 and (moe.top_k == moe.num_experts or not over_all)


def _moe(config: TransformerConfig) -> MoEConfig:
    assert config.moe is not None, "checked by check_upcycling"
    return config.moe


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _drawn(name: str, shape: tuple[int, ...], std: float, how: Upcycling) -> Tensor:
    return normal_shard(how.seed, name, shape, [0] * len(shape), shape, std)
