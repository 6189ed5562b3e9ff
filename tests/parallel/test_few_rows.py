"""The product of linear layers against the formula in float64, both ways round."""

import pytest
import torch

from megalith.parallel.few_rows import linear_of_few_rows

ROWS = [(1, 1), (1, 2), (2, 4), (1, 32), (33, 1), (0, 2)]  # [S, B]: below, within and beyond those it turns round


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_formula_rounded_once(shape, has_bias, dtype):
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((*shape, 24), (40, 24), (40,)))
    y = linear_of_few_rows(x, weight, bias if has_bias else None)
    want = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == (*shape, 40)
    # half a unit in the last place of the result, and what float32 sums lose
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_its_gradients_are_those_of_torch():
    given = [torch.randn(*size).bfloat16().requires_grad_() for size in ((1, 8, 24), (40, 24), (40,))]
    dy = torch.randn(1, 8, 40).bfloat16()
    ours = torch.autograd.grad(linear_of_few_rows(*given), given, dy)
    theirs = torch.autograd.grad(torch.nn.functional.linear(*given), given, dy)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-6)  # bfloat16, summed in another order
