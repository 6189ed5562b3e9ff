"""context_attention: on 2 and 4 ranks, with every exchange, against a plain softmax in one process, with gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import fusions
from megalith.errors import ConfigError, ShapeError
from megalith.numerics.dropout import Dropout, DropoutKey, attention_keep_mask
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.attention import ContextMethod, context_attention
from megalith.parallel.context.partial_attention import PartialAttention
from megalith.parallel.context.ring import Ring
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.torch_compat.distributed import all_gather_into, reduce_scatter_into
from tests.rank_pool import ranks

S, D = 24, 6  # a chunk is 3 tokens on 4 ranks
P = 0.3
EXACT = 1e-12  # sums of a few dozen terms in float64
METHODS = {
    2: [ContextMethod("ring"), ContextMethod("all_gather"), ContextMethod("all_to_all")],
    4: [ContextMethod("ring"), ContextMethod("all_gather"), ContextMethod("all_to_all"), ContextMethod("two_level", 2)],
}
DOCUMENTS = [[24], [7, 17], [1, 2, 3, 4, 5, 6, 3], [12, 12], [20, 4]]


@dataclass(frozen=True)
class Case:
    causal: bool = True
    window: int | None = None
    documents: list[list[int]] | None = None
    heads: tuple[int, int] = (4, 2)
    drops: bool = False
    sink: bool = False
    scale: float | None = None
    softcap: float | None = None

    @property
    def num_rows(self) -> int:
        return len(self.documents or [0, 0])

    @property
    def packed(self) -> PackedSeqParams | None:
        return None if self.documents is None else PackedSeqParams.from_lengths(self.documents)

    def visible(self) -> Tensor:
        """[B, S, S]"""
        distance = torch.arange(S).unsqueeze(1) - torch.arange(S)
        seen = (distance >= 0) if self.causal else torch.ones(S, S, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        if self.documents is None:
            return seen.expand(self.num_rows, S, S)
        blocks = [torch.block_diag(*(torch.ones(n, n) for n in row)).bool() for row in self.documents]
        return seen & torch.stack(blocks)

    def sides(self) -> tuple[int, int] | None:
        return None if self.window is None else (self.window - 1, 0 if self.causal else self.window - 1)

    def key(self) -> DropoutKey | None:
        # unordered ids: nothing may be derived from the first one
        ids = torch.randperm(self.num_rows * S, generator=torch.Generator().manual_seed(5)).view(-1, S)
        return DropoutKey(7, 3, ids) if self.drops else None


CASES = {
    "causal": Case(),
    "bidirectional": Case(causal=False),
    "one group": Case(heads=(4, 1)),
    "as many groups as heads": Case(heads=(4, 4)),
    "odd heads": Case(heads=(12, 3)),
    "window within a chunk": Case(window=2),
    "window over several chunks": Case(window=8),
    "window both ways": Case(causal=False, window=5),
    "documents": Case(documents=DOCUMENTS),
    "two rows": Case(documents=[[7, 17], [24]], window=6),
    "documents both ways": Case(documents=DOCUMENTS, causal=False),
    "documents and a window": Case(documents=DOCUMENTS, window=4),
    "sink": Case(sink=True),
    "scale and softcap": Case(scale=0.7, softcap=1.5),
    "capped": Case(documents=DOCUMENTS, window=4, sink=True, softcap=1.5),
    "dropout": Case(drops=True),
    "dropout, sink, scale and softcap": Case(drops=True, sink=True, scale=0.7, softcap=1.5),
    "dropout, documents and a window": Case(documents=DOCUMENTS, window=6, causal=False, drops=True, heads=(8, 2)),
}
Answer = list[Tensor]  # out, dq, dk, dv, and with a sink dsink


def example(case: Case) -> list[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(1)
    (A, G), B = case.heads, case.num_rows
    return [torch.randn(S, B, n, D, generator=generator, dtype=torch.float64) for n in (A, G, G, A)]


def sink_of(case: Case) -> list[Tensor]:
    """One score per head, all different; nothing without a sink."""
    return [torch.linspace(-1.0, 2.0, case.heads[0], dtype=torch.float64).requires_grad_()] if case.sink else []


def in_one_process(case: Case) -> Answer:
    """The answer in one process, with the sink's gradient by row, head and query: ``summed`` adds up each head's."""
    q, k, v, dout = example(case)
    sinks = [x.detach().view(-1, 1, 1).repeat(case.num_rows, 1, S, 1).requires_grad_() for x in sink_of(case)]
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *sinks]
    k_of_heads, v_of_heads = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k_of_heads) * (D**-0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    weights = torch.exp(scores) * case.visible().unsqueeze(1)
    total = weights.sum(dim=-1, keepdim=True)
    if case.sink:
        total = total + torch.exp(sinks[0])
    probs = weights / total
    if (key := case.key()) is not None:
        probs = probs * attention_keep_mask(key, P, q.shape[2], S, head_offset=1) / (1.0 - P)
    out = torch.einsum("bast,tbad->sbad", probs, v_of_heads)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def summed(answer: Answer) -> Answer:
    return [*answer[:4], *(x.sum(dim=(0, 2, 3)) for x in answer[4:])]


def attended(method: ContextMethod, case: Case, dtype: torch.dtype = torch.float64) -> Answer:
    """This rank's part of the answer."""
    mine = zigzag_positions(S, dist.get_world_size(), dist.get_rank())
    *leaves, dout = (x[mine].to(dtype) for x in example(case))
    leaves = [x.requires_grad_() for x in leaves]
    sink = [x.detach().to(dtype).requires_grad_() for x in sink_of(case)]
    key = case.key()
    drops = None if key is None else Dropout(P, DropoutKey(key.seed, key.step, key.tokens[:, mine]))
    attend = partial(context_attention, *leaves, dist.group.WORLD, method, dropout=drops, head_offset=1)
    options = {"scale": case.scale, "softcap": case.softcap, "sink": sink[0] if sink else None}
    out = attend(causal=case.causal, window=case.sides(), packed_seq_params=case.packed, **options)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *sink], dout)]


