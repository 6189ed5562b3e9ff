"""The default product of linear layers: bit for bit torch's in bfloat16, with oneDNN's sums in float32."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from megalith.parallel import linear as module
from megalith.parallel.linear import linear
from megalith.torch_compat.tensors import multiplies_natively

S, B, IN, OUT = 32, 16, 64, 2048  # an output of 2^20 elements, the smallest for which oneDNN adds the bias
needs_instructions = pytest.mark.skipif(
    not multiplies_natively(torch.bfloat16), reason="the CPU has no instructions for bfloat16"
)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((S, B, IN), (OUT, IN), (OUT,)))
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.fixture
def by_onednn(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that oneDNN has multiplied, bias included."""
    shapes, multiply = [], module.linear_in_onednn
    monkeypatch.setattr(module, "linear_in_onednn", lambda x, w, b: shapes.append(tuple(x.shape)) or multiply(x, w, b))
    return shapes


def gradients(product: Callable[[Tensor, Tensor, Tensor], Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    """The output, its gradients, and the gradients of those."""
    y = product(*given)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype).requires_grad_()
    first = torch.autograd.grad(y, given, dy, create_graph=True)
    second = torch.autograd.grad([(each * each).sum() for each in first], (*given[:2], dy))
    return [each.detach() for each in (y, *first, *second)]


@needs_instructions
@pytest.mark.parametrize("shape", [(S, B, IN), (S * B, IN), (1, S * B, IN)])
def test_output_gradients_and_their_gradients_are_bit_for_bit_those_of_torch(by_onednn, shape):
    x, weight, bias = operands()
    given = (x.detach().view(shape).requires_grad_(), weight, bias)
    for got, want in zip(gradients(linear, given), gradients(nn.functional.linear, given), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
    assert by_onednn == [shape]


@needs_instructions
def test_the_sum_with_the_bias_is_rounded_once():
    x, weight, bias = operands()
    want = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(linear(x, weight, bias).double(), want, rtol=2.0**-8, atol=1e-4)


@needs_instructions
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed_are_computed(by_onednn, needs):
    given = [each.detach().requires_grad_(needed) for each, needed in zip(operands(), needs, strict=True)]
    y = linear(*given)
    with FlopCounterMode(display=False) as counter:
        y.backward(torch.ones_like(y))
    assert [each.grad is not None for each in given] == list(needs)
    assert counter.get_total_flops() == (0 if needs[2] else 2 * S * B * IN * OUT)
    assert by_onednn


@needs_instructions
def test_without_a_gradient_the_bias_is_added_in_the_product_too(by_onednn):
    with torch.no_grad():
        y = linear(*operands())
    assert by_onednn == [(S, B, IN)]
    assert not y.requires_grad


class Marked(Tensor):
    """A subclass, which may define torch's operators anew."""


def changed(name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight, bias = operands(torch.float16 if name == "float16" else torch.bfloat16)
    of_rows = {"transposed": x.transpose(0, 1), "strided": operands()[0].repeat(1, 1, 2)[..., ::2], "few": x[1:]}
    x = of_rows.get(name, x)
    weights = {"weight of columns": weight.detach().t().contiguous().t(), "subclass": weight.as_subclass(Marked)}
    biases = {"no bias": None, "one bias": bias[:1], "strided bias": bias.repeat_interleave(2)[::2]}
    return x, weights.get(name, weight), biases.get(name, bias)


@pytest.mark.parametrize(
    "name",
    [
        *("float16", "transposed", "strided", "few", "weight of columns", "subclass"),
        *("no bias", "one bias", "strided bias"),
    ],
)
def test_everything_else_is_left_to_torch(by_onednn, name):
    given = changed(name)
    assert torch.equal(linear(*given), nn.functional.linear(*given))
    assert not by_onednn


def test_without_instructions_it_is_left_to_torch(by_onednn, monkeypatch):
    monkeypatch.setattr(module, "multiplies_natively", lambda dtype: False)
    given = operands()
    assert torch.equal(linear(*given), nn.functional.linear(*given))
    assert not by_onednn


def test_with_onednn_off_it_is_left_to_torch(by_onednn, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    given = operands()
    assert torch.equal(linear(*given), nn.functional.linear(*given))
    assert not by_onednn


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_casts_for_the_product_of_torch(by_onednn, given):
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(*operands(given))
    assert y.dtype == torch.bfloat16
    assert not by_onednn


def test_what_watches_operators_sees_that_of_torch(by_onednn):
    given = operands()
    with FlopCounterMode(display=False) as counter:
        linear(*given)
    assert counter.get_total_flops() == 2 * S * B * IN * OUT
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*given), nn.functional.linear(*given))
    x, weight, bias = (each.detach() for each in given)
    ones = torch.ones_like(bias)
    assert torch.equal(torch.func.grad(lambda b: linear(x, weight, b).sum())(bias), ones * (S * B))
    assert not by_onednn


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch's own forward-mode formulas
def test_forward_mode_has_the_derivative_of_torch(by_onednn):
    x, weight, bias = operands()
    with forward_ad.dual_level():
        y = linear(forward_ad.make_dual(x, torch.ones_like(x)), weight, bias)
        tangent = forward_ad.unpack_dual(y).tangent
    assert torch.equal(tangent, nn.functional.linear(torch.ones_like(x), weight))
    assert not by_onednn


@pytest.mark.parametrize("modes", [nullcontext, torch.no_grad])
def test_what_torch_refuses_is_refused_in_its_words(modes):
    x, weight, bias = operands()
    narrow, of_one = x[..., 1:].contiguous(), weight[:, 0].contiguous()
    for wrong in ((narrow, weight, bias), (x, weight, bias.double()), (x, weight, bias[1:]), (x, of_one, bias)):
        with modes(), pytest.raises(RuntimeError) as refused:
            linear(*wrong)
        with modes(), pytest.raises(RuntimeError) as by_torch:
            nn.functional.linear(*wrong)
        assert str(refused.value) == str(by_torch.value)


@pytest.mark.parametrize("sizes", [(0, IN, OUT), (S * B, 0, OUT), (S * B, IN, 0)])
def test_of_empty_operands_it_is_that_of_torch(sizes):
    T, given, out = sizes
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((T, given), (out, given), (out,)))
    assert torch.equal(linear(x, weight, bias), nn.functional.linear(x, weight, bias))


@pytest.fixture
def in_float32(by_onednn, monkeypatch) -> list[tuple[int, ...]]:
    """The same, where oneDNN's float32 products are taken for faster than torch's."""
    monkeypatch.setattr(module, "_has_slow_mkl", lambda: True)
    return by_onednn


def relative_error(got: Tensor, want: Tensor) -> float:  # about 4e-7; the gradients of gradients have two products
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("shape", [(S, B, IN), (S * B, IN)])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_float32_by_onednn_matches_float64_with_its_gradients_and_theirs(in_float32, shape, has_bias):
    x, weight, bias = operands(torch.float32)
    given = [x.detach().view(shape).requires_grad_(), weight, *([bias] if has_bias else [])]
    exact = [each.detach().double().requires_grad_() for each in given]
    got = gradients(lambda x, weight, bias=None: linear(x, weight, bias), tuple(given))
    want = gradients(nn.functional.linear, tuple(exact))
    for ours, reference in zip(got, want, strict=True):
        assert relative_error(ours, reference) <= 2e-6
    assert all(each.is_contiguous() for each in got[: 1 + len(given)])
    assert in_float32[:3] == [shape, (S * B, OUT), (IN, S * B)]


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_float32_gradients_that_are_needed_are_computed(in_float32, needs):
    given = [each.detach().requires_grad_(needed) for each, needed in zip(operands(torch.float32), needs, strict=True)]
    y = linear(*given)
    y.backward(torch.ones_like(y))
    assert [each.grad is not None for each in given] == list(needs)
    assert len(in_float32) == (1 if needs[2] else 2)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (S, B, 1), (1, 1, OUT)])
