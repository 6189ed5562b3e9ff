"""merge_attention and sink_correction: parts of the keys merge into the whole, forward and backward."""

import pytest
import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions import fused_attention, merge_attention, sink_correction

INF = float("inf")


def qkv(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 2, 2, 8, dtype=dtype).requires_grad_() for _ in range(3)]


def gradients(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    dy = [torch.randn(y.shape, dtype=y.dtype) for y in results]
    return [*results, *torch.autograd.grad(results, leaves, dy)]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_parts_of_the_keys_make_the_whole(dtype, near):
    leaves = [*qkv(dtype), torch.tensor([0.3, -1.0], dtype=dtype, requires_grad=True)]
    q, k, v, sink = leaves
    want = gradients(fused_attention(q, k, v, sink=sink, causal=False), leaves)
    parts = [fused_attention(q, k[i : i + 2], v[i : i + 2], causal=False) for i in (0, 2, 4)]
    merged = merge_attention(*merge_attention(*parts[2], *parts[0]), *parts[1])
    torch.testing.assert_close(gradients(sink_correction(*merged, sink), leaves), want, rtol=near, atol=near)


@pytest.mark.parametrize("lse", [(-INF, -INF), (-INF, 1.0), (1.0, -INF), (0.0, 0.0), (200.0, -200.0)])
def test_a_part_without_keys_adds_nothing_and_gives_no_nan(lse):
    outs = [torch.full((1, 1, 1, 2), 0.0 if x == -INF else value) for x, value in zip(lse, (3.0, 5.0), strict=True)]
    lses = [torch.full((1, 1, 1), x) for x in lse]
    leaves = [x.requires_grad_() for x in (*outs, *lses)]
    out, total = merge_attention(outs[0], lses[0], outs[1], lses[1])
    want = {(-INF, -INF): (0.0, -INF), (-INF, 1.0): (5.0, 1.0), (1.0, -INF): (3.0, 1.0), (200.0, -200.0): (3.0, 200.0)}
    value, sum_ = want.get(lse, (4.0, 0.6931471805599453))
    torch.testing.assert_close(out, torch.full_like(out, value))
    torch.testing.assert_close(total.item(), sum_)
    dy = torch.autograd.grad((out, total), leaves, (torch.ones_like(out), torch.ones_like(total)))
    assert all(g.isfinite().all() for g in dy)


def test_both_are_differentiable_twice():
    a, b = torch.randn(2, 1, 2, 3, dtype=torch.float64), torch.randn(2, 1, 2, 3, dtype=torch.float64)
    la, lb = torch.randn(1, 2, 2, dtype=torch.float64), torch.randn(1, 2, 2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (a, la, b, lb)]
    assert torch.autograd.gradgradcheck(merge_attention, leaves)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(sink_correction, (a, la, sink))


def test_a_sink_over_no_keys_leaves_zero():
    out, lse = sink_correction(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -INF), torch.tensor([2.0]))
    assert out.tolist() == [[[[0.0, 0.0]]]]
    assert lse.item() == 2.0


def test_what_does_not_fit_is_refused():
    out, lse = torch.zeros(3, 2, 4, 8), torch.zeros(2, 4, 3)
    with pytest.raises(ShapeError, match=r"out_b must be \[3, 2, 4, 8\], like out_a"):
        merge_attention(out, lse, out[1:], lse)
    with pytest.raises(ShapeError, match=r"lse_b must be \[2, 4, 3\], \[B, A, S\] of out"):
        merge_attention(out, lse, out, lse.mT)
    with pytest.raises(ShapeError, match=r"sink must be \[4\]"):
        sink_correction(out, lse, torch.zeros(2))
