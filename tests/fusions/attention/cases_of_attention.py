"""Cases of fused attention: rows are B, the width is S; two heads of one group."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.attention.attention import fused_attention
from megalith.fusions.attention.paths import CAPPED_FUSION, FUSION
from megalith.packed_seq_params import PackedSeqParams
from tests.fusions.harness import Case, Inputs, Results

WIDTHS = (1, 64, 7)  # most tests use the last
CACHED = 9  # number of keys before the first query, in the case with a cache


def lengths(S: int) -> list[int]:
    return [S] if S < 4 else [S // 4, 1, S - S // 4 - 1]


# torch.compile traces a look-up, but not the construction
PACKED: Mapping[tuple[int, int], PackedSeqParams] = {
    (B, S): PackedSeqParams.from_lengths([lengths(S), [S]] * (B // 2) + [lengths(S)] * (B % 2))
    for B in (1, 2, 3, 4, 5, 64)
    for S in (4, *WIDTHS)
}


def inputs(D: int, Dv: int, cached: int, has_sink: bool, B: int, S: int, dtype: torch.dtype, device: str) -> Inputs:
    D, Dv = (D, Dv) if S > 7 else (8, 8)  # gradcheck perturbs every entry
    shapes = {"q": (S, B, 2, D), "k": (S + cached, B, 1, D), "v": (S + cached, B, 1, Dv)}
    made: Inputs = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
    if has_sink:
        made["sink"] = torch.randn(2, device=device).to(dtype)
    return made


def compute(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, documents: bool = False, **kwargs: Any) -> Any:
    packed = PACKED[q.shape[1], q.shape[0]].to(q.device) if documents and q.shape[1] else None
    return fused_attention(q, k, v, sink=sink, packed_seq_params=packed, **kwargs)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    documents: bool = False,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    (Sq, B, A, D), Sk = q.shape, k.shape[0]
    distance = torch.arange(Sk) - torch.arange(Sk - Sq, Sk).view(-1, 1)
    left, right = window
    seen = torch.ones(B, 1, Sq, Sk, dtype=torch.bool)
    seen &= (distance <= 0 if causal else True) & (distance >= -left if left >= 0 else True)
    seen &= distance <= right if right >= 0 else True
    if documents:
        for b in range(B):
            parts = lengths(Sq) if b % 2 == 0 else [Sq]
            seen[b] &= torch.block_diag(*(torch.ones(n, n) for n in parts)).bool()
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, *(x.repeat_interleave(A // x.shape[2], 2) for x in (k, v))))
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores) * seen.to(q.device)
    total = weights.sum(dim=-1) if sink is None else weights.sum(dim=-1) + torch.exp(sink).unsqueeze(-1)
    return (weights @ v / total.unsqueeze(-1)).permute(2, 0, 1, 3), torch.log(total)


def terms(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> dict[str, int]:
    (Sq, B, A, D), Sk = q.shape, k.shape[0]
    keys, queries = max(1, Sk), max(1, Sq) * A
    of_score = 2  # dout v minus dout out, which may cancel
    return {
        "0": keys, "1": D * keys, "dq": of_score * keys, "dk": of_score * queries, "dv": queries,
        "dsink": max(1, B * Sq),
    }  # fmt: skip


def upstream_of_stored(got: Results, exact: Results, dy: Sequence[Tensor]) -> Sequence[Tensor]:
    """Upstream gradients (dout, dlse) whose exact gradients are those of a backward that reads the rounded ``out``.

    A score's gradient is P (dout v - dout out + dlse), so an error of ``out`` acts like adding -dout (out_stored - out)
    to dlse. It matters where one key takes nearly all of the softmax, as dout v and dout out then cancel.
    """
    dout, dlse = (g.double() for g in dy)
    error = (dout * (got["0"].double() - exact["0"])).sum(dim=-1)  # [S, B, A]
    return [dout, dlse - error.permute(1, 2, 0)]


def case(
    name: str,
    D: int = 64,
    Dv: int = 64,
    cached: int = 0,
    has_sink: bool = False,
    documents: bool = False,
    softcap: float | None = None,
    **settings: Any,
) -> Case:
    settings |= {} if softcap is None else {"softcap": softcap}
    return Case(
        name,
        FUSION if softcap is None else CAPPED_FUSION,
        partial(inputs, D, Dv, cached, has_sink),
        partial(compute, documents=documents, **settings),
        partial(formula, documents=documents, **settings),
        terms=terms,
        upstream_of_stored=upstream_of_stored,
        cost=partial(cost.attention, documents=documents),
        widths=WIDTHS,
    )


CASES = [
    case("attention"),
    case("attention, window and sink", D=24, has_sink=True, window=(20, 0)),
    case("attention, documents", D=128, Dv=128, documents=True),
    case("attention, softcap and sink", D=128, Dv=128, has_sink=True, scale=0.4, softcap=3.0),
    case(
        "attention, after a cache, both ways, other head size",
        D=96,
        Dv=64,
        cached=CACHED,
        causal=False,
        window=(-1, 30),
    ),
]
