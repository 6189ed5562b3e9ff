"""context_attention: on 2 and 4 ranks, by every exchange, the softmax spelled out in one process, and its gradients."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.numerics.dropout import Dropout, DropoutKey, attention_keep_mask
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.attention import ContextMethod, context_attention
from megalith.parallel.context.zigzag import zigzag_positions
from tests.rank_pool import ranks

S, D = 24, 6  # on 4 ranks a chunk is 3 tokens
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
    sizes: tuple[int, ...] = field(default=(2, 4))

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
        # ids of no order: nothing may be worked out from the first of them
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
    "documents both ways": Case(documents=DOCUMENTS, causal=False),
    "documents and a window": Case(documents=DOCUMENTS, window=4),
    "dropout": Case(drops=True),
    "dropout, documents and a window": Case(documents=DOCUMENTS, window=6, causal=False, drops=True, heads=(8, 2)),
}
Answer = list[Tensor]  # out, dq, dk, dv


def example(case: Case) -> list[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(1)
    (A, G), B = case.heads, case.num_rows
    return [torch.randn(S, B, n, D, generator=generator, dtype=torch.float64) for n in (A, G, G, A)]


def in_one_process(case: Case) -> Answer:
    q, k, v, dout = example(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k_of_heads, v_of_heads = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k_of_heads) / D**0.5
    probs = torch.softmax(scores.masked_fill(~case.visible().unsqueeze(1), -torch.inf), dim=-1)
    if (key := case.key()) is not None:
        probs = probs * attention_keep_mask(key, P, q.shape[2], S, head_offset=1) / (1.0 - P)
    out = torch.einsum("bast,tbad->sbad", probs, v_of_heads)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_this_rank(method: ContextMethod, names: list[str]) -> dict[str, Answer]:
    """The rank's part of each case's answer."""
    mine = zigzag_positions(S, dist.get_world_size(), dist.get_rank())
    answers = {}
    for name in names:
        case = CASES[name]
        *leaves, dout = (x[mine].clone() for x in example(case))
        leaves = [x.requires_grad_() for x in leaves]
        key = case.key()
        drops = None if key is None else Dropout(P, DropoutKey(key.seed, key.step, key.tokens[:, mine]))
        out = context_attention(
            *leaves,
            dist.group.WORLD,
            method,
            causal=case.causal,
            window=case.sides(),
            packed_seq_params=case.packed,
            dropout=drops,
            head_offset=1,
        )
        answers[name] = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return answers


def joined(answers: list[Answer]) -> Answer:
    """The parts of all ranks in the order of positions."""
    order = torch.cat([zigzag_positions(S, len(answers), rank) for rank in range(len(answers))]).argsort()
    return [torch.cat(parts)[order] for parts in zip(*answers, strict=True)]


@pytest.mark.parametrize(("size", "method"), [(size, method) for size in METHODS for method in METHODS[size]], ids=str)
def test_every_exchange_gives_what_one_process_does(size, method):
    answers = ranks(size, on_this_rank, method, list(CASES))
    for name, case in CASES.items():
        got, want = joined([answer[name] for answer in answers]), in_one_process(case)
        for what, tensor, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert torch.allclose(tensor, expected, rtol=EXACT, atol=EXACT), (name, what)
