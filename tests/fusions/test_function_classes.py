"""Megatron's ``torch.autograd.Function`` classes: each equals its function, forward and backward, on every path."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import fusions
from megalith.errors import BackendError
from megalith.fusions.core.registry import FUSIONS
from tests.accuracy import assert_accurate
from tests.fusions.observe import saved_bytes
from tests.sampling import sampled

T, F, HALF = (2, 3, 10), 10, 5
PATHS = ("triton", "blocked", "reference")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Given:
    """A class, the equivalent function, arguments, and Megatron's names for the arguments of forward."""

    function: type[torch.autograd.Function]
    same: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    names: str
    arguments: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors

    def leaves(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(shape).bfloat16().to(DEVICE, dtype).requires_grad_() for shape in self.shapes]

    def __str__(self) -> str:
        return self.function.__name__


def rope_table() -> Tensor:
    angles = torch.arange(12.0, device=DEVICE).view(4, 3)
    return torch.cat((angles, angles), dim=-1)[:, None, None]


MASK = torch.arange(4, device=DEVICE) > 2
INDICES = torch.tensor([[0, 3], [2, -1], [1, 1], [4, 0]], device=DEVICE)
COS, SIN = rope_table().cos(), rope_table().sin()
TABLES = "cos sin"
ENDS = "cp_rank cp_size rotary_interleaved"

GIVEN = [
    Given(fusions.GeLUFunction, fusions.bias_gelu_impl, (T, (F,)), "input bias"),
    Given(fusions.GeGLUFunction, lambda x: fusions.bias_geglu_impl(x, None), (T,), "input"),
    Given(fusions.BiasGeGLUFunction, fusions.bias_geglu_impl, (T, (F,)), "input bias"),
    Given(
        fusions.WeightedQuickGeGLUFunction,
        lambda x, *rest: fusions.weighted_bias_quick_geglu_impl(x, None, *rest),
        (T, (2, 3, 1)),
        "input weights fp8_input_store linear_offset",
        lambda x, w: (x, w, False, 1.0),
    ),
    Given(
        fusions.WeightedBiasQuickGeGLUFunction,
        fusions.weighted_bias_quick_geglu_impl,
        (T, (F,), (2, 3, 1)),
        "input bias weights fp8_input_store linear_offset",
        lambda x, b, w: (x, b, w, True, 1.0),
    ),
    Given(
        fusions.SwiGLUFunction,
        lambda x, *rest: fusions.bias_swiglu_impl(x, None, *rest),
        (T,),
        "input fp8_input_store cpu_offload_input",
        lambda x: (x, False, False),
    ),
    Given(
        fusions.BiasSwiGLUFunction,
        fusions.bias_swiglu_impl,
        (T, (F,)),
        "input bias fp8_input_store cpu_offload_input",
        lambda x, b: (x, b, True, False),
    ),
    Given(
        fusions.WeightedSwiGLUFunction,
        lambda x, *rest: fusions.weighted_bias_swiglu_impl(x, None, *rest),
        (T, (2, 3, 1)),
        "input weights fp8_input_store",
        lambda x, w: (x, w, False),
    ),
    Given(
        fusions.WeightedSquaredReLUFunction,
        fusions.weighted_squared_relu_impl,
        (T, (2, 3, 1)),
        "input weights",
    ),
    Given(
        fusions.ScaledUpperTriangMaskedSoftmax,
        lambda x, scale: fusions.masked_softmax(x, causal=True, scale=scale),
        ((6, 4, 4),),
        "inputs scale",
        lambda x: (x, 0.7),
    ),
    Given(
        fusions.ScaledMaskedSoftmax,
        lambda x, mask, scale: fusions.masked_softmax(x, mask, scale=scale),
        ((2, 3, 4, 4),),
        "inputs mask scale",
        lambda x: (x, MASK, 0.7),
    ),
    Given(
        fusions.ScaledSoftmax,
        lambda x, scale: fusions.masked_softmax(x, scale=scale),
        ((2, 3, 4, 4),),
        "inputs scale",
        lambda x: (x, 0.7),
    ),
    Given(
        fusions.ApplyMLARotaryEmbQ,
        fusions.fused_apply_mla_rope_for_q,
        ((4, 2, 3, 11),),
        f"q {TABLES} qk_head_dim emb_dim cu_seqlens_q {ENDS}",
        lambda q: (q, COS, SIN, 5, 6, None, 0, 1, False),
    ),
    Given(
        fusions.ApplyMLARotaryEmbKV,
        fusions.fused_apply_mla_rope_for_kv,
        ((4, 3, 12), (4, 1, 6)),
        f"kv k_pos_emb {TABLES} emb_dim k_dim v_dim cu_seqlens_kv {ENDS}",
        lambda kv, k_pe: (kv, k_pe, COS, SIN, 6, 5, 7, torch.tensor([0, 3, 4], device=DEVICE), 0, 1),
    ),
    Given(
        fusions.IndicesToMultihot,
        fusions.fused_indices_to_multihot,
        ((4, 2),),
        "indices probs_indices num_of_local_experts",
        lambda probs: (INDICES, probs, 5),
    ),
]


