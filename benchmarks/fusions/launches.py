"""Overhead of public functions, on tensors so small that it is most of a call.

A function checks its operands, chooses a path, views tensors as rows and records its gradient. Its base is a
hand-written ``torch.autograd.Function`` around the implementations of the same path: views inside, and nothing that
these operands do not need. The default path for such small tensors is the reference, in plain torch; its base is the
formula alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megalith import fusions
from megalith.fusions.core.row_wise import RUNNERS
from megalith.fusions.cross_entropy import blocked as cross_entropy_blocked
from megalith.fusions.cross_entropy import formulas as cross_entropy
from megalith.fusions.experts import permute_formulas as permute
from megalith.fusions.gated import formulas as gated
from megalith.fusions.norm import blocked as norm
from megalith.fusions.rope import formulas as rope
from megalith.fusions.softmax import formulas as softmax

__all__ = ["Launches", "launches"]

_S, _B, _H, _A, _D, _V, _E = 2, 2, 32, 2, 8, 16, 4
_EPS, _SCALE = 1e-5, 0.5


class Launches(NamedTuple):
    """A public function, called with ``tensors`` and ``backend``, and its two bases, called with ``tensors``."""

    tensors: tuple[Tensor, ...]
    ours: Callable[..., Any]
    plain: Callable[..., Any]  # on the blocked path
    formula: Callable[..., Any]  # on the default path, on a CPU


def launches(device: str) -> dict[str, Launches]:
    """All functions, by name, with tensors on ``device``."""
    torch.manual_seed(0)
    families = (_norm, _bias_swiglu, _masked_softmax, _cross_entropy, _rope, _permute)
    return {family.__name__[1:].replace("_", " "): family(partial(_leaf, device)) for family in families}


def _leaf(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


Leaf = Callable[..., Tensor]


def _norm(leaf: Leaf) -> Launches:
    forward, backward = norm.blocked.implementation, norm.blocked.back.implementation
    options = None, None, 0, 0.0, _EPS, "RMSNorm", False
    needs = [True, False, True, False, False]

    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            y, _, mean, rstd = forward(x.view(-1, 1, _H), None, weight, None, None, *options)
            ctx.save_for_backward(x, weight, mean, rstd)
            return y.view(x.shape)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, weight, mean, rstd = ctx.saved_tensors
            kept = None, None, 0, 0.0, False, mean, rstd, x.dtype, None, None, needs
            dx, _, dw, *_ = backward(dy.view(-1, 1, _H), None, x.view(-1, 1, _H), weight, *kept)
            return dx.view(x.shape), dw

    return Launches(
        (leaf(_S, _B, _H), leaf(_H)),
        lambda x, weight, backend: fusions.fused_rms_norm(x, weight, _EPS, backend=backend),
        Plain.apply,
        lambda x, weight: torch.nn.functional.rms_norm(x, (_H,), weight, _EPS),
    )


def _bias_swiglu(leaf: Leaf) -> Launches:
    forward, backward = gated.blocked.implementation, gated.blocked.back.implementation
    gating = gated.Gating.of("silu")

    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, bias)
            return forward(x.view(-1, 2 * _H), None, bias, None, *gating).view(*x.shape[:-1], _H)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, bias = ctx.saved_tensors
            dx, _, dbias, _ = backward(dy.view(-1, _H), x.view(-1, 2 * _H), None, bias, None, *gating)
            return dx.view(x.shape), dbias

    return Launches(
        (leaf(_S, _B, 2 * _H), leaf(2 * _H)),
        lambda x, bias, backend: fusions.bias_swiglu_impl(x, bias, backend=backend),
        Plain.apply,
        lambda x, bias: gated.reference(x.view(-1, 2 * _H), None, bias, None, *gating).view(*x.shape[:-1], _H),
    )


def _masked_softmax(leaf: Leaf) -> Launches:
    forward, backward = softmax.blocked.implementation, softmax.blocked.back.implementation
    settings = _A, _S, -1, 0, _SCALE  # causal

    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor) -> Tensor:
            p, share = forward(scores.view(-1, _S), None, None, *settings)
            ctx.save_for_backward(p, share)
            return p.view(scores.shape)

        @staticmethod
        def backward(ctx: Any, dp: Tensor) -> Tensor:
            return backward(dp.view(-1, _S), *ctx.saved_tensors, *settings, None)[0].view(dp.shape)

    return Launches(
        (leaf(_B, _A, _S, _S),),
        lambda scores, backend: fusions.masked_softmax(scores, causal=True, scale=_SCALE, backend=backend),
        Plain.apply,
        lambda scores: softmax.reference(scores.view(-1, _S), None, None, *settings)[0].view(scores.shape),
    )


def _cross_entropy(leaf: Leaf) -> Launches:
    part, terms, run = (0, _V, float("inf"), -100), (0.0, 0.0), RUNNERS["blocked"]

    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
            rows, words = logits.view(-1, _V), target.view(-1)
            parts = cross_entropy_blocked.statistics(run, rows, words, *part, False)
            loss, whole = cross_entropy.loss_of_whole(rows, words, parts.unsqueeze(0), *part, *terms)
            ctx.save_for_backward(rows, words, whole)
            return loss.view(target.shape)

        @staticmethod
        def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
            rows, words, whole = ctx.saved_tensors
            dlogits = torch.empty_like(rows)
            cross_entropy_blocked.gradient_into(run, dlogits, dloss.view(-1), rows, words, whole, *part, *terms)
            return dlogits.view(*dloss.shape, _V), None

    def formula(logits: Tensor, target: Tensor) -> Tensor:
        rows, words = logits.view(-1, _V), target.view(-1)
        parts = cross_entropy.reference.statistics(rows, words, *part, False).unsqueeze(0)
        return cross_entropy.reference.loss(rows, words, parts, *part, *terms).view(target.shape)

    logits = leaf(_S, _B, _V)
    return Launches(
        (logits, torch.randint(_V, (_S, _B), device=logits.device)),
        lambda x, target, backend: fusions.fused_vocab_parallel_cross_entropy(x, target, backend=backend),
        Plain.apply,
        formula,
    )


def _rope(leaf: Leaf) -> Launches:
    forward, backward = rope.blocked.implementation, rope.blocked.back.implementation
    q, k = leaf(_S, _B, _A, _D), leaf(_S, _B, _A, _D)
    cos, sin = torch.randn(2, _S, _D // 2, device=q.device)
    options = None, None, None, "neox", False, 0, (), 1e-6, False
    nothing = q.new_empty(0)

    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            y, y_k, *_ = forward(q, k, cos.unsqueeze(1), sin.unsqueeze(1), *options)
            return y, y_k

        @staticmethod
        def backward(ctx: Any, dy: Tensor, dy_k: Tensor) -> tuple[Tensor, Tensor]:
            kept = cos.unsqueeze(1), sin.unsqueeze(1), *options[:3], nothing, nothing, *options[3:]
            dq, dk, *_ = backward(dy, dy_k, None, None, *kept)
            return dq, dk

    return Launches(
        (q, k),
        lambda q, k, backend: fusions.fused_rope(q, k, cos, sin, backend=backend),
        Plain.apply,
        lambda q, k: rope.reference(q, k, cos.unsqueeze(1), sin.unsqueeze(1), *options)[:2],
    )


def _permute(leaf: Leaf) -> Launches:
    op = permute.permute_blocked
    forward, backward = op.implementation, op.back.implementation
    tokens = leaf(_S * _B, _H)
    rows = fusions.row_map(torch.ones(_S * _B, _E, dtype=torch.bool, device=tokens.device))

    class Plain(Function):
        @staticmethod
        def forward(ctx: Any, tokens: Tensor) -> Tensor:
            permuted, _ = forward(tokens, None, rows.row_of, rows.token_of)
            return permuted

        @staticmethod
        def backward(ctx: Any, dpermuted: Tensor) -> Tensor:
            return backward(dpermuted, dpermuted.new_empty(0), rows.row_of, False)[0]

    return Launches(
        (tokens,),
        lambda tokens, backend: fusions.permute_by(tokens, rows, backend=backend)[0],
        Plain.apply,
        lambda tokens: permute.permute_reference(tokens, None, rows.row_of, rows.token_of)[0],
    )
