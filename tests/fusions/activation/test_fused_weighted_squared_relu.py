"""fused_weighted_squared_relu: values by hand, Megatron's names, refusals, NaN, addresses beyond 32 bits."""

import pytest
import torch

from megalith.errors import BackendError, ShapeError
from megalith.fusions import (
    WeightedSquaredReLUFunction,
    weighted_squared_relu,
    weighted_squared_relu_back,
    weighted_squared_relu_impl,
)
from tests.kernel_reports import in_interpreter

PATHS = ["triton", "blocked", "reference"]


@pytest.mark.parametrize("backend", PATHS)
def test_values_worked_out_by_hand(backend, device):
    x = torch.tensor([[-1.0, 2.0, 3.0]], device=device, requires_grad=True)
    w = torch.tensor([[0.5]], device=device, requires_grad=True)
    y = weighted_squared_relu_impl(x, w, backend)
    assert y.tolist() == [[0.0, 2.0, 4.5]]
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert dx.tolist() == [[0.0, 2.0, 3.0]]
    assert dw.tolist() == [[13.0]]


def test_every_name_computes_the_same():
    x, w, dy = torch.randn(4, 6), torch.rand(4, 1), torch.randn(4, 6)
    assert torch.equal(weighted_squared_relu(x, w), weighted_squared_relu_impl(x, w))
    assert torch.equal(WeightedSquaredReLUFunction.apply(x, w), weighted_squared_relu_impl(x, w))
    leaves = [x.double().requires_grad_(), w.double().requires_grad_()]
    want = torch.autograd.grad(torch.relu(leaves[0]) ** 2 * leaves[1], leaves, dy.double())
    got = weighted_squared_relu_back(dy.double(), x.double(), w.double())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", PATHS)
def test_nan_and_inf_pass(backend, device):
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0]], device=device, requires_grad=True)
    w = torch.ones(1, 1, device=device, requires_grad=True)
    y = weighted_squared_relu_impl(x, w, backend)
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert str([y.tolist(), dx.tolist(), dw.tolist()]) == "[[[nan, inf, 0.0, 1.0]], [[nan, inf, 0.0, 2.0]], [[nan]]]"


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    x = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0).requires_grad_()
    y = weighted_squared_relu_impl(x, torch.ones(3, 1), "triton")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.tolist() == dx.tolist() == [[4.0] * 4] * 3


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.ones(2, 3), torch.ones(2), r"weights must be \[2, 1\], one for each token of input \[2, 3\]; got \[2\]"),
        (torch.ones(()), torch.ones(1), r"input must be \[\.\.\., F\]; got a tensor without dimensions"),
        (torch.ones(2, 3).long(), torch.ones(2, 1), r"input must be float16, .*; got torch.int64"),
        (torch.ones(2, 3), torch.ones(2, 1, device="meta"), r"on one device; got input on cpu, weights on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(x, w, message):
    with pytest.raises(ShapeError, match=message):
        weighted_squared_relu_impl(x, w)


def test_a_path_that_it_does_not_have_is_refused():
    with pytest.raises(BackendError, match=r"'aten': it has no such path, only triton, compile, blocked, reference"):
        weighted_squared_relu_impl(torch.ones(2, 3), torch.ones(2, 1), "aten")