def run(compute: Callable[..., Any], given: Given, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Results, then gradients."""
    leaves = given.leaves(dtype)
    values = compute(*given.arguments(*leaves))
    values = list(values) if isinstance(values, tuple) else [values]
    roots = [y for y in values if y.requires_grad]
    torch.manual_seed(1)
    upstream = [torch.randn(y.shape).bfloat16().to(DEVICE, y.dtype) for y in roots]
    return [*values, *torch.autograd.grad(roots, leaves, upstream)]


def test_the_field_has_fifteen():
    assert len({given.function for given in GIVEN}) == 15


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_each_is_a_function_of_torch_with_the_names_of_the_field(given):
    assert issubclass(given.function, torch.autograd.Function)
    _, *names = inspect.signature(given.function.forward).parameters
    assert " ".join(names) == given.names
    assert given.function.backward is not torch.autograd.Function.backward


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_values_and_gradients_are_those_of_the_function_on_every_path(given, path):
    with fusions.use(path):
        got, want = run(given.function.apply, given), run(given.same, given)
    for x, y in zip(got, want, strict=True):
        if path == "reference":  # autograd's gradient there, a formula here
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(x, y)


OF_SCORES = {
    fusions.ScaledUpperTriangMaskedSoftmax: 0.7,
    fusions.ScaledMaskedSoftmax: 0.7,
    fusions.ScaledSoftmax: 0.7,
}  # scales


def gradient_of_scores(p: Tensor) -> Tensor:
    """From the probabilities that are kept, which are rounded, and the upstream gradient of ``run``."""
    torch.manual_seed(1)
    dp = torch.randn(p.shape).bfloat16().to(p)
    return p * (dp - (p * dp).sum(-1, keepdim=True))


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_gradients_are_rounded_once(given):
    got, exact = run(given.function.apply, given, torch.bfloat16), run(given.same, given, torch.float64)
    if given.function in OF_SCORES:
        exact[1] = OF_SCORES[given.function] * gradient_of_scores(got[0].double())
    for x, y in zip(got, exact, strict=True):
        if x.is_floating_point():
            assert_accurate(x, y, terms=given.shapes[0][-1])  # the most terms in any of the sums


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_one_graph_of_torch_compile_holds_it_and_its_gradient(given):
    torch.compiler.reset()

    def call(*arguments: Any) -> Any:
        return given.function.apply(*arguments)

    # torch before 2.13 loses gradients if the first output has none: there, it runs uncompiled, with gradients
    whole = (
        given.function is not fusions.IndicesToMultihot
        or "isolate_recompiles" in inspect.signature(torch.compile).parameters
    )
    got = run(torch.compile(call, fullgraph=whole, backend="aot_eager"), given)
    for x, y in zip(got, run(given.same, given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_backward_runs_twice_and_a_second_derivative_raises(given):
    (x, *_), leaves = (given.leaves(), given.leaves())
    y = given.function.apply(*given.arguments(*leaves))
    y = y if isinstance(y, Tensor) else next(value for value in y if value.requires_grad)
    first, second = (torch.autograd.grad(y.square().sum(), leaves[0], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == x.shape
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize(("given", "path"), sampled([*product(GIVEN, PATHS)]))
def test_autograd_sees_who_writes_into_operands_and_results(given, path):
    def gradients(written: str) -> list[Tensor]:
        leaves = given.leaves()
        operands = [x.clone() for x in leaves]
        with fusions.use(path):
            values = given.function.apply(*given.arguments(*operands))
        roots = [y for y in (values if isinstance(values, tuple) else (values,)) if y.requires_grad]
        torch.manual_seed(1)
        upstream = [torch.randn(y.shape) for y in roots]
        with torch.no_grad():
            for x in {"operands": operands, "results": roots, "nothing": []}[written]:
                x.add_(1.0)
        return list(torch.autograd.grad(roots, leaves, upstream))

    want = gradients("nothing")
    for written in ("operands", "results"):
        found, refusal = want, ""
        try:
            found = gradients(written)
        except RuntimeError as error:
            refusal = str(error)
        assert "modified by an inplace operation" in refusal or not refusal
        assert all(torch.equal(got, gradient) for got, gradient in zip(found, want, strict=True))


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_nothing_is_recorded_where_no_gradient_is_wanted(given):
    with torch.no_grad():
        y = given.function.apply(*given.arguments(*given.leaves()))
    assert not (y if isinstance(y, Tensor) else y[0]).requires_grad


@pytest.mark.parametrize("path", PATHS)
def test_a_bias_of_none_has_no_gradient(path):
    x = torch.randn(3, F, requires_grad=True)
    for function in (fusions.GeLUFunction, fusions.BiasGeGLUFunction, fusions.BiasSwiGLUFunction):
        with fusions.use(path):
            (dx,) = torch.autograd.grad(function.apply(x, None).sum(), x)
        assert dx.isfinite().all()


def test_an_offset_may_be_a_tensor_as_the_field_passes_it():
    x, w = torch.randn(3, F, requires_grad=True), torch.rand(3, 1)
    apply = fusions.WeightedQuickGeGLUFunction.apply
    assert torch.equal(apply(x, w, False, torch.tensor(1.0)), apply(x, w, False, 1.0))


def test_scores_without_a_key_have_an_empty_gradient():
    x = torch.ones(2, 3, 4, 0, requires_grad=True)
    (dx,) = torch.autograd.grad(fusions.ScaledSoftmax.apply(x, 0.5).sum(), x)
    assert dx.shape == x.shape


def test_what_is_saved_is_what_the_function_saves():
    y, bias = torch.randn(64, F, requires_grad=True), torch.randn(F, requires_grad=True)
    for fp8 in (False, True):
        with fusions.use("blocked"):
            kept = saved_bytes(lambda fp8=fp8: fusions.BiasSwiGLUFunction.apply(y, bias, fp8))
            assert kept == saved_bytes(lambda fp8=fp8: fusions.bias_swiglu_impl(y, bias, fp8))


def test_input_that_goes_to_the_cpu_gives_the_same_gradient_and_is_refused_in_a_graph(device):
    y = torch.randn(3, F, device=device, requires_grad=True)
    got, want = (torch.autograd.grad(fusions.SwiGLUFunction.apply(y, False, off).sum(), y) for off in (True, False))
    assert torch.equal(got[0], want[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cpu_offload_input"):
        torch.compile(lambda y: fusions.SwiGLUFunction.apply(y, False, True), fullgraph=True, backend="aot_eager")(y)


def test_an_operation_of_a_class_has_a_gradient_for_each_of_its_paths():
    with_classes = [fusion for fusion in FUSIONS.values() if fusion.backs]
    assert len(with_classes) == 7  # the gradient of rotating queries is the same operation with the inverse rotation
    assert all(fusion.backs.keys() == fusion.paths.keys() for fusion in with_classes)


def test_a_path_that_cannot_run_is_not_taken_by_a_class():
    x = torch.randn(3, F, requires_grad=True)
    with fusions.use("aten"):  # gated units do not have it
        fusions.SwiGLUFunction.apply(x).sum().backward()
    with pytest.raises(BackendError, match="cannot run with backend='aten'"):
        fusions.glu(x, activation="silu", backend="aten")
