"""fused_bias_gelu: values from torch, Megatron's argument order, refusals, the far tails."""

import pytest
import torch

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import GeLUFunction, bias_gelu, bias_gelu_back, bias_gelu_impl, use
from megalith.fusions.activation.bias_gelu import EXACT_16_BIT, FUSION, should_fuse_bias
from megalith.fusions.core.compiler import why_not_compile
from megalith.fusions.core.preference import without_compiling
from tests.kernel_reports import in_interpreter

PATHS = ["triton", "blocked", "reference"]
compiles = pytest.param("compile", marks=pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}"))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_it_is_the_gelu_of_torch_and_so_is_its_gradient(approximate):
    torch.manual_seed(0)
    y, bias, g = torch.randn(2, 3, 5).double(), torch.randn(5).double(), torch.randn(2, 3, 5).double()
    leaf = y.clone().requires_grad_()
    want = torch.nn.functional.gelu(leaf + bias, approximate=approximate)
    torch.testing.assert_close(bias_gelu_impl(y, bias, approximate=approximate), want)
    torch.testing.assert_close(bias_gelu(bias, y, approximate=approximate), want)
    (dy,) = torch.autograd.grad(want, leaf, g)
    torch.testing.assert_close(bias_gelu_back(g, bias, y, approximate=approximate), dy)


def test_the_tanh_form_is_the_default_and_the_class_is_an_alias():
    y, bias = torch.tensor([[-1.0, 2.0]]), torch.tensor([0.5, 0.5])
    assert torch.equal(GeLUFunction.apply(y, bias), bias_gelu_impl(y, bias, approximate="tanh"))
    assert not torch.equal(bias_gelu_impl(y, bias), bias_gelu_impl(y, bias, approximate="none"))


@pytest.mark.parametrize("backend", PATHS)
def test_no_bias_is_a_bias_of_zero(backend, device):
    y = torch.randn(3, 7, device=device)
    zero = torch.zeros(7, device=device)
    assert torch.equal(bias_gelu_impl(y, None, backend=backend), bias_gelu_impl(y, zero, backend=backend))


@pytest.mark.parametrize("backend", PATHS)
def test_the_left_tail_keeps_its_digits(backend, device):
    # 1 + tanh cancels there in float32; torch's own result is 0 or 30 % off
    x = torch.tensor([[-4.0, -5.0, -5.5]], device=device)
    want = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(bias_gelu_impl(x, None, backend=backend).double(), want, rtol=3e-6, atol=0)


