"""The product of linear layers against the formula in float64, whole and in blocks of outputs."""

import pytest
import torch

from megalith.parallel.few_rows import linear_of_few_rows

ROWS = [(1, 1), (1, 2), (2, 4), (1, 32), (33, 1), (0, 2)]  # [S, B]: below, within and beyond those it splits
AVX2, AVX512 = "AVX2", "AVX512"


@pytest.fixture(params=[AVX2, AVX512])
def capability(request, monkeypatch):
    """Of the processor, as torch says, with two threads and MKL."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return request.param


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(24, 40), (512, 640), (2048, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_formula_rounded_once(shape, has_bias, sizes, dtype):
    given, out = sizes
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((*shape, given), (out, given), (out,)))
    y = linear_of_few_rows(x, weight, bias if has_bias else None)
    want = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == (*shape, out)
    # half a unit in the last place of the result, and what float32 sums of 2,048 products of about 1 lose
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.usefixtures("capability")
def test_its_gradients_are_those_of_torch():
    given = [torch.randn(*size).requires_grad_() for size in ((1, 8, 512), (640, 512), (640,))]
    dy = torch.randn(1, 8, 640)
    ours = torch.autograd.grad(linear_of_few_rows(*given), given, dy)
    theirs = torch.autograd.grad(torch.nn.functional.linear(*given), given, dy)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_it_is_in_blocks_only_where_that_was_measured_to_be_faster(capability, monkeypatch):
    def is_in_blocks(rows: int, given: int, out: int, dtype: torch.dtype = torch.float32) -> bool:
        called = []
        monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: called.append(None) or x @ w.t())
        linear_of_few_rows(torch.randn(rows, given, dtype=dtype), torch.randn(out, given, dtype=dtype), None)
        return not called

    few = {is_in_blocks(rows, 512, 640) for rows in (1, 2, 32)}
    assert few == {capability == AVX2}
    assert not any((is_in_blocks(0, 512, 640), is_in_blocks(33, 512, 640)))
    assert not any((is_in_blocks(8, 512, 384), is_in_blocks(8, 512, 700)))  # too small, not of whole blocks
    assert not is_in_blocks(8, 512, 640, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_in_blocks(8, 512, 640)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert is_in_blocks(2, 512, 640) == (capability == AVX2)
    assert not is_in_blocks(1, 512, 640)
