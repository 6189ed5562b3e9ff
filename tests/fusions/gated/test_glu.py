"""glu: values by hand and from torch, both forms of its gradient, refusals, NaN, addresses beyond 32 bits."""

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_cpp_code

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import Activation, glu, glu_back
from megalith.fusions.activation import bias_gelu_formulas as gelu_formulas
from megalith.fusions.core.compiler import why_not_compile
from megalith.fusions.gated import float8_formulas as glu_float8_formulas
from megalith.fusions.gated import formulas as glu_formulas
from megalith.torch_compat.compiler import compile_apart
from tests.fusions.gated.cases_of_glu import ACTIVATIONS
from tests.kernel_reports import in_interpreter

PATHS = ["triton", "blocked", "reference"]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("backend", PATHS)
def test_values_worked_out_by_hand(backend, device):
    x = torch.tensor([[1.0, -2.0, 9.0, 3.0, 5.0, -9.0]], device=device, requires_grad=True)  # gate | up
    y = glu(x, activation="relu", offset=1.0, clamp=7.0, backend=backend)
    assert y.tolist() == [[1.0 * 4.0, 0.0, 7.0 * -6.0]]
    y.sum().backward()
    assert x.grad.tolist() == [[4.0, 0.0, 0.0, 1.0, 0.0, 0.0]]  # clamped: the third gate, the third up


@pytest.mark.parametrize("backend", PATHS)
def test_at_a_bound_of_the_clamp_the_gradient_passes_as_in_torch(backend, device):
    x = torch.tensor([[2.0, 2.0, 2.0, -2.0]], device=device, requires_grad=True)
    glu(x, activation="relu", clamp=2.0, backend=backend).sum().backward()
    assert x.grad.tolist() == [[2.0, -2.0, 2.0, 2.0]]


def test_by_turns_and_by_halves_are_the_same_columns_in_another_order(device):
    x, bias = torch.randn(3, 10, device=device), torch.randn(10, device=device)
    by_turns = [torch.stack(t.chunk(2, dim=-1), dim=-1).flatten(-2) for t in (x, bias)]
    want = glu(x, activation="silu", bias=bias)
    assert torch.equal(glu(by_turns[0], activation="silu", bias=by_turns[1], interleaved=True), want)
    assert torch.equal(glu(*x.chunk(2, dim=-1), activation="silu", bias=bias), want)


def test_any_leading_dimensions(device):
    x, w = torch.randn(2, 3, 8, device=device), torch.rand(2, 3, 1, device=device)
    y = glu(x, activation="silu", weights=w)
    assert y.shape == (2, 3, 4)
    assert torch.equal(y[1, 2], glu(x[1, 2], activation="silu", weights=w[1, 2]))


@pytest.mark.parametrize("given", [(), ("bias", "weights"), ("up", "bias")], ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_written_gradient_is_that_of_torch(activation, given):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6 if "up" in given else 12, dtype=torch.float64)
    up = torch.randn_like(x) if "up" in given else None
    bias = torch.randn(12, dtype=torch.float64) if "bias" in given else None
    w = torch.rand(2, 3, 1, dtype=torch.float64) if "weights" in given else None
    settings = {"activation": activation, "offset": 1.0, "clamp": 1.5}
    leaves = [t.requires_grad_() for t in (x, up, bias, w) if t is not None]
    y = glu(x, up, bias=bias, weights=w, **settings)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, leaves, dy)
    got = glu_back(dy, x.detach(), up, bias=bias, weights=w, **settings)
    torch.testing.assert_close([g for g in got if g is not None], list(want))
    assert [g is None for g in got] == [t is None for t in (x, up, bias, w)]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("activation", ["silu", "quick_gelu", "relu"])
def test_nan_and_inf_pass_as_in_torch(activation, backend, device):
    gate = torch.tensor([NAN, INF, -INF, 1.0, 1.0, 1.0], device=device)
    up = torch.tensor([1.0, 1.0, 1.0, NAN, INF, -INF], device=device)

    def run(compute) -> tuple[Tensor, ...]:
        leaves = [gate.clone()[None].requires_grad_(), up.clone()[None].requires_grad_()]
        y = compute(*leaves)
        return y, *torch.autograd.grad(y.sum(), leaves)

    got = run(lambda a, b: glu(a, b, activation=activation, backend=backend))
    want = run(lambda a, b: ACTIVATIONS[activation](a) * b)
    for name, a, b in zip(("y", "dgate", "dup"), got, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", [*PATHS, pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_what_is_clamped_passes_the_gradients_of_torchs_clamp(activation, weighted, backend, device):
    gate = torch.tensor([NAN, INF, -INF, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0], device=device)
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, NAN, INF, -INF, 2.0, -2.0], device=device)
    w = torch.full((1, 1), 0.5, device=device) if weighted else None

    def gradients(compute) -> tuple[Tensor, ...]:
        leaves = [gate.clone()[None].requires_grad_(), up.clone()[None].requires_grad_()]
        return torch.autograd.grad(compute(*leaves).sum(), leaves)

    got = gradients(lambda a, b: glu(a, b, activation=activation, weights=w, clamp=2.0, backend=backend))
    want = gradients(
        lambda a, b: ACTIVATIONS[activation](a.clamp(max=2.0)) * b.clamp(-2.0, 2.0) * (1.0 if w is None else w)
    )
    assert want[0][0, :2].tolist() == [0.0, 0.0]  # a NaN gate, and one above the bound
    assert want[1][0, 5:8].tolist() == [0.0, 0.0, 0.0]
    for name, a, b in zip(("dgate", "dup"), got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, msg=name)