def test_float32_gradients_take_an_expanded_gradient(in_float32, sizes):
    x, weight, _ = operands(torch.float32)
    dy = torch.randn(sizes).expand(S, B, OUT)
    got = torch.autograd.grad(linear(x, weight, None), (x, weight), dy)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    want = torch.autograd.grad(nn.functional.linear(*exact), exact, dy.double())
    assert all(relative_error(ours, reference) <= 2e-6 for ours, reference in zip(got, want, strict=True))
    assert in_float32 == [(S, B, IN)]


def test_wide_and_narrow_float32_weights_have_contiguous_gradients_that_match_float64(in_float32):
    for T, num_in, num_out in ((512, 64, 2048), (512, 2048, 64)):
        x, weight = torch.randn(T, num_in, requires_grad=True), torch.randn(num_out, num_in, requires_grad=True)
        dy = torch.randn(T, num_out)
        got = torch.autograd.grad(linear(x, weight, None), (x, weight), dy)
        want = dy.double() @ weight.detach().double(), dy.double().t() @ x.detach().double()
        assert all(relative_error(ours, reference) <= 2e-6 for ours, reference in zip(got, want, strict=True))
        assert all(each.is_contiguous() for each in got)
        assert in_float32[-1] == (64, T)  # the gradient of the weight
    assert len(in_float32) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_the_needed_gradients_read_is_saved(in_float32, dtype):
    x, weight, bias = (each.detach() for each in operands(dtype))
    saved: list[int] = []
    for given, read in ((x, weight), (weight, x), (bias, None)):
        given.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.data_ptr()), lambda _: None):
            linear(x, weight, bias)
        given.requires_grad_(False)
        assert saved == ([] if read is None else [read.data_ptr()])
        saved.clear()


