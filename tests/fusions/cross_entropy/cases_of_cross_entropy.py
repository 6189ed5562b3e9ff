"""Cases of vocabulary-parallel cross entropy, on one rank."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.fusions import cost
from megalith.fusions.cross_entropy.vocab_parallel import FUSION
from megalith.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from tests.fusions.harness import Case, Inputs

LOSS_SCALE = 1024.0  # as in float16 training: without it, most gradients here are subnormal


def inputs(T: int, V: int, dtype: torch.dtype, device: str, *, ignored: bool = False, padding: int = 0) -> Inputs:
    logits = 2.0 * torch.randn(T, V, device=device)
    target = torch.randint(max(1, V - padding), (T,), device=device)
    if ignored:
        target[::2] = -100
    return {"vocab_parallel_logits": logits.to(dtype), "target": target}


def formula(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    padding: int = 0,
) -> Tensor:
    V = vocab_parallel_logits.shape[-1]
    x = vocab_parallel_logits[:, : max(1, V - padding)]
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    loss = cross_entropy(x, target, reduction="none", label_smoothing=label_smoothing)
    return LOSS_SCALE * (loss + z_loss * torch.logsumexp(x, dim=-1).square() * (target != -100))


def scaled(vocab_parallel_logits: Tensor, target: Tensor, *, padding: int, **settings: Any) -> Tensor:
    vocab_size = max(1, vocab_parallel_logits.shape[-1] - padding) if padding else None
    loss = fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, vocab_size=vocab_size, **settings)
    return LOSS_SCALE * loss


def case(name: str, *, ignored: bool = False, padding: int = 0, **settings: Any) -> Case:
    smoothed = "label_smoothing" in settings
    return Case(
        name,
        FUSION,
        partial(inputs, ignored=ignored, padding=padding),
        partial(scaled, padding=padding, **settings),
        partial(formula, padding=padding, **settings),
        cancels=("dvocab_parallel_logits",) if smoothed else (),
        cost=partial(cost.vocab_parallel_cross_entropy, num_statistics=4 if smoothed else 3),
    )


CASES = [
    case("cross entropy"),
    case("cross entropy, z-loss and softcap", z_loss=1e-2, softcap=5.0),
    case("cross entropy, everything", ignored=True, padding=5, label_smoothing=0.1, z_loss=1e-2, softcap=5.0),
]
