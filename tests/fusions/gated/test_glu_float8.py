"""glu_float8: exactly what it saves, what that costs in accuracy, float8 numbers inside kernels."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import glu, glu_float8
from megalith.fusions.core.kernels import float8
from megalith.fusions.core.kernels.float8 import casts_natively, decode_e4m3, encode_e4m3
from tests.fusions.observe import saved_bytes

PATHS = ["triton", "blocked"]


@triton.jit
def _there_and_back(x_ptr, code_ptr, y_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, N)
    code = encode_e4m3(tl.load(x_ptr + at), NATIVE)
    tl.store(code_ptr + at, code)
    tl.store(y_ptr + at, decode_e4m3(code, NATIVE))


@pytest.mark.parametrize("natively", [False, True])
def test_kernels_round_to_float8_as_torch_does(natively, device):
    if natively and not casts_natively(torch.empty(0, device=device)):
        pytest.skip("no GPU that converts 8 bits")
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = numbers.nan_to_num(0.0).sort().values
    between = (exact[1:] + exact[:-1]) / 2  # ties go to the even one
    torch.manual_seed(0)
    drawn = (torch.randn(3582) * torch.randn(3582).mul(3).exp()).clamp(-448, 448)
    x = torch.cat((numbers, between, drawn, torch.tensor([2.0**-10, -(2.0**-10), 2.0**-130])))  # 4096 in total
    code, y = torch.empty(4096, dtype=torch.uint8, device=device), torch.empty(4096, device=device)
    _there_and_back[(1,)](x.to(device), code, y, N=4096, NATIVE=natively)
    want = x.to(torch.float8_e4m3fn)
    want_code = want.view(torch.uint8)
    if natively:  # it has only one NaN, like products on a GPU
        want_code = want_code.masked_fill(x.isnan(), 0x7F)
    assert torch.equal(code.cpu(), want_code)
    torch.testing.assert_close(y.cpu(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("capability", "hip", "interprets", "natively"),
    [
        ((8, 0), None, False, False),
        ((8, 9), None, False, False),  # this would round twice
        ((9, 0), None, False, True),
        ((9, 4), "7.0", False, False),
        ((9, 0), None, True, False),
    ],
)
def test_kernels_convert_natively_on_gpus_of_nvidia_from_sm_90_on(capability, hip, interprets, natively, monkeypatch):
    monkeypatch.setattr(float8, "triton_interprets", lambda: interprets)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert casts_natively(on_gpu) is natively
    assert not casts_natively(torch.empty(0))


def stored(x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """What is stored for ``x``: its numbers in 8 bits, and the scales."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        glu_float8(x.requires_grad_(), activation="silu", backend=backend)
    (values,) = (t for t in kept if t.dtype == torch.uint8)
    (scale,) = (t for t in kept if t.dtype == torch.float32)
    return values.view(torch.float8_e4m3fn), scale


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("backend", PATHS)
def test_the_largest_number_of_a_token_is_448_and_what_is_not_finite_is_nan_alone(backend, device):
    x = torch.tensor(
        [
            [1e30, -5e29, 0.0, 1e25],
            [1e-30, 2e-30, 0.0, -2e-30],
            [0.0, 0.0, 0.0, -0.0],
            [float("inf"), 1.0, float("nan"), -2.0],
        ],
        device=device,
    )
    values, scale = stored(x, backend)
    want = [[448.0, -224.0, 0.0, 0.00390625], [224.0, 448.0, 0.0, -448.0], [0.0] * 4, ["nan", 224.0, "nan", -448.0]]
    assert str(values.float().tolist()).replace("-0.0,", "0.0,").replace("-0.0]", "0.0]") == str(want).replace("'", "")
    torch.testing.assert_close(scale.view(-1), torch.tensor([1e30, 2e-30, 448 * 2.0**-126, 2.0], device=device) / 448)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_paths_keep_the_same_bits(dtype, device):
    torch.manual_seed(0)
    x = (torch.randn(4, 2 * 300, device=device) * torch.rand(4, 1, device=device)).to(dtype)
    for a, b in zip(stored(x, "triton"), stored(x, "blocked"), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("backend", PATHS)
def test_it_keeps_half_of_the_bytes_of_the_input(backend, device):
    x = torch.randn(8, 2 * 1408, device=device).bfloat16().requires_grad_()
    whole = saved_bytes(lambda: glu(x, activation="silu", backend=backend))
    half = saved_bytes(lambda: glu_float8(x, activation="silu", backend=backend))
    assert whole == x.nbytes
    assert half == x.nbytes / 2 + 4 * 8


def test_the_gradient_is_within_four_percent_of_the_exact_one(device):
    # gate and up are each rounded with a relative RMS error of at most 2.5 %
    torch.manual_seed(0)
    x = torch.randn(64, 2 * 512, device=device).bfloat16().requires_grad_()
    dy = torch.randn(64, 512, device=device).bfloat16()
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(glu(exact, activation="silu"), exact, dy.double())
    y = glu_float8(x, activation="silu")
    (got,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(y, glu(x, activation="silu"))
    error = ((got.double() - want).norm() / want.norm()).item()
    assert 0.01 < error < 0.04


def test_what_glu_refuses_it_refuses():
    with pytest.raises(ShapeError, match=r"x must be \[..., 2F\]"):
        glu_float8(torch.ones(2, 3), activation="silu")
    with pytest.raises(ConfigError, match="clamp must be positive"):
        glu_float8(torch.ones(2, 4), activation="silu", clamp=-1.0)


@pytest.mark.parametrize("backend", PATHS)
def test_no_columns_are_no_error(backend, device):
    x = torch.ones(3, 0, device=device, requires_grad=True)
    y = glu_float8(x, activation="silu", backend=backend)
    assert y.shape == (3, 0)
    assert torch.autograd.grad(y.sum(), x)[0].shape == (3, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, from its forward-mode formulas
def test_forward_mode_is_refused_on_every_path():
    x = torch.randn(3, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for path in (None, *PATHS, "reference"):
            with pytest.raises(BackendError, match="no derivative for forward-mode AD"):
                glu_float8(dual, activation="silu", backend=path)