def calls_of_operators(activation: str) -> list[Callable[[], object]]:
    from megalith.fusions.activation.kernels import bias_gelu
    from megalith.fusions.gated.kernels import glu

    x = torch.ones(2, 6)
    of_glu = [glu.op, glu_formulas.blocked, glu_formulas.compiled, glu_formulas.reference]
    of_float8 = [glu.op_float8, glu_float8_formulas.blocked, glu_float8_formulas.compiled]
    of_gelu = [bias_gelu.op, gelu_formulas.blocked, gelu_formulas.compiled, gelu_formulas.reference]
    return [
        *(partial(op, x, None, None, None, activation, 0.0, INF, False) for op in of_glu),
        *(partial(op, x, None, None, activation, 0.0, INF, False) for op in of_float8),
        *(partial(op, x, None, activation) for op in of_gelu),
        lambda: glu_back(x[:, :3], x, activation=activation),
    ]


def test_an_unknown_activation_is_one_error_on_every_path_of_every_operation():
    for call in calls_of_operators("swish"):
        with pytest.raises(ConfigError, match=r"one of silu, gelu_tanh, gelu, quick_gelu, relu; got 'swish'"):
            call()


@in_interpreter
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_addressed_in_64_bits(tmp_path, interleaved):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    x = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0).requires_grad_()
    y = glu(x, activation="relu", interleaved=interleaved, backend="triton")
    assert y.tolist() == [[4.0] * 2] * 3
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.tolist() == [[2.0] * 4] * 3


X = torch.ones(2, 6)


@pytest.mark.parametrize(
    ("error", "x", "settings", "message"),
    [
        (ConfigError, X, {"activation": "swish"}, r"one of silu, gelu_tanh, gelu, quick_gelu, relu; got 'swish'"),
        (ConfigError, X, {"clamp": 0.0}, r"clamp must be positive, or None for no clamp; got 0.0"),
        (ConfigError, X, {"clamp": NAN}, r"clamp must be positive, or None for no clamp; got nan"),
        (ConfigError, X, {"up": X, "interleaved": True}, r"interleaved applies only to a packed x"),
        (ShapeError, X[:, :5], {}, r"x must be \[..., 2F\], gate and up packed, or .*with up \[..., F\]; got \[2, 5\]"),
        (ShapeError, torch.ones(()), {}, r"x must be \[..., 2F\], .*; got \[\]"),
        (ShapeError, X, {"up": X[:1]}, r"up must be \[2, 6\], like the gate x; got \[1, 6\]"),
        (ShapeError, X, {"bias": X[0, :3]}, r"bias must be \[6\], one for each column of gate and up; got \[3\]"),
        (ShapeError, X, {"weights": X[0]}, r"weights must be \[2, 1\], one for each token of x \[2, 6\]; got \[6\]"),
        (ShapeError, X.int(), {}, r"x must be float16, bfloat16, float32 or float64; got torch.int32"),
        (ShapeError, X, {"bias": torch.ones(6, device="meta")}, r"on one device; got x on cpu, bias on meta"),
        (BackendError, X, {"backend": "aten"}, r"'aten': it has no such path"),
    ],
)
def test_what_does_not_fit_is_refused(error, x, settings, message):
    with pytest.raises(error, match=message):
        glu(x, **{"activation": "silu"} | settings)


def test_an_upstream_gradient_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"dy must be \[2, 3\], like the output; got \[2, 6\]"):
        glu_back(X, X, activation="silu")


@pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="before, torch.compile expands the two sigmoids differently")
def test_compiled_gradients_of_gate_and_up_share_an_exponential():
    gating = glu_formulas.Gating.of("silu")

    def gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return glu_formulas.gradients_of(dy, gate, up, None, None, gating)

    with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():  # a hit would generate nothing
        _, code = run_and_get_cpp_code(compile_apart(gradients), *torch.randn(3, 64, 64))
    assert code.count(".exp()") == 1
