"""fused_bias_swiglu: Megatron's names for glu, and an input that is saved in CPU memory."""

import pytest
import torch
from torch import Tensor

from megalith import fusions
from megalith.fusions import bias_swiglu_impl, glu, weighted_bias_swiglu_impl
from tests.fusions.observe import operator_calls, saved_bytes


@pytest.fixture
def given(device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [2, 3, 2F], bias, weights in float32, and an upstream gradient."""
    torch.manual_seed(0)
    y, bias, dy = (torch.randn(*shape, device=device).bfloat16() for shape in ((2, 3, 16), (16,), (2, 3, 8)))
    return y, bias, torch.rand(2, 3, 1, device=device), dy


def test_silu_of_the_first_half_times_the_second():
    y = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    assert torch.equal(fusions.swiglu(y), torch.nn.functional.silu(y[:, :2]) * y[:, 2:])
    assert fusions.swiglu(y)[0, 0] == 0.0


def test_every_name_computes_what_glu_does(given):
    y, bias, w, _ = given
    plain, biased = glu(y, activation="silu"), glu(y, activation="silu", bias=bias)
    weighted = glu(y, activation="silu", weights=w)
    assert torch.equal(fusions.swiglu(y), plain)
    assert torch.equal(fusions.bias_swiglu(y, bias), biased)
    assert torch.equal(fusions.weighted_swiglu(y, w), weighted)
    assert torch.equal(bias_swiglu_impl(y, None), plain)
    assert torch.equal(bias_swiglu_impl(y, bias, False, False), biased)
    assert torch.equal(weighted_bias_swiglu_impl(y, None, w, False), weighted)
    assert torch.equal(fusions.SwiGLUFunction.apply(y, False, False), plain)
    assert torch.equal(fusions.BiasSwiGLUFunction.apply(y, bias, False, False), biased)
    assert torch.equal(fusions.WeightedSwiGLUFunction.apply(y, w, False), weighted)


def test_options_reach_glu(given):
    y, bias, w, _ = given
    settings = {"activation": "silu", "bias": bias, "clamp": 0.5, "interleaved": True}
    assert torch.equal(bias_swiglu_impl(y, bias, clamp_value=0.5, interleaved=True), glu(y, **settings))
    got = weighted_bias_swiglu_impl(y, bias, w, clamp_value=0.5, interleaved=True)
    assert torch.equal(got, glu(y, weights=w, **settings))


def test_written_gradients_are_those_of_torch_in_the_shapes_of_the_field(given):
    y, bias, w, dy = (t.double().requires_grad_() for t in given)

    def want(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, leaves, dy)

    close = torch.testing.assert_close
    given_back = [t.detach() for t in (dy, y, bias, w)]
    g, y_, bias_, w_ = given_back
    close(fusions.swiglu_back(g, y_), want(fusions.swiglu(y), y)[0])
    close(fusions.bias_swiglu_back(g, y_, bias_), want(fusions.bias_swiglu(y, bias), y)[0])
    close(fusions.weighted_swiglu_back(g, y_, w_), want(fusions.weighted_swiglu(y, w), y, w))


def test_the_clamped_names_are_torchs_clamps_before_the_unit_with_their_gradients(given):
    y, bias, w, dy = (t.double().requires_grad_() for t in given)
    limit = 0.7

    def unit(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    close = torch.testing.assert_close
    (plain,) = torch.autograd.grad(unit(y), y, dy)
    (biased,) = torch.autograd.grad(unit(y + bias), y, dy)
    weighted = torch.autograd.grad(unit(y) * w, (y, w), dy)
    g, y, bias, w = (t.detach() for t in (dy, y, bias, w))
    close(fusions.clamped_swiglu(y, limit), unit(y))
    close(fusions.bias_clamped_swiglu(y, bias, limit), unit(y + bias))
    close(fusions.clamped_weighted_swiglu(y, w, limit), unit(y) * w)
    close(fusions.clamped_swiglu_back(g, y, limit), plain)
    close(fusions.bias_clamped_swiglu_back(g, y, bias, limit), biased)
    close(fusions.clamped_weighted_swiglu_back(g, y, w, limit), weighted)


@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_fp8_input_store_reaches_the_operator_of_either_entry(given, backend):
    y, bias, w, _ = given
    calls = operator_calls(lambda: bias_swiglu_impl(y, bias, True, backend=backend))
    calls += operator_calls(lambda: weighted_bias_swiglu_impl(y, bias, w, True, backend=backend))
    assert ["float8" in str(operator) for operator, _ in calls] == [True, True]


@pytest.mark.parametrize("fp8_input_store", [False, True])
def test_cpu_offload_input_keeps_nothing_on_the_device_and_changes_no_number(given, fp8_input_store, device):
    y, bias, _, dy = (t.requires_grad_() for t in given)

    def run(cpu_offload_input: bool) -> tuple[Tensor, ...]:
        value = bias_swiglu_impl(y, bias, fp8_input_store, cpu_offload_input, backend="blocked")
        return value, *torch.autograd.grad(value, (y, bias), dy)

    for got, want in zip(run(True), run(False), strict=True):
        assert torch.equal(got, want)
    # autograd calls only the innermost hooks, which offload what it saves: outer hooks see nothing
    offloaded = saved_bytes(lambda: bias_swiglu_impl(y, bias, fp8_input_store, True, backend="blocked"))
    kept = saved_bytes(lambda: bias_swiglu_impl(y, bias, fp8_input_store, False, backend="blocked"))
    assert offloaded == 0 < kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="shown by the memory of a GPU")
def test_cpu_offload_input_frees_the_memory_of_a_gpu():
    def left_on_the_device(cpu_offload_input: bool) -> int:
        before = torch.cuda.memory_allocated()
        y = torch.randn(1024, 2048, device="cuda", requires_grad=True)
        value = bias_swiglu_impl(y * 1.0, None, False, cpu_offload_input)  # nothing else holds the input
        assert value.requires_grad
        return torch.cuda.memory_allocated() - before

    assert left_on_the_device(False) - left_on_the_device(True) == 1024 * 2048 * 4


def test_cpu_offload_input_ends_a_graph_and_raises_where_there_must_be_one():
    torch.compiler.reset()

    def compute(y: Tensor) -> Tensor:
        return bias_swiglu_impl(2 * y, None, False, True)

    y = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cpu_offload_input"):
        torch.compile(compute, fullgraph=True, backend="aot_eager")(y)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(compute, backend="aot_eager")(y), compute(y))
