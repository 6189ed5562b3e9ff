"""Registered operators: torch.compile sees through them to the kernels. Shown on one, traced as if for an H100."""

import pytest
import torch
import triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernel_reports import TARGETS, without_interpreter


class Driver:
    """All that a trace asks of Triton's driver."""

    def get_current_target(self):
        return TARGETS["sm_90"]


def written_by_kernels() -> list[list[str]]:
    """For each kernel in the graphs that torch.compile makes of an operator and its gradient, what it writes."""
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


def test_torch_compile_sees_the_kernels_and_that_they_write_fresh_memory_only():
    assert without_interpreter(written_by_kernels) == [["y_ptr"], ["dx_ptr", "dw_ptr"]]
