"""fused_add_norm: equal to an addition and a norm, its two gradients, masks, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith.errors import ConfigError, ShapeError
from megalith.fusions import bias_dropout_add_fused_train, fused_add_norm
from megalith.fusions.fused_layer_norm import fused_layer_norm, fused_rms_norm
from megalith.fusions.norm.add_norm import _torch_add_norm
from megalith.numerics.dropout import Dropout, DropoutKey, keep_mask
from tests.accuracy import assert_accurate, assert_same
from tests.fusions.norm.cases_of_norms import CASES
from tests.fusions.observe import operator_calls
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "blocked", "reference")
EVERY_PATH = (*PATHS, "aten", pytest.param("compile", marks=pytest.mark.slow))
CASE = {case.name: case for case in CASES}


def key(T: int, device: str) -> DropoutKey:
    return DropoutKey(seed=1, step=2, tokens=torch.arange(T, device=device) * 5, site=3)


def rows(T: int, H: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, residual = (torch.randn(T, H, device=device).to(dtype).requires_grad_() for _ in range(2))
    return x, residual


@pytest.mark.parametrize("path", PATHS)
def test_values_worked_out_by_hand(path, device):
    x, residual = torch.tensor([[1.0, 3.0]], device=device), torch.tensor([[1.0, 3.0]], device=device)
    weight, input_bias = torch.tensor([2.0, 0.5], device=device), torch.tensor([1.0, 1.0], device=device)
    given = {"normalization": "LayerNorm", "eps": 1e-30, "input_bias": input_bias, "backend": path}
    y, h = fused_add_norm(x, residual, weight, torch.tensor([10.0, 20.0], device=device), **given)
    assert h.tolist() == [[3.0, 7.0]]
    assert y.tolist() == [[8.0, 20.5]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_it_is_an_addition_and_then_a_norm_bit_for_bit(normalization, dtype, path, device):
    x, residual = rows(4, 200, device, dtype)
    weight, input_bias = (torch.randn(200, device=device) for _ in range(2))
    options = {"dropout": Dropout(0.3, key(4, device)), "input_bias": input_bias, "backend": path}
    y, h = fused_add_norm(x, residual, weight, normalization=normalization, **options)
    want = bias_dropout_add_fused_train((x, input_bias), residual, 0.3, key=key(4, device), backend="reference")
    norm = fused_layer_norm if normalization == "LayerNorm" else fused_rms_norm
    assert_same(h, want)
    assert_same(y, norm(h, weight, backend=path))


@pytest.mark.parametrize("path", PATHS)
def test_the_mask_is_the_documented_one_and_backward_uses_it_again(path, device):
    x, residual = rows(5, 130, device)
    y, h = fused_add_norm(x, residual, normalization="RMSNorm", dropout=Dropout(0.4, key(5, device)), backend=path)
    kept = keep_mask(key(5, device), 0.4, 130)
    assert torch.equal(h == residual, ~kept)
    dx, dresidual = torch.autograd.grad(y.sum() + h.sum(), (x, residual))
    assert torch.equal(dx == 0.0, ~kept)
    torch.testing.assert_close(dx, dresidual * kept / 0.6)


@pytest.mark.parametrize("path", PATHS)
def test_a_mask_without_a_key_repeats_with_torchs_generator(path, device):
    x, residual = rows(4, 64, device)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(fused_add_norm(x, residual, normalization="RMSNorm", dropout=Dropout(0.5), backend=path)[1])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dropout", [None, Dropout(0.0)], ids=str)
def test_nothing_is_dropped_without_dropout_or_a_share_of_it(dropout, path, device):
    x, residual = rows(4, 64, device)
    y, h = fused_add_norm(x, residual, normalization="LayerNorm", dropout=dropout, backend=path)
    assert torch.equal(h, residual + x)
    assert torch.equal(y, fused_layer_norm(h, backend=path))


@pytest.mark.parametrize("path", ["triton", "blocked"])
def test_without_dropout_one_gradient_is_written_and_given_to_both(path, device):
    x, residual = rows(4, 64, device)
    y, h = fused_add_norm(x, residual, normalization="RMSNorm", backend=path)
    dx, dresidual = torch.autograd.grad([y, h], [x, residual], [torch.ones_like(y), torch.ones_like(h)])
    assert dx.data_ptr() == dresidual.data_ptr()
    (alone,) = torch.autograd.grad(
        fused_add_norm(x.detach(), residual, normalization="RMSNorm", backend=path), residual, [torch.ones_like(y)] * 2
    )
    assert torch.equal(alone, dresidual)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("used", [0, 1], ids=["the norm", "the sum"])
def test_a_result_that_nothing_is_computed_from_costs_no_gradient(used, path, device):
    case = CASE["bias, dropout, add and layer norm"]
    inputs = case.make(3, 64, torch.float32, device)
    leaves = [inputs[name] for name in ("x", "residual", "weight", "bias", "input_bias")]
    dy = torch.randn(3, 64, device=device)
    got = torch.autograd.grad(case.compute(**inputs, backend=path)[used], leaves, dy, materialize_grads=True)
    exact = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    wide = [exact[name] for name in ("x", "residual", "weight", "bias", "input_bias")]
    want = torch.autograd.grad(case.formula(**exact)[used], wide, dy.double(), materialize_grads=True)
    for g, w in zip(got, want, strict=True):
        assert_accurate(g, w, terms=3, cancels=True)


@pytest.mark.parametrize("path", PATHS)
def test_results_have_the_dtypes_of_x_and_of_the_residual(path, device):
    x, residual = torch.randn(2, 3, 16, device=device).bfloat16(), torch.randn(2, 3, 16, device=device)
    y, h = fused_add_norm(x, residual, normalization="RMSNorm", backend=path)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    assert y.shape == h.shape == x.shape
    assert torch.equal(h, x + residual)
    y, h = fused_add_norm(residual, x, normalization="LayerNorm", backend=path)  # and the other way round
    assert (y.dtype, h.dtype) == (torch.float32, torch.bfloat16)
    assert_accurate(y, torch.nn.functional.layer_norm(h.double(), (16,)), cancels=True)


@pytest.mark.parametrize("name", ["bias, dropout, add and layer norm", "add and rms norm"])
@pytest.mark.parametrize("width", [pytest.param(9001, marks=pytest.mark.slow), 20001])
def test_rows_wider_than_registers_are_read_in_tiles(width, name, device):
    CASE[name].assert_accurate(CASE[name].make(2, width, torch.float32, device), "triton")


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 8, dtype=torch.float16)
    x, residual = (memory.as_strided((3, 4), (2**30, 1), 2**31 + at) for at in (0, 4))
    x.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    residual.copy_(torch.tensor([3.0, -3.0, 3.0, -3.0]))
    dh = memory.as_strided((3, 4), (2**30, 1), 2**31)
    y, h = fused_add_norm(x, residual.requires_grad_(), normalization="RMSNorm", backend="triton")
    assert h.tolist() == [[4.0, -4.0, 4.0, -4.0]] * 3
    assert y.tolist() == [[1.0, -1.0, 1.0, -1.0]] * 3
    (dresidual,) = torch.autograd.grad(h, residual, dh)
    assert dresidual.tolist() == [[1.0, -1.0, 1.0, -1.0]] * 3


def test_what_backward_reads_is_the_next_residual_itself(device):
    x, residual = rows(4, 64, device)
    y, h = fused_add_norm(x, residual, normalization="RMSNorm", backend="triton")
    ((_, (_, _, kept, *_)),) = operator_calls(lambda: torch.autograd.grad(y.sum(), x))
    assert kept.data_ptr() == h.data_ptr()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"normalization": "L2Norm"}, ConfigError, "must be 'LayerNorm' or 'RMSNorm'; got 'L2Norm'"),
        ({"bias": torch.ones(3)}, ConfigError, "RMSNorm has no bias"),
        ({"residual": torch.ones(3, 3)}, ShapeError, r"residual must be \[2, 3\], like x; got \[3, 3\]"),
        ({"input_bias": torch.ones(2)}, ShapeError, r"input_bias must be \[3\]"),
        ({"residual": torch.ones(2, 3, device="meta")}, ShapeError, "on one device"),
        ({"residual": torch.ones(2, 3).int()}, ShapeError, "residual must be float16"),
        ({"dropout": Dropout(0.1, DropoutKey(0, 0, torch.arange(3)))}, ShapeError, "one token id for each row"),
    ],
)
def test_what_does_not_fit_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        fused_add_norm(**{"x": torch.ones(2, 3), "residual": torch.ones(2, 3), "normalization": "RMSNorm"} | given)


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_a_share_of_dropout_that_is_none_is_refused(p):
    with pytest.raises(ConfigError, match=rf"p must be in \[0, 1\), the fraction of elements to drop; got {p}"):
        Dropout(p)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("with_dropout", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("path", EVERY_PATH)
def test_autograd_sees_who_writes_into_the_sum(path, normalization, with_dropout, layout, device):
    def gradients(write: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, residual = (torch.randn(2, 3, 64, device=device).requires_grad_() for _ in range(2))
        weight = torch.linspace(0.5, 1.5, 64, device=device).requires_grad_()
        of_tokens = DropoutKey(seed=1, step=2, tokens=torch.arange(6, device=device).view(2, 3), site=3)
        options: dict[str, Any] = {"dropout": Dropout(0.5, of_tokens) if with_dropout else None, "backend": path}
        given = [x, residual]
        if layout == "transposed":
            given = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in given]
        y, h = fused_add_norm(*given, weight, normalization=normalization, **options)
        total = (y.sin() + write(h)).sum()
        return torch.autograd.grad(total, (x, residual, weight))

    want, got, refusal = gradients(lambda h: h * 2.0), None, ""
    try:
        got = gradients(lambda h: h.mul_(2.0))
    except RuntimeError as error:
        refusal = str(error)
    if got is None:
        assert "modified by an inplace operation" in refusal
    else:  # backward does not read what was overwritten
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "path", ["blocked", "aten", "reference", None, pytest.param("compile", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_residual_of_another_width_beside_float64(normalization, dtypes, path):
    dtype, of_residual = dtypes
    torch.manual_seed(0)
    # more than a block, so that the default is the path for large tensors
    x, residual = torch.randn(2100, 64, dtype=dtype), torch.randn(2100, 64, dtype=of_residual)
    weight = torch.linspace(0.5, 1.5, 64)
    leaves = [one.requires_grad_() for one in (x, residual, weight)]
    y, h = fused_add_norm(*leaves, normalization=normalization, backend=path)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    total = exact[0] + exact[1]
    norm = torch.nn.functional.layer_norm if normalization == "LayerNorm" else torch.nn.functional.rms_norm
    want = norm(total, (64,), exact[2], eps=1e-5)
    assert (y.dtype, h.dtype) == dtypes
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.double(), total, rtol=1e-6 if of_residual == torch.float32 else 1e-15, atol=0.0)
    dy = want.detach().sin()
    found = torch.autograd.grad(y, leaves, dy.to(dtype))
    expected = torch.autograd.grad(want, exact, dy)
    for leaf, got, gradient in zip(leaves, found, expected, strict=True):
        assert got.dtype == leaf.dtype
        torch.testing.assert_close(got.double(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 65), (7,)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_in_plain_torch_it_is_the_same_bit_for_bit_where_no_gradient_is_recorded(dtype, shape, has_weight):
    for scale in (1.0, 1e-4, 300.0):
        x, residual = (torch.randn(shape).mul(scale).to(dtype) for _ in range(2))
        weight = torch.randn(shape[-1]).to(dtype) if has_weight else None
        options = {"normalization": "RMSNorm", "eps": 1e-6, "backend": "aten"}
        recorded = fused_add_norm(x.clone().requires_grad_(), residual, weight, **options)
        for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
            with context:
                for got, want in zip(fused_add_norm(x, residual, weight, **options), recorded, strict=True):
                    assert got.dtype == want.dtype
                    assert torch.equal(got, want)


def test_in_plain_torch_it_compiles_whole_and_keeps_its_dtype_under_autocast_on_a_gpu(monkeypatch):
    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused_add_norm(x, x, weight, normalization="RMSNorm", eps=1e-6, backend="aten")

    x, weight = torch.randn(2, 3, 64), torch.randn(64)
    for got, want in zip(torch.compile(norm, fullgraph=True, backend="eager")(x, weight), norm(x, weight), strict=True):
        torch.testing.assert_close(got, want)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with FakeTensorMode(), torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        x, residual, weight = (
            torch.empty(*size, dtype=torch.bfloat16, device="cuda") for size in ((3, 64), (3, 64), (64,))
        )
        options = None, None, None, None, 0, 0.0, 1e-6, "RMSNorm", False
        y, h = _torch_add_norm(x, residual, weight, *options)  # where torch 2.13's rms_norm returns float32
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.bfloat16)
