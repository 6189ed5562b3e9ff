"""FP8 linear layers: products of the quantized operands, with scales that follow from one block each."""

import gc
import re
from itertools import product as pairs
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear

from megalith.acceleration import fp8_utils
from megalith.acceleration.fp8_utils import BlockwiseProduct, why_not_fp8
from megalith.fusions import Quantized, dequantize, quantize
from megalith.fusions.core.compiler import why_not_compile

S, B, IN, OUT = 256, 3, 384, 272  # the last block of outputs is narrower
ON_HOPPER = torch.cuda.is_available() and why_not_fp8(torch.device("cuda"), torch.bfloat16) is None


def operands(dtype: torch.dtype = torch.float64, device: str = "cpu", num_rows: int = B) -> tuple[Tensor, ...]:
    """x, weight and dy; features differ in size, as activations do."""
    torch.manual_seed(0)
    x = torch.randn(S, num_rows, IN, dtype=torch.float64) * torch.logspace(-2, 2, IN, dtype=torch.float64)
    tensors = x, torch.randn(OUT, IN, dtype=torch.float64), torch.randn(S, num_rows, OUT, dtype=torch.float64)
    x, weight, dy = (tensor.to(device, dtype) for tensor in tensors)
    return x.requires_grad_(), weight.requires_grad_(), dy


def results(product, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = product(x, weight, None)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def rounded(x: Tensor, kind: str) -> Tensor:
    return dequantize(quantize(x.detach(), kind), torch.float64)


def by_sequence(x: Tensor) -> Tensor:
    """[S, B, F] -> [F, B S]."""
    return x.detach().transpose(0, 1).flatten(0, 1).t().contiguous()


def test_results_are_products_of_the_rounded_operands():
    x, weight, dy = operands()
    y, dx, dw = results(BlockwiseProduct(), x, weight, dy)
    of_weight = rounded(weight, "block128x128")
    close = {"rtol": 1e-12, "atol": 1e-9}
    torch.testing.assert_close(y, rounded(x.flatten(0, 1), "block128").view(x.shape) @ of_weight.t(), **close)
    torch.testing.assert_close(dx, rounded(dy.flatten(0, 1), "block128").view(dy.shape) @ of_weight, **close)
    want = rounded(by_sequence(dy), "block128") @ rounded(by_sequence(x), "block128").t()
    torch.testing.assert_close(dw, want, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_close_to_those_of_a_plain_product(dtype):
    x, weight, dy = operands(dtype)
    wide = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), dy.double())
    for got, want in zip(results(BlockwiseProduct(), x, weight, dy), results(linear, *wide), strict=True):
        assert got.dtype == dtype
        assert torch.cosine_similarity(got.double().flatten(), want.flatten(), dim=0) > 0.999


def test_a_rank_that_has_whole_blocks_computes_its_part_of_the_same_numbers():
    x, weight, dy = operands()
    y, dx, dw = results(BlockwiseProduct(), x, weight, dy)
    part = slice(128, 256)
    close = {"rtol": 1e-12, "atol": 1e-9}
    # some outputs, as in a column-parallel layer
    some = weight.detach()[part].requires_grad_()
    got = results(BlockwiseProduct(), x, some, dy[..., part])
    torch.testing.assert_close(got[0], y[..., part], **close)
    torch.testing.assert_close(got[2], dw[part], **close)
    # some inputs, as in a row-parallel layer
    mine = x.detach()[..., part].requires_grad_(), weight.detach()[:, part].requires_grad_(), dy
    got = results(BlockwiseProduct(), *mine)
    torch.testing.assert_close(got[1], dx[..., part], **close)
    torch.testing.assert_close(got[2], dw[:, part], **close)
    # some tokens of each sequence, as with context parallelism, and some of the sequences
    for tokens, rows in pairs((slice(0, 128), slice(128, 256)), (slice(0, 1), slice(1, B))):
        got = results(BlockwiseProduct(), x.detach()[tokens, rows].requires_grad_(), weight, dy[tokens, rows])
        torch.testing.assert_close(got[0], y[tokens, rows], **close)
        dw = dw - got[2]
    torch.testing.assert_close(dw, torch.zeros_like(dw), **close)


