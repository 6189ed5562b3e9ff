"""PartialAttention: one process that simulates every rank of a ring gets the result of one call over the whole row."""

import pytest
import torch
from torch import Tensor

from megalith.fusions import fused_attention
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.blocks import VisibleKeys
from megalith.parallel.context.partial_attention import PartialAttention
from megalith.parallel.context.zigzag import zigzag_positions, zigzag_spans

S, B, A, G, D = 48, 2, 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
# relative L2 error of sums in another order: in float32; with inputs and probabilities rounded to 16 bits
NEAR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2}
SIGHTS = {
    "causal": (True, None, None),
    "both ways": (False, None, None),
    "window": (True, (10, 0), None),
    "documents": (True, None, [[48], [5, 20, 23]]),
    "documents, window both ways": (False, (7, 7), [[48], [5, 20, 23]]),
}


def played(size: int, visible: VisibleKeys, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk and dv, combined from every rank's queries over every rank's keys."""
    S, B, A, _ = q.shape
    spans = [zigzag_spans(S, size, rank) for rank in range(size)]
    held = [zigzag_positions(S, size, rank).to(q.device) for rank in range(size)]
    wide = torch.promote_types(q.dtype, torch.float32)
    found = [torch.zeros_like(x, dtype=wide) for x in (q, q, k, v)]
    for rank, mine in enumerate(held):
        attention = PartialAttention(spans[rank], visible)
        out = torch.zeros_like(q[mine], dtype=wide)
        lse = q.new_full((B, A, len(mine)), -torch.inf, dtype=wide)
        for other, theirs in enumerate(held):
            attention.add_(out, lse, q[mine], k[theirs], v[theirs], spans[other])
        found[0][mine], out = out, out.to(q.dtype)
        for other, theirs in enumerate(held):
            terms = tuple(torch.zeros_like(x, dtype=wide) for x in (q[mine], k[theirs], v[theirs]))
            attention.add_gradients_(terms, dout[mine], q[mine], (k[theirs], v[theirs]), (out, lse), spans[other])
            for whole, at, term in zip(found[1:], (mine, theirs, theirs), terms, strict=True):
                whole[at] += term
    return [x.to(q.dtype) for x in found]


@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_all_ranks_together_give_the_whole(device, dtype, name):
    causal, window, lengths = SIGHTS[name]
    documents = None if lengths is None else PackedSeqParams.from_lengths(lengths)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(S, B, n, D, generator=generator, dtype=torch.float64) for n in (A, G, G, A))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = fused_attention(*leaves, causal=causal, window=window, packed_seq_params=documents)
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    moved = None if documents is None else documents.to(device)
    for size in (1, 2, 4):
        visible = VisibleKeys.of(causal, window, moved)
        got = played(size, visible, *(x.detach().to(device, dtype) for x in (q, k, v, dout)))
        for tensor, expected in zip(got, want, strict=True):
            error = (tensor.double().cpu() - expected).norm() / expected.norm()
            assert error <= NEAR[dtype], size


def test_blocks_whose_gradients_are_products_on_a_cpu_give_the_whole():
    q, k, v, dout = torch.randn(4, 512, 2, 8, 16, generator=torch.Generator().manual_seed(0))  # blocks of 128 by 128
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = fused_attention(*leaves)
    want = [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]
    for a, b in zip(played(2, VisibleKeys.of(True, None, None), q, k, v, dout), want, strict=True):
        assert (a.double() - b).norm() <= NEAR[torch.float32] * b.norm()
