"""Eager mode calls implementations without operator dispatch, except where something must see an operator."""

import copy
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

from megalith.fusions import fused_rms_norm, glu, quantize
from megalith.fusions.core.registration import Operator, register_without_gradient, wrap_triton
from tests.fusions.observe import operator_calls
from tests.kernel_reports import without_interpreter

X, W = torch.linspace(-2.0, 3.0, 4 * 64).view(4, 1, 64), torch.linspace(0.5, 1.5, 64)


def norm(x: Tensor, w: Tensor) -> Tensor:
    return fused_rms_norm(x, w, backend="blocked")


def registered(x: Tensor, w: Tensor) -> Tensor:
    """The same, dispatched by torch."""
    return torch.ops.megalith.norm_blocked(x, None, w, None, None, None, None, 0, 0.0, 1e-5, "RMSNorm", False)[0]


def leaves() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def dispatched(call: Callable[[], object]) -> set[str]:
    """Names of the operators that go through torch's dispatcher."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return {event.name for event in profiler.events()}


def forward_and_backward(compute: Callable[..., Tensor]) -> list[Tensor]:
    x, w = leaves()
    y = compute(x, w)
    return [y.detach(), *torch.autograd.grad(y, (x, w), X.sin())]


def test_no_operator_is_dispatched_forward_or_backward():
    names = dispatched(lambda: forward_and_backward(norm))
    assert "aten::mul" in names
    assert {name for name in names if name.startswith("megalith::")} == set()
    with torch.no_grad():
        assert not any("norm_blocked" in name for name in dispatched(lambda: norm(*leaves())))
    assert not any(
        name.startswith("megalith::")
        for name in dispatched(lambda: quantize(W.view(1, 64), "mxfp8", backend="blocked"))
    )


def test_results_and_gradients_are_those_of_the_operator_bit_for_bit():
    for got, want in zip(forward_and_backward(norm), forward_and_backward(registered), strict=True):
        assert torch.equal(got, want)


def test_dispatch_modes_see_the_operators():
    names = [str(operator) for operator, _ in operator_calls(lambda: forward_and_backward(norm))]
    assert names == ["megalith.norm_blocked.default", "megalith.norm_blocked_back.default"]


def test_a_trace_and_an_export_hold_the_operator():
    assert "megalith.norm_blocked" in make_fx(norm)(X, W).code

    class Norm(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return norm(x, w)

    for strict in (True, False):
        assert "megalith.norm_blocked" in torch.export.export(Norm(), (X, W), strict=strict).graph_module.code


def test_tensors_without_data_get_shapes():
    assert norm(X.to("meta"), W.to("meta")).shape == X.shape
    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(X), mode.from_tensor(W)
        assert norm(x, w).shape == X.shape
    assert norm(x, w).shape == X.shape  # outside of the mode too


def test_a_subclass_of_tensor_is_asked_for_the_operator():
    assert isinstance(norm(TwoTensor(X, X), W), TwoTensor)


def outcome(transform: Callable[..., Tensor], compute: Callable[..., Tensor]) -> list[object] | str:
    try:
        return transform(compute).tolist()
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap's, for an operator in a loop
def test_transforms_of_torch_func_do_what_they_do_to_the_operator():
    def vmapped(compute: Callable[..., Tensor]) -> Tensor:
        return torch.func.vmap(compute, in_dims=(0, None))(X.view(2, 2, 1, 64), W)

    def differentiated(compute: Callable[..., Tensor]) -> Tensor:
        return torch.func.grad(lambda x: (compute(x, W) * X.sin()).sum())(X)

    for transform in (vmapped, differentiated):
        assert outcome(transform, norm) == outcome(transform, registered)


def test_in_inference_mode_and_of_a_frozen_module_nothing_is_recorded():
    with torch.inference_mode():
        assert norm(X, W).is_inference()
    assert norm(X, W).grad_fn is None
    parameter = nn.Parameter(W)
    assert norm(X, parameter).requires_grad
    assert not norm(X, copy.deepcopy(parameter).requires_grad_(False)).requires_grad


def test_what_is_saved_goes_through_hooks_once():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or len(packed) - 1, lambda i: packed[i]):
        got = forward_and_backward(norm)
    assert len(packed) == 4  # x, the weight, the empty mean, 1 / root mean square
    assert torch.equal(got[1], forward_and_backward(norm)[1])


def kernels_launched() -> list[object]:
    """What a norm on a CPU launches without the interpreter, and the type of its kernel."""
    from megalith.fusions.norm.kernels import add_norm

    launched = []

    def record(kernel: object) -> dict[tuple[int], Callable[..., None]]:
        launched.append(wrap_triton(kernel) is kernel)
        return defaultdict(lambda: lambda *_, **__: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_norm, "wrap_triton", record)
        y, *_ = add_norm.op(X, None, W.clone().requires_grad_(), None, None, None, None, 0, 0.0, 1e-5, "RMSNorm", False)
        y.sum().backward()
    return launched


def kernels_launched_by_an_opaque_operator() -> list[bool]:
    """Called eagerly, and dispatched."""
    from megalith.fusions.norm.kernels.norm import forward_kernel

    launched = []

    def outputs(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def forward(x: Tensor) -> Tensor:
        launched.append(wrap_triton(forward_kernel) is forward_kernel)
        return x.clone()

    call = register_without_gradient("launches_unseen", forward, outputs, opaque=True)
    call(X)
    torch.ops.megalith.launches_unseen(X)
    return launched


def test_kernels_are_launched_as_they_are_forward_and_backward():
    assert without_interpreter(kernels_launched) == [True, True]
    assert without_interpreter(kernels_launched_by_an_opaque_operator) == [True, True]


@pytest.mark.parametrize("path", ["triton", "blocked"])
def test_an_operator_of_rows_takes_any_shape_and_records_no_view(path, device):
    x = X.view(2, 2, 64).clone().to(device).requires_grad_()
    w = torch.linspace(0.5, 1.5, 4, device=device).view(2, 2, 1).requires_grad_()
    y = glu(x, activation="silu", weights=w, backend=path)
    assert "glu" in y.grad_fn.name()
    assert not y._is_view()
    assert [node.name() for node, _ in y.grad_fn.next_functions if node] == ["torch::autograd::AccumulateGrad"] * 2
    rows = glu(x.flatten(0, 1), activation="silu", weights=w.flatten(0, 1), backend=path)
    assert torch.equal(y.flatten(0, 1), rows)
    dy = y.detach().sin()
    got, want = torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(rows, (x, w), dy.flatten(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    calls = operator_calls(lambda: glu(x, activation="silu", weights=w, backend=path).sum().backward())
    assert len(calls) == 2
    for operator, arguments in calls:
        torch.library.opcheck(operator, tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "operator"])
def test_results_without_a_gradient_get_no_zeros_in_backward_and_absent_gradients_do(traced):
    def outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x), x.new_empty(7)

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 2.0 * x, 3.0 * x, x.new_ones(7)

    def gradients(da: Tensor, db: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor]:
        return (torch.empty_like(x),)

    def backward(da: Tensor, db: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor]:
        return (2.0 * da + 3.0 * db,)

    def saves(results: tuple[Tensor, ...], x: Tensor) -> tuple[object, ...]:
        return x, results[0]

    name = f"with_a_statistic_{traced}".lower()
    operator = Operator(outputs, gradients, of=("x",), saves=saves, num_differentiable=2)
    op = operator.register(name, forward, backward, opaque=True)
    call = getattr(torch.ops.megalith, name) if traced else op
    for root, want in ((0, 2.0), (1, 3.0)):
        x = X.clone().requires_grad_()
        y = call(x)[root]
        with profile(activities=[ProfilerActivity.CPU]) as events:
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx, torch.full_like(X, want))
        zeros = [event for event in events.events() if event.name == "aten::zeros"]
        assert len(zeros) == 1  # for the other result that has a gradient


def test_backward_does_not_run_for_an_input_that_has_no_gradient():
    calls = []

    def outputs(x: Tensor, threshold: Tensor) -> Tensor:
        return torch.empty_like(x)

    def gradients(dy: Tensor, x: Tensor, threshold: Tensor) -> tuple[Tensor]:
        calls.append(dy)
        return (torch.empty_like(x),)

    compute = Operator(outputs, gradients, of=("x",)).register(
        "above_a_threshold", lambda x, threshold: x * (x > threshold), gradients, opaque=True
    )
    x, threshold = torch.ones(3), torch.zeros((), requires_grad=True)
    for function in (compute, torch.ops.megalith.above_a_threshold):
        assert torch.autograd.grad(function(x, threshold).sum(), threshold, allow_unused=True) == (None,)
    assert calls == []
