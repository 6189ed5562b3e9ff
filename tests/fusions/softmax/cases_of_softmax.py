"""Cases of the masked softmax: ``num_rows`` is heads, the width is keys."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.softmax.masked_softmax import FUSION, masked_softmax
from tests.fusions.harness import WIDTHS, Case, Inputs, Results, distance

B, Sq = 2, 2


def inputs(
    given: tuple[str, ...], mask_shape: tuple[int, ...] | None, A: int, Sk: int, dtype: torch.dtype, device: str
):
    made: Inputs = {"scores": torch.randn(B, A, Sq, Sk, device=device).to(dtype)}
    if mask_shape is not None:
        batch, heads, queries = mask_shape
        mask = torch.rand(batch, A if heads else 1, queries, Sk, device=device) < 0.4
        mask[-1, :, -1] = True  # a query that sees nothing
        made["mask"] = mask
    if "sink" in given:
        made["sink"] = torch.randn(A, device=device).to(dtype)
    return made


def formula(
    scores: Tensor,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float = 1.0,
) -> Tensor:
    queries, Sk = scores.shape[-2:]
    hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    ahead = torch.arange(Sk)[None, :] - torch.arange(Sk - queries, Sk)[:, None]
    left, right = (limit if limit >= 0 else Sk + queries for limit in window)
    outside = (ahead > (0 if causal else right)) | (ahead < -left)
    hidden = hidden | outside.to(scores.device)
    e = torch.where(hidden, 0.0, torch.exp(scores * scale))
    total = e.sum(-1, keepdim=True) + (0.0 if sink is None else torch.exp(sink)[:, None, None])
    return torch.where(total > 0, e / torch.where(total > 0, total, 1.0), 0.0)


@dataclasses.dataclass(frozen=True)
class SoftmaxCase(Case):
    """Backward on Megalith's own paths starts from the rounded probabilities, which is all that they keep."""

    kept: Tensor | None = None

    def wanted(self, inputs: Inputs, got: Results, dy: Sequence[Tensor]) -> Results:
        want = self.expected(inputs, dy)
        if got["0"].element_size() > 2:
            return want
        stored = dataclasses.replace(self, kept=got["0"]).expected(inputs, dy)
        return min(want, stored, key=lambda each: distance(got, each))  # a path reads one or the other

    def expected(self, inputs: Inputs, dy: Sequence[Tensor]) -> Results:
        found = super().expected(inputs, dy)
        if self.kept is None:
            return found  # all from autograd
        p, g = self.kept.double(), dy[0].double()
        r = (p * g).sum(-1, keepdim=True)
        found["dscores"] = self.formula.keywords.get("scale", 1.0) * p * (g - r)
        if "dsink" in found:
            share = 1.0 - found["0"].sum(-1, keepdim=True)
            found["dsink"] = -(r * share).sum(dim=(0, 2, 3))
        return found

    def expanded(self, dy: Tensor) -> Tensor:
        # a constant upstream gradient has no gradient through probabilities that sum to 1, except rounding
        return torch.randn(dy.shape[-1:], device=dy.device).to(dy.dtype).expand(dy.shape)


def case(name: str, *given: str, mask: tuple[int, ...] | None = None, **settings: Any) -> Case:
    return SoftmaxCase(
        name,
        FUSION,
        partial(inputs, given, mask),
        partial(masked_softmax, **settings),
        partial(formula, **settings),
        # dx = scale * p * (dp - r), and r sums over all keys
        terms=lambda scores, **_: {"dscores": scores.shape[-1], "dsink": B * Sq * scores.shape[-1]},
        cost=partial(cost.masked_softmax, **settings),
        shared=("mask",),
        # a probability over 16385 keys is subnormal in float16, without relative accuracy
        widths=[width for width in WIDTHS if width <= 4096],
    )


CASES = [
    case("softmax, scaled", scale=0.125),
    case("softmax, causal", causal=True),
    case("softmax, padding mask for each sequence", mask=(B, 0, Sq), scale=0.5),
    case("softmax, mask for each head, sink", "sink", mask=(1, 1, Sq)),
    case(
        "softmax, mask of keys, causal, window, sink", "sink", mask=(B, 0, 1), causal=True, window=(40, -1), scale=2.0
    ),
    case("softmax, window both ways", window=(50, 20)),
]