def test_gradients_of_weights_may_be_left_out_of_it():
    x, weight, dy = operands()
    (y, dx, dw), (in_8_bits, its_dx, _) = (results(BlockwiseProduct(wgrad=on), x, weight, dy) for on in (False, True))
    assert torch.equal(y, in_8_bits)
    assert torch.equal(dx, its_dx)
    torch.testing.assert_close(dw, dy.flatten(0, 1).t() @ x.flatten(0, 1))


def test_the_input_is_saved_in_8_bits_and_only_for_needed_gradients():
    x, weight, _ = operands()
    for of_x, of_weight in pairs((True, False), repeat=2):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = BlockwiseProduct()(x.detach().requires_grad_(of_x), weight.detach().requires_grad_(of_weight), None)
        assert y.requires_grad == (of_x or of_weight)
        wanted = [torch.float64] * of_x + [torch.float8_e4m3fn, torch.float32] * of_weight
        assert [t.dtype for t in saved] == wanted


def test_projections_of_one_input_quantize_it_once_and_let_go_of_it():
    x, weight, _ = operands(num_rows=1)
    product, quantized = BlockwiseProduct(), []

    def counting(tensor: Tensor, kind: str, **options: object) -> object:
        quantized.append(kind)
        return quantize(tensor, kind, **options)

    with patch.object(fp8_utils, "quantize", counting):
        for _ in range(3):
            product(x, weight, None)
        assert quantized == ["block128", *["block128x128"] * 3]
        with torch.no_grad():
            x.mul_(2.0)  # other numbers in the same tensor
        y = product(x, weight, None)
        assert quantized[4:] == ["block128", "block128x128"]
    assert torch.equal(y, BlockwiseProduct()(x, weight, None))
    del x, y
    gc.collect()
    assert product._last is None


def test_a_bias_is_added_and_has_a_gradient():
    x, weight, dy = operands()
    bias = torch.randn(OUT, dtype=torch.float64, requires_grad=True)
    y = BlockwiseProduct()(x, weight, bias)
    torch.testing.assert_close(y, BlockwiseProduct()(x, weight, None) + bias)
    assert torch.equal(torch.autograd.grad(y, bias, dy)[0], dy.sum((0, 1)))


def test_the_result_may_be_written_into():
    x, weight, _ = operands()
    want = 2.0 * BlockwiseProduct()(x, weight, None)
    assert torch.equal(BlockwiseProduct()(x, weight, None).mul_(2.0), want)


def test_one_output_is_not_quantized():
    x, weight, _ = operands()
    assert torch.equal(BlockwiseProduct()(x, weight[:1], None), linear(x, weight[:1]))


@pytest.mark.parametrize("shape", [(0, 1, IN), (S, 0, IN)])
def test_no_rows_give_no_rows(shape):
    _, weight, _ = operands()
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y, dx, dw = results(BlockwiseProduct(), x, weight, torch.zeros(*shape[:2], OUT, dtype=torch.float64))
    assert (y.shape, dx.shape) == ((*shape[:2], OUT), shape)
    assert torch.equal(dw, torch.zeros_like(weight))


def test_inputs_of_inference_mode_are_not_kept():
    _, weight, _ = operands()
    product = BlockwiseProduct()
    with torch.inference_mode():
        x = torch.randn(S, 1, IN, dtype=torch.float64)
        y = product(x, weight, None)
        x.mul_(2.0)
        assert not torch.equal(product(x, weight, None), y)


@pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")
def test_compiled_as_a_whole_it_gives_the_same():
    x, weight, dy = operands(torch.float32, num_rows=1)
    product = BlockwiseProduct()
    compiled = torch.compile(product.__call__, fullgraph=True)
    for got, want in zip(results(compiled, x, weight, dy), results(product, x, weight, dy), strict=True):
        assert (got - want).norm() < 1e-6 * want.norm()


def assert_column_major(scale: Tensor, num_rows: int, num_columns: int) -> None:
    assert scale.shape == (num_rows, num_columns)
    assert scale.stride(0) == 1
    assert scale.stride(1) == num_rows or (num_columns == scale.stride(1) == 1)