def in_float32_but(name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight, bias = (each.detach() for each in operands(torch.float32))
    changes: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
        "few": (x[1:], weight, bias),
        "strided": (x.repeat(1, 1, 2)[..., ::2], weight, bias),
        "strided bias": (x, weight, bias.repeat_interleave(2)[::2]),
        "one bias": (x, weight, bias[:1]),
        "overlapping": (x.view(-1)[: S * B * IN // 2].unfold(0, IN, 1)[: S * B], weight, bias),
        "overlapping weight": (x, x.view(-1).unfold(0, IN, 1)[:OUT], bias),
        "subclass": (x, weight.as_subclass(Marked), bias),
        "float64": (x.double(), weight.double(), bias.double()),
    }
    return changes[name]


@pytest.mark.parametrize(
    "name", ["few", "strided", "overlapping", "overlapping weight", "strided bias", "one bias", "subclass", "float64"]
)
def test_everything_else_is_left_to_torch_beside_float32(in_float32, name):
    given = in_float32_but(name)
    assert torch.equal(linear(*given), nn.functional.linear(*given))
    assert not in_float32


def test_torch_compile_does_not_see_what_the_cpu_is(by_onednn):
    x, weight, bias = (each.detach() for each in operands(torch.float32))
    compiled = torch.compile(linear, fullgraph=True, backend="eager")  # cannot trace torch.cpu.get_capabilities
    for rows in (x, x[:1]):
        assert torch.equal(compiled(rows, weight, bias), nn.functional.linear(rows, weight, bias))
    assert not by_onednn


def test_what_acts_on_the_float32_operator_of_torch_sees_it(in_float32, monkeypatch):
    x, weight, bias = (each.detach() for each in operands(torch.float32))
    want = nn.functional.linear(x, weight, bias)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(linear(x, weight, bias), want)
    assert counter.get_total_flops() == 2 * S * B * IN * OUT
    assert torch.equal(torch.compile(linear, fullgraph=True, backend="eager")(x, weight, bias), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert torch.equal(linear(x, weight, bias), want)
    assert not in_float32


@pytest.mark.parametrize(
    ("cpu_name", "avx512_vp2intersect", "slow"),
    [("AMD EPYC", True, True), ("AMD EPYC", False, False), ("Intel(R) Xeon(R) Processor", True, False)],
)
def test_mkl_is_slow_on_an_amd_cpu_of_zen_5(cpu_name, avx512_vp2intersect, slow, monkeypatch):
    has = {"cpu_name": cpu_name, "avx512_vp2intersect": avx512_vp2intersect}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert module._has_slow_mkl() == (slow and torch.backends.mkl.is_available())
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert not module._has_slow_mkl()