def on_this_rank(method: ContextMethod) -> dict[str, Answer]:
    return {name: attended(method, case) for name, case in CASES.items()}


def joined(answers: list[Answer]) -> Answer:
    """The parts of all ranks in position order, and the sum of their parts of a sink's gradient."""
    order = torch.cat([zigzag_positions(S, len(answers), rank) for rank in range(len(answers))]).argsort()
    parts = list(zip(*answers, strict=True))
    return [*(torch.cat(part)[order] for part in parts[:4]), *(sum(part) for part in parts[4:])]


@pytest.mark.parametrize(("size", "method"), [(size, method) for size in METHODS for method in METHODS[size]], ids=str)
def test_every_exchange_gives_what_one_process_does(size, method):
    answers = ranks(size, on_this_rank, method)
    for name, case in CASES.items():
        got, want = joined([answer[name] for answer in answers]), summed(in_one_process(case))
        for what, tensor, expected in zip(("out", "dq", "dk", "dv", "dsink"), got, want, strict=False):
            assert torch.allclose(tensor, expected, rtol=EXACT, atol=EXACT), (name, what)


NARROW = {
    "aten": [name for name, case in CASES.items() if not case.drops],
    "triton": ["two rows", "capped"],
}
# relative L2 error: of float32; of inputs rounded to 16 bits, with probabilities rounded once more in the kernels
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def on_a_path(path: str, dtype: torch.dtype) -> dict[str, Answer]:
    with fusions.use(path):
        return {name: attended(ContextMethod("ring"), CASES[name], dtype) for name in NARROW[path]}


@pytest.mark.parametrize(
    ("path", "dtype"), [("aten", torch.float32), ("aten", torch.bfloat16), ("triton", torch.float32)]
)
def test_fused_paths_give_it_too(path, dtype):
    answers = ranks(2, on_a_path, path, dtype, timeout=200)
    for name in NARROW[path]:
        got, terms = joined([answer[name] for answer in answers]), in_one_process(CASES[name])
        for tensor, expected, summands in zip(got, summed(terms), terms, strict=True):
            assert tensor.dtype == dtype
            assert (tensor - expected).norm() <= NEAR[dtype] * summands.norm(), name  # a sink's terms cancel


