"""fused_bias_geglu: Megatron's names for glu; the clamp comes after the bias."""

import pytest
import torch
from torch import Tensor

from megalith import fusions
from megalith.errors import ShapeError
from megalith.fusions import bias_geglu_impl, glu, weighted_bias_quick_geglu_impl
from tests.fusions.observe import operator_calls


@pytest.fixture
def given(device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [2, 3, 2F], bias, weights in float32, and an upstream gradient."""
    torch.manual_seed(0)
    y, bias, dy = (torch.randn(*shape, device=device).bfloat16() for shape in ((2, 3, 16), (16,), (2, 3, 8)))
    return y, bias, torch.rand(2, 3, 1, device=device), dy


def test_gelu_in_its_tanh_form_of_the_first_half_times_the_second():
    y = torch.randn(3, 8, dtype=torch.float64)
    want = torch.nn.functional.gelu(y[:, :4], approximate="tanh") * y[:, 4:]
    torch.testing.assert_close(fusions.geglu(y), want)


def test_every_name_computes_what_glu_does(given):
    y, bias, w, _ = given
    tanh, quick = {"activation": "gelu_tanh"}, {"activation": "quick_gelu", "offset": 1.0}
    both = {"bias": bias, "weights": w}
    pairs = [
        (fusions.geglu(y), glu(y, **tanh)),
        (fusions.bias_geglu(bias, y), glu(y, bias=bias, **tanh)),
        (bias_geglu_impl(y, None), glu(y, **tanh)),
        (bias_geglu_impl(y, bias, interleaved=True), glu(y, bias=bias, interleaved=True, **tanh)),
        (fusions.GeGLUFunction.apply(y), glu(y, **tanh)),
        (fusions.BiasGeGLUFunction.apply(y, bias), glu(y, bias=bias, **tanh)),
        (fusions.quick_geglu(y, 1.0), glu(y, **quick)),
        (fusions.weighted_quick_geglu(y, w, 1.0), glu(y, weights=w, **quick)),
        (fusions.weighted_bias_quick_geglu(y, bias, w, 1.0), glu(y, **both, **quick)),
        (weighted_bias_quick_geglu_impl(y, bias, w, False, 1.0, 0.5), glu(y, **both, **quick, clamp=0.5)),
        (weighted_bias_quick_geglu_impl(y, None, None), glu(y, activation="quick_gelu")),
        (fusions.WeightedQuickGeGLUFunction.apply(y, w, False, 1.0), glu(y, weights=w, **quick)),
        (fusions.WeightedBiasQuickGeGLUFunction.apply(y, bias, w, False, 1.0), glu(y, **both, **quick)),
    ]
    for number, (got, want) in enumerate(pairs):
        assert torch.equal(got, want), number


def test_quick_gelu_is_rounded_once():
    y = torch.randn(1000).bfloat16()
    exact = y.double() * torch.sigmoid(1.702 * y.double())
    assert torch.equal(fusions.quick_gelu(y), exact.bfloat16())
    with pytest.raises(ShapeError, match=r"y must be float16, .*; got torch.int64"):
        fusions.quick_gelu(torch.ones(2, dtype=torch.int64))


def test_written_gradients_are_those_of_torch_in_the_shapes_of_the_field(given):
    y, bias, w, dy = (t.double().requires_grad_() for t in given)
    g, y_, bias_, w_ = (t.detach() for t in (dy, y, bias, w))

    def want(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, leaves, dy)

    close = torch.testing.assert_close
    close(fusions.geglu_back(g, y_), want(fusions.geglu(y), y)[0])
    close(fusions.bias_geglu_back(g, y_, bias_), want(fusions.bias_geglu(bias, y), y)[0])
    close(fusions.quick_geglu_back(g, y_, 1.0), want(fusions.quick_geglu(y, 1.0), y)[0])
    close(fusions.weighted_quick_geglu_back(g, y_, w_, 1.0), want(fusions.weighted_quick_geglu(y, w, 1.0), y, w))
    all_three = want(fusions.weighted_bias_quick_geglu(y, bias, w, 1.0), y, bias, w)
    close(fusions.weighted_bias_quick_geglu_back(g, y_, bias_, w_, 1.0), all_three)


@pytest.mark.parametrize("backend", ["triton", "blocked", "reference"])
def test_the_clamp_comes_after_the_bias(backend, device):
    y = torch.tensor([[6.0, -6.0]], device=device)
    bias = torch.tensor([3.0, -3.0], device=device)
    got = weighted_bias_quick_geglu_impl(y, bias, None, clamp_value=7.0, linear_offset=1.0, backend=backend)
    want = 7.0 * torch.sigmoid(torch.tensor(1.702 * 7.0)) * (-7.0 + 1.0)
    torch.testing.assert_close(got.cpu(), want.view(1, 1))


def test_fp8_input_store_reaches_the_operator(given):
    y, bias, w, _ = given
    calls = operator_calls(lambda: weighted_bias_quick_geglu_impl(y, bias, w, True, backend="blocked"))
    assert ["float8" in str(operator) for operator, _ in calls] == [True]