@pytest.mark.parametrize(
    ("num_rows", "num_odd", "num_inputs"), [(1, 0, IN), (B, 0, IN), (1, 5, IN), (1, 0, 128), (1, 5, 80)]
)
def test_the_library_gets_operands_and_scales_as_it_reads_them(num_rows, num_odd, num_inputs):
    """By the checks of torch's operator, ATen/native/cuda/ScaledBlas.cpp; and rows in multiples of four."""
    called = []

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        (M, K), N = a.shape, b.shape[1]
        blocks = -(-K // 128)
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert K % 16 == N % 16 == 0
        assert M % 4 == 0
        assert recipe_a == ScalingType.BlockWise1x128
        assert_column_major(scale_a, M, blocks)
        if recipe_b == ScalingType.BlockWise1x128:
            assert_column_major(scale_b, N, blocks)
        else:
            padded = -(-blocks // 4) * 4
            assert recipe_b == ScalingType.BlockWise128x128
            assert (scale_b.shape, scale_b.stride()) == ((padded, -(-N // 128)), (1, padded))
        called.append(recipe_b)
        # what the library computes, from the operands and scales that it was given
        kind = "block128" if recipe_b == ScalingType.BlockWise1x128 else "block128x128"
        of_b = scale_b if kind == "block128" else scale_b[:blocks].t()
        of_operands = Quantized(a, scale_a, "block128"), Quantized(b.t(), of_b, kind)
        left, right = (dequantize(one, torch.float64) for one in of_operands)
        return (left @ right.t()).to(output_dtype)

    x, weight, dy = operands(torch.float32, num_rows=num_rows)
    x = x.detach()[: S - num_odd, :, :num_inputs].requires_grad_()
    weight = weight.detach()[:, :num_inputs].contiguous().requires_grad_()
    product, dy = BlockwiseProduct(wgrad=not num_odd), dy[: S - num_odd]
    want = results(product, x, weight, dy)
    with patch.object(fp8_utils, "scaled_mm", scaled_mm), patch.object(fp8_utils, "_uses_cublas", lambda *_: True):
        got = results(product, x, weight, dy)
    tiled, rows = ScalingType.BlockWise128x128, ScalingType.BlockWise1x128
    assert called == ([tiled, tiled] if num_odd else [tiled, tiled, rows])
    for of_library, emulated in zip(got, want, strict=True):
        assert (of_library - emulated).norm() < 1e-6 * emulated.norm()


@pytest.mark.skipif(not ON_HOPPER, reason="only Hopper GPUs have such products")
@pytest.mark.parametrize(("num_rows", "num_odd"), [(1, 0), (B, 0), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_computes_the_same(dtype, num_rows, num_odd):
    x, weight, dy = operands(dtype, "cuda", num_rows)
    x, dy = x.detach()[: S - num_odd].requires_grad_(), dy[: S - num_odd]
    of_gpu = results(BlockwiseProduct(wgrad=not num_odd), x, weight, dy)
    with patch.object(fp8_utils, "_uses_cublas", lambda *_: False):
        emulated = results(BlockwiseProduct(wgrad=not num_odd), x, weight, dy)
    for got, want in zip(of_gpu, emulated, strict=True):
        assert (got.double() - want.double()).norm() < 4e-3 * want.double().norm()


@pytest.mark.parametrize(
    ("capability", "cuda", "refusal"),
    [
        ((9, 0), "13.0", None),
        ((9, 0), "12.9", None),
        ((9, 0), "12.8", "a torch built for CUDA 12.9 or later; this one is for CUDA 12.8"),
        ((8, 9), "13.0", r"a Hopper GPU .*, and NVIDIA X has 8\.9"),
        ((10, 0), "13.0", r"NVIDIA X has 10\.0"),
    ],
)
def test_a_gpu_or_a_torch_without_such_products_is_named(capability, cuda, refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    reason = why_not_fp8(torch.device("cuda", 0), torch.bfloat16)
    assert reason is None if refusal is None else re.search(refusal, reason)
    assert why_not_fp8(torch.device("cuda", 0), torch.float64) is None  # emulated
    assert why_not_fp8(torch.device("cpu"), torch.bfloat16) is None
