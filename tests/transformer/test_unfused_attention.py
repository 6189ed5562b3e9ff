"""attend: scores of 16-bit inputs are not rounded to 16 bits and do not overflow; keys of a group are not repeated."""

import pytest
import torch
from torch import Tensor

from megalith.fusions import fused_attention
from megalith.transformer.unfused_attention import Scores, attend
from tests.live_memory import LiveMemory

S, B, A, G, D = 48, 2, 4, 2, 64
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril().view(1, 1, S, S)


def inputs(size: float, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output; the values of k and q are about ``size``."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(A, size), (G, size), (G, 1.0), (A, 1.0)]
    return [(factor * torch.randn(S, B, H, D, generator=generator)).to(dtype) for H, factor in sizes]


def with_gradients(function, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, Scores(), CAUSAL)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused_attention(q, k, v, causal=True, backend="reference")[0]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]


@pytest.mark.parametrize("size", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_and_gradients_are_as_near_to_float64_as_those_of_the_fused_operation(size, dtype):
    given = inputs(size, dtype)
    exact = with_gradients(ours, *(x.double() for x in given))
    near = errors(with_gradients(fused, *given), exact)
    for error, of_fused in zip(errors(with_gradients(ours, *given), exact), near, strict=True):
        assert error < 1.5 * of_fused + torch.finfo(dtype).eps / 4


def test_scores_that_fit_into_float16_only_once_they_are_scaled_are_finite():
    q, k = (torch.full((S, B, H, D), 33.0, dtype=torch.float16) for H in (A, G))
    assert torch.finfo(torch.float16).max < D * 33**2
    *_, v, dout = inputs(1.0, torch.float16)
    found = with_gradients(ours, q, k, v, dout)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0], fused(q, k, v), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_do_not_depend_on_how_many_heads_share_a_key(dtype):
    q, k, v, dout = inputs(1.0, dtype)
    repeated = [x.repeat_interleave(A // G, dim=2) for x in (k, v)]
    out, dq, dk, dv = with_gradients(ours, q, k, v, dout)
    whole, dq_whole, *apart = with_gradients(ours, q, *repeated, dout)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close([out, dq], [whole, dq_whole], **tolerance)
    summed = [x.view(S, B, G, A // G, D).float().sum(3).to(dtype) for x in apart]
    torch.testing.assert_close([dk, dv], summed, **tolerance)


def test_keys_and_values_are_not_repeated_for_the_heads_of_a_group():
    q, k, v = torch.randn(4, 1, 32, D), torch.randn(512, 1, 1, D), torch.randn(512, 1, 1, D)
    seen = torch.ones(1, 1, 4, 512, dtype=torch.bool)
    with LiveMemory() as memory:
        attend(q, k, v, Scores(), seen)
    assert memory.largest <= 4 * 32 * 4 * 512  # the scores; 32 copies of the keys would be four times as large


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch's forward mode
def test_16_bit_scores_have_second_derivatives_and_those_of_torch_func():
    q, k, v, dout = inputs(1.0, torch.bfloat16)

    def loss(q: Tensor) -> Tensor:
        return (ours(q, k, v).float() * dout.float()).sum()

    want = with_gradients(ours, q, k, v, dout)[1]
    torch.testing.assert_close(torch.func.grad(loss)(q), want, rtol=2e-2, atol=2e-2)
    _, along = torch.func.jvp(loss, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(along, want.float().sum(), rtol=2e-2, atol=0.5)
    leaf = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(dq.float().square().sum(), leaf)
    wide = [x.double() for x in (q, k, v, dout)]
    exact = wide[0].clone().requires_grad_()
    (dq,) = torch.autograd.grad((ours(exact, *wide[1:3]) * wide[3]).sum(), exact, create_graph=True)
    (want,) = torch.autograd.grad(dq.square().sum(), exact)
    assert (second.double() - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_scores_are_wide(dtype):
    q, k, v, _ = inputs(6.0, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(q, k, v)
    assert errors([found], [ours(*(x.double() for x in (q, k, v)))])[0] < (3e-3 if dtype == torch.bfloat16 else 3e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_they_are_those_of_the_cpu(dtype):
    given = inputs(3.0, dtype)
    on_gpu = with_gradients(lambda q, k, v: attend(q, k, v, Scores(), CAUSAL.cuda()), *(x.cuda() for x in given))
    exact = with_gradients(ours, *(x.double() for x in given))
    for error in errors([x.cpu() for x in on_gpu], exact):
        assert error < 4 * torch.finfo(dtype).eps