def traffic(method: ContextMethod) -> dict[str, list[int]]:
    """The number of elements this rank sends in each message or collective, forward and backward, by kind."""
    found: dict[str, list[int]] = {"sent": [], "gathered": [], "reduced": [], "traded": []}
    send, batch = dist.isend, dist.batch_isend_irecv

    def noting(kind: str, compute: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[kind].append(args[at].numel())
            return compute(*args, **kwargs)

        return call

    def exchange(ops: list[dist.P2POp]) -> Any:
        found["sent"].extend(op.tensor.numel() for op in ops if op.op is send)
        return batch(ops)

    collectives = "megalith.topology.collectives"
    with (
        patch.object(dist, "batch_isend_irecv", exchange),
        patch(f"{collectives}.all_gather_into", noting("gathered", all_gather_into, 1)),
        patch(f"{collectives}.reduce_scatter_into", noting("reduced", reduce_scatter_into, 1)),
        patch.object(dist, "all_to_all_single", noting("traded", dist.all_to_all_single, 1)),
    ):
        attended(method, CASES["causal"])
    return {kind: sizes for kind, sizes in found.items() if sizes}


@pytest.mark.parametrize("method", METHODS[4], ids=str)
def test_what_travels_is_what_the_method_says(method):
    B, (A, G), part = CASES["causal"].num_rows, CASES["causal"].heads, S // 4
    kv, q = part * B * G * D, part * B * A * D
    rounds = {  # ring of n: k and v are sent n - 1 times forward, as often in backward, and their gradients n times
        "ring": {"sent": [kv] * 2 * (3 + 3 + 4)},
        "all_gather": {"gathered": [kv] * 2, "reduced": [4 * kv] * 2},
        # for 4 ranks, each of 2 groups is duplicated; q, k, v, out, and their gradients back
        "all_to_all": {"traded": [q, 2 * kv, 2 * kv, q] * 2},
        "two_level": {"sent": [kv] * 2 * (1 + 1 + 2), "traded": [q, kv, kv, q] * 2},
    }
    for found in ranks(4, traffic, method):
        assert {kind: sorted(sizes) for kind, sizes in found.items()} == {
            kind: sorted(sizes) for kind, sizes in rounds[method.name].items()
        }


def order_of_work() -> list[str]:
    seen: list[str] = []
    pass_on, add_, add_gradients_ = Ring.pass_on, PartialAttention.add_, PartialAttention.add_gradients_

    def noting(what: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(what)
            return compute(*args)

        return call

    with (
        patch.object(Ring, "pass_on", noting("send", pass_on)),
        patch.object(PartialAttention, "add_", noting("attend", add_)),
        patch.object(PartialAttention, "add_gradients_", noting("back", add_gradients_)),
    ):
        attended(ContextMethod("ring"), CASES["causal"])
    return seen


def test_the_next_keys_are_under_way_while_a_rank_computes():
    for seen in ranks(2, order_of_work):
        assert seen == ["send", "attend", "attend", "send", "back", "send", "back", "send"]


def refusals() -> None:
    def x(length: int, heads: int) -> Tensor:
        return torch.zeros(length, 1, heads, D)

    group, packed = dist.group.WORLD, PackedSeqParams.from_lengths([[4]])
    with pytest.raises(ShapeError, match=r"the 3 heads of a rank must be divisible by the 2 ranks of cp"):
        context_attention(x(4, 3), x(4, 3), x(4, 3), group, ContextMethod("all_to_all"))
    with pytest.raises(ShapeError, match=r"whole rows of 8 tokens, 4 on each of the 2 ranks of cp; got rows of 4"):
        context_attention(x(4, 2), x(4, 2), x(4, 2), group, ContextMethod(), packed_seq_params=packed)
    with pytest.raises(ConfigError, match=r"inner \(3\) must divide the 2 ranks of cp"):
        context_attention(x(4, 3), x(4, 3), x(4, 3), group, ContextMethod("two_level", 3))
    with pytest.raises(ConfigError, match=r"window must be \(left, 0\) or \(left, -1\) with causal=True"):
        context_attention(x(4, 2), x(4, 2), x(4, 2), group, ContextMethod(), window=(1, 1))
    with pytest.raises(ShapeError, match=r"splits a row into 4 chunks, .* its length \(6\) must be divisible"):
        context_attention(x(3, 2), x(3, 2), x(3, 2), group, ContextMethod())


def test_what_does_not_fit_is_refused_on_every_rank():
    ranks(2, refusals)