@pytest.mark.parametrize("backend", [*PATHS, pytest.param("compile", marks=[*compiles.marks, pytest.mark.slow])])
def test_the_exact_form_and_its_slope_are_those_of_erfc_in_both_tails(backend, device):
    x = torch.linspace(-13.0, 13.0, 2001, device=device)[None].requires_grad_()
    y = bias_gelu_impl(x, None, approximate="none", backend=backend)
    (dx,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double()
    cumulative = 0.5 * torch.erfc(-exact / 2**0.5)
    with_slope = exact * torch.exp(-exact.square() / 2) / (2 * torch.pi) ** 0.5
    allowed = 5e-7 + exact.square() * torch.finfo(torch.float32).eps  # the exponent -x^2 / 2 is rounded
    assert ((y.double() - exact * cumulative).abs() <= allowed * (exact * cumulative).abs()).all()
    # below 0 the slope is a difference
    assert ((dx.double() - (cumulative + with_slope)).abs() <= allowed * (cumulative + with_slope.abs())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exact_form_of_16_bits_without_a_bias_is_torchs_on_a_cpu(dtype):
    x = torch.linspace(-9.0, 9.0, 2001).to(dtype)[None].requires_grad_()
    y, want = bias_gelu_impl(x, None, approximate="none"), torch.nn.functional.gelu(x)
    assert torch.equal(y, want)
    assert torch.equal(*(torch.autograd.grad(each, x, torch.ones_like(x))[0] for each in (y, want)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_exact_form_has_the_stated_error(dtype):
    x = torch.linspace(-9.0, 9.0, 60001).to(dtype)[None]
    exact = x.double()
    want = exact * 0.5 * torch.erfc(-exact / 2**0.5)
    y = bias_gelu_impl(x, None, approximate="none").double()
    accurate = exact > (-3.0 if dtype == torch.float16 else -3.5)
    one_rounding = torch.finfo(dtype).eps * want.abs().clamp_min(torch.finfo(dtype).tiny)
    assert ((y - want).abs() <= one_rounding)[accurate].all()
    assert (y[exact <= -5.6] == 0.0).all()
    # before it is rounded to 16 bits
    x = torch.linspace(-9.0, 9.0, 60000)
    cumulative = torch.nn.functional.gelu(x).double() / x.double()
    torch.testing.assert_close(cumulative, 0.5 * torch.erfc(-x.double() / 2**0.5), rtol=0, atol=4e-7)


def test_a_bias_goes_into_the_product_where_the_exact_form_is_torchs():
    x = {dtype: torch.empty(1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert [should_fuse_bias(each, "none") for each in x.values()] == [True, False, False]
    assert all(should_fuse_bias(each, "tanh") for each in x.values())
    assert should_fuse_bias(torch.empty(1, dtype=torch.bfloat16, device="meta"), "none")
    with use("blocked"):
        assert should_fuse_bias(x[torch.bfloat16], "none")
    assert EXACT_16_BIT.defaults["cuda"] == FUSION.defaults["cuda"]


def test_the_exact_form_is_not_torchs_where_its_error_would_show():
    x = torch.full((1, 2**18), -4.5)  # more than one block, as shorter tensors take the reference
    want = torch.nn.functional.gelu(x.double())
    with without_compiling():
        torch.testing.assert_close(bias_gelu_impl(x, None, approximate="none").double(), want, rtol=3e-6, atol=0)
        # -3 + 2^-8 would round to -3 in bfloat16, whose GELU is another number
        x, bias = torch.full((1, 2**18), -3.0).bfloat16(), torch.full((2**18,), 2.0**-8).bfloat16()
        y = bias_gelu_impl(x, bias, approximate="none")
    assert torch.equal(y, torch.nn.functional.gelu(x.double() + bias.double()).bfloat16())
    for input, b in ((x.float(), None), (x, bias)):
        with pytest.raises(BackendError, match="it has no such path, only triton, compile, blocked, reference"):
            bias_gelu_impl(input, b, approximate="none", backend="aten")


@pytest.mark.parametrize("backend", [compiles])
def test_nan_and_inf_pass_through_the_exact_form_compiled(backend, device):
    x = torch.tensor([[float("nan"), float("inf"), 40.0, -40.0, 0.0]], device=device, requires_grad=True)
    y = bias_gelu_impl(x, None, approximate="none", backend=backend)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert str(y.tolist()) == "[[nan, inf, 40.0, -0.0, 0.0]]"
    assert dx[0, 0].isnan()
    assert dx[0, 2:].tolist() == [1.0, 0.0, 0.5]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", PATHS)
def test_nan_and_inf_pass(backend, device):
    x = torch.tensor([[float("nan"), float("inf"), 40.0, -40.0]], device=device, requires_grad=True)
    y = bias_gelu_impl(x, None, backend=backend)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert str(y.tolist()) == "[[nan, inf, 40.0, -0.0]]"
    assert dx[0, 0].isnan()
    assert dx[0, 2:].tolist() == [1.0, 0.0]


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    x = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(30.0).requires_grad_()
    y = bias_gelu_impl(x, torch.zeros(4), backend="triton")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.tolist() == [[30.0] * 4] * 3
    assert dx.tolist() == [[1.0] * 4] * 3


@pytest.mark.parametrize(
    ("error", "input", "bias", "approximate", "message"),
    [
        (ConfigError, torch.ones(2, 3), None, "erf", r'approximate must be "tanh" or "none"; got \'erf\''),
        (ShapeError, torch.ones(()), None, "tanh", r"input must be \[..., F\]; got a tensor without dimensions"),
        (ShapeError, torch.ones(2, 3), torch.ones(2), "tanh", r"bias must be \[3\], one for each column of input"),
        (ShapeError, torch.ones(2, 3).int(), None, "tanh", r"input must be float16, .*; got torch.int32"),
        (ShapeError, torch.ones(2, 3), torch.ones(3, device="meta"), "tanh", r"got input on cpu, bias on meta"),
    ],
)
def test_what_does_not_fit_is_refused(error, input, bias, approximate, message):
    with pytest.raises(error, match=message):
        bias_gelu_impl(input, bias, approximate=approximate)


def test_an_upstream_gradient_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"g must be \[2, 3\], like y; got \[3\]"):
        bias_gelu_back(torch.ones(3), None, torch.ones(2, 3))
