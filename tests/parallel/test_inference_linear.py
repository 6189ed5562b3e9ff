"""The matmul of linear layers against float64: torch's, in blocks of outputs, and with widened weights."""

from itertools import product

import pytest
import torch

from megalith.parallel import inference_linear as module
from megalith.parallel.inference_linear import inference_linear
from megalith.torch_compat.tensors import multiplies_natively
from tests.sampling import sampled

ROWS = [(1, 1), (1, 2), (2, 4), (1, 32), (33, 1), (0, 2)]  # [S, B]: below, within and beyond the sizes that it splits
AVX2, AVX512 = "AVX2", "AVX512"
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}


@pytest.fixture(params=[AVX2, AVX512])
def capability(request, monkeypatch):
    """torch's name for the processor's instructions; two threads and MKL, without 16-bit instructions."""
    monkeypatch.setattr(module, "multiplies_natively", lambda dtype: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return request.param


FORMULA = [*product(ROUNDING, [(24, 40), (512, 640), (2048, 128)], [False, True], ROWS)]


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("dtype", "sizes", "has_bias", "shape"), sampled(FORMULA, lambda case: {case[:2], case[2], (case[0], case[3])})
)
def test_it_is_the_formula_rounded_once(dtype, sizes, has_bias, shape):
    given, out = sizes
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((*shape, given), (out, given), (out,)))
    y = inference_linear(x, weight, bias if has_bias else None)
    want = x.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert y.shape == (*shape, out)
    # half a unit in the last place of the result, plus the error of float32 sums of 2,048 products of about 1
    torch.testing.assert_close(y.double(), want, rtol=ROUNDING[dtype], atol=1e-4)


def test_a_large_weight_is_widened_some_outputs_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "multiplies_natively", lambda dtype: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: AVX2)
    monkeypatch.setattr(module, "_MOST_WIDENED", 300 * 16)
    shapes, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, b: shapes.append((w.dtype, *w.shape)) or linear(x, w, b)
    )
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((9, 16), (556, 16), (556,)))
    y = inference_linear(x, weight, bias)
    want = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(y.double(), want, rtol=ROUNDING[torch.bfloat16], atol=1e-4)
    assert shapes == [(torch.float32, outputs, 16) for outputs in (256, 256, 44)]


@pytest.mark.usefixtures("capability")
def test_its_gradients_are_those_of_torch():
    given = [torch.randn(*size).requires_grad_() for size in ((1, 8, 512), (640, 512), (640,))]
    dy = torch.randn(1, 8, 640)
    ours = torch.autograd.grad(inference_linear(*given), given, dy)
    theirs = torch.autograd.grad(torch.nn.functional.linear(*given), given, dy)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_it_is_in_blocks_only_where_that_was_measured_to_be_faster(capability, monkeypatch):
    def is_in_blocks(rows: int, given: int, out: int, dtype: torch.dtype = torch.float32) -> bool:
        called = []
        monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: called.append(None) or x @ w.t())
        inference_linear(torch.randn(rows, given, dtype=dtype), torch.randn(out, given, dtype=dtype), None)
        return not called

    few = {is_in_blocks(rows, 512, 640) for rows in (1, 2, 32)}
    assert few == {capability == AVX2}
    assert not any((is_in_blocks(0, 512, 640), is_in_blocks(33, 512, 640)))
    assert not any((is_in_blocks(8, 512, 384), is_in_blocks(8, 512, 700)))  # too small, not in whole blocks
    assert not is_in_blocks(7, 512, 640, torch.bfloat16)  # too few to be worth widening the weight
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_in_blocks(8, 512, 640)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert is_in_blocks(2, 512, 640) == (capability == AVX2)
    assert not is_in_blocks(1, 512, 640)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_widened_only_on_a_processor_without_instructions_for_the_dtype(capability, monkeypatch, dtype):
    def is_widened(rows: int) -> bool:
        dtypes = []
        monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: dtypes.append(w.dtype) or x @ w.t())
        inference_linear(torch.randn(rows, 16).to(dtype), torch.randn(24, 16).to(dtype), None)
        return dtypes == [torch.float32]

    assert is_widened(8) == is_widened(200) == (capability == AVX2)
    assert not is_widened(7)
    monkeypatch.setattr(module, "multiplies_natively", lambda of: of == dtype)
    assert not is_widened(8)


def test_a_processor_multiplies_16_bits_natively_as_torch_says(monkeypatch):
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        says = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
        assert multiplies_natively(dtype) == (torch.backends.mkldnn.is_available() and says)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not multiplies_natively(torch.bfloat16)


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_torch_takes_or_refuses_is_taken_or_refused(dtype):
    for given, out in ((0, 128), (128, 0)):
        y = inference_linear(torch.randn(8, given).to(dtype), torch.randn(out, given).to(dtype), None)
        assert y.shape == (8, out)
        assert not y.any()
    x, weight = torch.randn(8, 1024).to(dtype), torch.randn(2048, 1024).to(dtype)
    with pytest.raises(RuntimeError):
        inference_linear(x, weight, torch.randn(2048, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        inference_linear(x, weight, torch.randn(2548).to(dtype))
    one = torch.ones(1).to(dtype)  # torch adds it to every output
    assert torch.equal(inference_linear(x, weight, one), torch.nn.functional.linear(x, weight, one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiler_sees_the_product_of_torch(dtype):
    x, weight = torch.randn(8, 512).to(dtype), torch.randn(640, 512).to(dtype)
    compiled = torch.compile(inference_linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight, None), torch.nn.functional.linear(x, weight))
