"""Registered operators: torch.compile sees through them to the kernels. Tested on one, traced as if for an H100."""

import pytest
import torch
import triton
import triton.language as tl
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernel_reports import TARGETS, without_interpreter


class Driver:
    """Everything that tracing requests from Triton's driver."""

    def get_current_target(self):
        return TARGETS["sm_90"]


def written_by_kernels() -> list[list[str]]:
    """For each kernel in torch.compile's graphs of an operator and its gradient, the arguments that it writes."""
    from megalith.fusions.activation.kernels.weighted_squared_relu import op

    written = []

    def record(graph, _):
        kernels = [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
        written.extend(kernel.kwargs["tensors_to_clone"] for kernel in kernels)
        return make_boxed_func(graph)

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():  # tensors without data, so nothing is launched
        patch.setattr(triton.runtime.driver, "_active", Driver())
        x, w = torch.ones(4, 40, requires_grad=True), torch.ones(4, 1, requires_grad=True)
        torch.compile(op, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=record))(x, w).sum().backward()
    return written


@triton.jit
def _copy_kernel(x_ptr, y_ptr, strides, num_columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * strides[0] + column, mask=column < num_columns)
    tl.store(y_ptr + row * strides[1] + column, x, mask=column < num_columns)


def _copied(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    strides = x.stride(0), y.stride(0)
    torch.library.wrap_triton(_copy_kernel)[(x.shape[0],)](x, y, strides, x.shape[1], BLOCK=64)
    return y


def kept_of_a_tuple() -> list[tuple[bool, list[str]]]:
    """For a kernel with a tuple argument: whether torch.compile's graph passes it, and what is listed as written."""
    op = torch.library.triton_op("megalith_tests::copied", _copied, mutates_args=())
    found = []

    def record(graph, _):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                found.append(("strides" in node.kwargs["kwargs"], node.kwargs["tensors_to_clone"]))
        return make_boxed_func(graph)

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(triton.runtime.driver, "_active", Driver())
        torch.compile(op, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=record))(torch.ones(4, 48))
    return found


def test_torch_compile_loses_a_tuple_that_a_kernel_is_given_so_kernels_take_strides_one_by_one():
    assert without_interpreter(kept_of_a_tuple) == [(False, ["x_ptr", "y_ptr"])]


def test_torch_compile_sees_the_kernels_and_that_they_write_fresh_memory_only():
    assert without_interpreter(written_by_kernels) == [["y_ptr"], ["dx_ptr", "dw_ptr"]]
