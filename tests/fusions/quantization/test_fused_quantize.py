"""Quantized tensors: every 16-bit number on every path, scales by hand, non-finite values, and refusals."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import Quantized, dequantize, quantize
from tests.fusions.quantization.cases_of_quantize import nearest
from tests.kernel_reports import in_interpreter
from tests.sampling import sampled

PATHS = ("triton", "blocked", "reference")
KINDS = ("tensor", "row", "block128", "block128x128", "mxfp8", "nvfp4")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
EVERY_BIT_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def codes(quantized: Quantized) -> Tensor:
    return quantized.values.view(torch.uint8)


def every_number(dtype: torch.dtype, largest: float, width: int, device: str) -> Tensor:
    """[n, width]: all numbers of a 16-bit format up to ``largest``, which ends each row so that scales are 1."""
    x = EVERY_BIT_PATTERN.view(dtype)
    x = x[x.abs() <= largest]
    x = torch.nn.functional.pad(x, (0, -len(x) % (width - 1))).view(-1, width - 1)
    return torch.nn.functional.pad(x, (0, 1), value=largest).to(device)


OF_16_BITS = [*product([torch.bfloat16, torch.float16], [E4M3, E5M2], ["tensor", "row"], PATHS)]


@pytest.mark.parametrize(
    ("of", "dtype", "kind", "path"), sampled(OF_16_BITS, lambda case: {case[:2], case[2], (case[3], case[1])})
)
def test_every_number_of_16_bits_goes_to_the_nearest_of_8(of, dtype, kind, path, device):
    x = every_number(of, LARGEST[dtype], 8192, device)
    quantized = quantize(x, kind, dtype=dtype, backend=path)
    assert quantized.scale.unique().item() == 1.0
    assert torch.equal(codes(quantized).cpu(), nearest(x.cpu(), dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_goes_to_the_nearest_of_4(of, path, device):
    # 448 * 6 makes the tensor's scale 1; with a 6 in each group, the group scales are 1 too
    x = torch.cat((every_number(of, 6.0, 16, device), torch.full((1, 16), 448 * 6.0, dtype=of, device=device)))
    quantized = quantize(x, "nvfp4", backend=path)
    assert quantized.tensor_scale.item() == 1.0
    assert quantized.scale[:-1].float().unique().tolist() == [1.0]
    want = nearest(x[:-1].cpu(), torch.float4_e2m1fn_x2)
    assert torch.equal(codes(quantized)[:-1].cpu(), want[:, ::2] + 16 * want[:, 1::2])


@pytest.mark.parametrize("path", PATHS)
def test_ties_go_to_the_even_neighbour_and_torch_agrees_in_float32(path, device):
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = torch.cat((ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(500.0)), numbers))
    x = torch.cat((beside, -beside)).to(device)
    assert torch.equal(codes(quantize(x, "row", backend=path)), x.to(E4M3).view(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
def test_scales_worked_out_by_hand(path, device):
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
    x[0, 3], x[1, 40] = -7.0, 896.0
    assert quantize(x, "tensor", backend=path).scale.item() == 2.0
    assert quantize(x, "row", backend=path).scale.tolist() == [[2.0**-6], [2.0]]
    assert quantize(x, "block128", dtype=E5M2, backend=path).scale.tolist() == [[2.0**-13], [2.0**-6]]
    assert quantize(x, "block128x128", backend=path).scale.tolist() == [[2.0]]
    # the exponent of 7 is 2, that of 896 is 9, and that of the largest number, 448, is 8
    mx = quantize(x, "mxfp8", backend=path)
    assert mx.scale.dtype == torch.float8_e8m0fnu
    assert mx.scale.float().tolist() == [[2.0**-6, 2.0**-127], [2.0**-127, 2.0]]
    assert codes(mx)[0, 3].item() == codes(mx)[1, 40].item() | 0x80  # 7 * 2^6 = 896 / 2 = 448
    # a group of 0 takes the smallest scale, 2^-9; 7 / 6 over 896 / 2688 is 3.5, 896 / 6 over it is 448
    nv = quantize(x, "nvfp4", backend=path)
    assert nv.tensor_scale.item() == torch.tensor(896 / 2688).item()
    assert nv.scale.float().tolist() == [[3.5, *[2.0**-9] * 3], [2.0**-9, 2.0**-9, 448.0, 2.0**-9]]
    assert codes(nv)[0, :2].tolist() == [0, 0xF0]  # column 3 is the high half of the second byte: -6


@pytest.mark.parametrize("path", PATHS)
def test_a_scale_of_mx_is_rounded_down_and_what_is_beyond_saturates(path, device):
    x = torch.tensor([511.0, 480.0, 449.0, 448.0, -511.0, 1.0], device=device)
    mx = quantize(x, "mxfp8", backend=path)
    assert mx.scale.float().tolist() == [1.0]
    assert dequantize(mx).tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, 1.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_come_back_as_zeros_with_finite_scales(kind, path, device):
    quantized = quantize(torch.zeros(2, 130, device=device), kind, backend=path)
    assert quantized.scale.float().isfinite().all()
    assert torch.equal(dequantize(quantized), torch.zeros(2, 130, device=device))


@pytest.mark.parametrize(
    ("of", "kind", "path"),
    sampled(
        [*product([torch.float32, torch.bfloat16, torch.float16], KINDS, PATHS)], lambda case: {case[1:], case[::2]}
    ),
)
def test_the_smallest_and_the_largest_numbers_do_not_overflow(of, kind, path, device):
    smallest = torch.tensor(1, dtype=torch.int32 if of == torch.float32 else torch.int16).view(of).item()
    for size in (smallest, torch.finfo(of).tiny, torch.finfo(of).max):
        back = dequantize(quantize(torch.full((1, 128), size, device=device).to(of), kind, backend=path))
        assert back.isfinite().all()
        assert back[0, 0].item() == pytest.approx(size, rel=0.13) or size < 1e-38  # where float32 has no digits left


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_and_an_infinity_becomes_the_largest_number(kind, path, device):
    x = torch.ones(3, 128, dtype=torch.bfloat16, device=device)
    x[0, 1], x[2, 5], x[2, 6] = float("nan"), float("inf"), float("-inf")
    back = dequantize(quantize(x, kind, backend=path), torch.bfloat16)
    largest = torch.finfo(torch.bfloat16).max
    assert back[2, 5].item() == pytest.approx(largest, rel=0.5)  # a scale of 2^n clips up to 1/8
    assert back[2, 6] == -back[2, 5]
    where = back.isnan()
    assert where[0, 1]
    assert where.sum() == (16 if kind == "nvfp4" else 1)  # 4 bits have no NaN, so the scale is NaN
    if kind in ("row", "block128", "mxfp8"):
        assert torch.equal(back[1], x[1])  # it has its own scales


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_twice_changes_nothing(kind, device):
    torch.manual_seed(0)
    once = dequantize(quantize(torch.randn(4, 256, device=device), kind))
    torch.testing.assert_close(dequantize(quantize(once, kind)), once, rtol=1e-6 if kind != "nvfp4" else 0.2, atol=0.02)


# relative L2 errors: with n fraction bits, a number is off by at most 2^-(n + 1), by 1 / sqrt(3) of that on average
@pytest.mark.parametrize(("kind", "error"), [*((kind, 0.036) for kind in KINDS[:5]), ("nvfp4", 0.144)])
def test_values_come_back_within_the_rounding_of_their_format(kind, error, device):
    torch.manual_seed(0)
    x = torch.randn(256, 256, device=device)
    assert (dequantize(quantize(x, kind)) - x).norm() < error * x.norm()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_transpose_is_that_of_a_tensor_quantised_by_columns(kind, path, device):
    torch.manual_seed(0)
    x = torch.randn(2, 34, 130, device=device)
    transposed = quantize(x, kind, transpose=True, backend=path).transposed
    want = quantize(x.mT if kind == "block128x128" else x.flatten(0, 1).t(), kind, backend=path)
    assert torch.equal(codes(transposed), codes(want))
    assert torch.equal(transposed.scale.float(), want.scale.float())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "scale", "transposed"),
    [
        ("tensor", (), ()),
        ("row", (2, 3, 1), (300, 1)),
        ("block128", (2, 3, 3), (300, 1)),
        ("block128x128", (2, 1, 3), (2, 3, 1)),
        ("mxfp8", (2, 3, 10), (300, 1)),
        ("nvfp4", (2, 3, 19), (300, 1)),
    ],
)
def test_shapes_are_those_of_the_page(kind, scale, transposed, path, device):
    quantized = quantize(torch.ones(2, 3, 300, device=device), kind, transpose=True, backend=path)
    per_byte = 2 if kind == "nvfp4" else 1
    assert quantized.values.shape == (2, 3, 300 // per_byte)
    assert quantized.scale.shape == scale
    assert quantized.transposed.scale.shape == transposed
    rows = (2, 300, 3) if kind == "block128x128" else (300, 6)
    assert quantized.transposed.values.shape == (*rows[:-1], rows[-1] // per_byte)
    assert dequantize(quantized.transposed).shape == rows


@pytest.mark.parametrize("path", PATHS)
def test_scales_of_block128_are_column_major(path, device):
    quantized = quantize(torch.randn(6, 50, 300, device=device), "block128", transpose=True, backend=path)
    assert quantized.transposed is not None
    assert (quantized.scale.shape, quantized.scale.stride()) == ((6, 50, 3), (50, 1, 300))
    assert (quantized.transposed.scale.shape, quantized.transposed.scale.stride()) == ((300, 3), (1, 300))


@in_interpreter
@pytest.mark.parametrize("kind", ["row", "mxfp8"])
def test_rows_are_addressed_in_64_bits(kind, tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    x = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0)
    for transpose in (False, True):
        assert dequantize(quantize(x, kind, transpose=transpose, backend="triton")).tolist() == [[2.0] * 4] * 3


def test_a_quantised_tensor_is_a_constant_on_every_path(device):
    x = torch.randn(4, 64, device=device, requires_grad=True)
    for path in PATHS:
        assert not dequantize(quantize(x, "row", backend=path)).requires_grad


def test_float64_is_rounded_to_float32_first(device):
    x = torch.randn(4, 64, dtype=torch.float64, device=device)
    assert torch.equal(codes(quantize(x, "row")), codes(quantize(x.float(), "row")))


@pytest.mark.slow
def test_torch_compile_returns_the_record(device):
    torch.compiler.reset()
    x = torch.randn(4, 64, device=device)
    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, "mxfp8", transpose=True), quantize(x, "mxfp8", transpose=True)
    assert torch.equal(codes(got.transposed), codes(want.transposed))


@pytest.mark.parametrize(
    ("x", "settings", "error", "message"),
    [
        (torch.ones(2, 4), {"kind": "block64"}, ConfigError, "one of tensor, row, .*nvfp4; got 'block64'"),
        (torch.ones(2, 4), {"kind": "row", "dtype": torch.int8}, ConfigError, "e4m3fn or .*e5m2; got torch.int8"),
        (torch.ones(2, 4), {"kind": "nvfp4", "dtype": E4M3}, ConfigError, "must be torch.float4_e2m1fn_x2; got"),
        (torch.ones(2, 4).int(), {"kind": "row"}, ShapeError, "x must be float16, .*got torch.int32"),
        (torch.tensor(1.0), {"kind": "row"}, ShapeError, r"\[\.\.\., H\] with H at least 1; got \[\]"),
        (torch.ones(2, 0), {"kind": "tensor"}, ShapeError, r"H at least 1; got \[2, 0\]"),
        (torch.ones(4), {"kind": "block128x128"}, ShapeError, r"\[\.\.\., R, H\].*got \[4\]"),
        (torch.ones(2, 3), {"kind": "nvfp4"}, ShapeError, r"even number of columns.*got \[2, 3\]"),
        (torch.ones(3, 4), {"kind": "nvfp4", "transpose": True}, ShapeError, r"even number of rows.*got \[3, 4\]"),
        (torch.ones(2, 4), {"kind": "row", "backend": "aten"}, BackendError, "no such path"),
    ],
)
def test_what_does_not_fit_is_refused(x, settings, error, message):
    with pytest.raises(error, match=message):
        quantize(x, **settings)


def test_dequantising_to_few_bits_is_refused():
    with pytest.raises(ConfigError, match=r"dtype must be float16, .*got torch.float8_e4m3fn"):
        dequantize(quantize(torch.ones(2, 4), "row"), E4M3)
