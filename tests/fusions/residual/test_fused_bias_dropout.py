"""fused_bias_dropout: the same mask on every path and shard, its rate, what is saved, and refusals."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_dropout_add_unfused,
    get_bias_dropout_add,
)
from megalith.numerics.dropout import DropoutKey, keep_mask
from tests.accuracy import DTYPES
from tests.fusions.observe import saved_bytes
from tests.kernel_reports import in_interpreter

PATHS = ["triton", "blocked", "reference"]
TOKENS = (torch.arange(6) + 2**40).view(2, 3)


def inputs(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and residual, with gradients."""
    torch.manual_seed(0)
    x, residual = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
    return x, torch.randn(shape[-1], device=device).to(dtype).requires_grad_(), residual


def key_for(device: str, tokens: Tensor = TOKENS) -> DropoutKey:
    return DropoutKey(seed=1234, step=7, tokens=tokens.to(device), site=5)


def mask_of(p: float, key: DropoutKey | None, backend: str, H: int = 1500, feature_offset: int = 0) -> Tensor:
    """The mask of forward, after checking that backward uses the same: bool [*tokens, H]."""
    tokens = TOKENS.to("cuda" if torch.cuda.is_available() else "cpu") if key is None else key.tokens
    x = torch.ones(*tokens.shape, H, device=tokens.device, requires_grad=True)
    settings = {"key": key, "feature_offset": feature_offset, "backend": backend}
    y = bias_dropout_add_fused_train((x, None), torch.zeros_like(x), p, **settings)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, y)
    assert torch.equal(y, (y != 0) * torch.tensor(1 / (1 - p), device=y.device))
    return (y != 0).cpu()


@pytest.mark.parametrize("backend", PATHS)
def test_values_worked_out_by_hand(backend, device):
    x, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device), torch.tensor([10.0, 20.0], device=device)
    residual = torch.full((2, 2), 100.0, device=device)
    given = (x, bias.requires_grad_()), residual
    assert bias_dropout_add_fused_train(*given, 0.0, backend=backend).tolist() == [[111, 122], [113, 124]]
    y = bias_dropout_add_fused_train(*given, 0.5, key=key_for(device, TOKENS[0, :2]), backend=backend)
    kept = keep_mask(key_for(device, TOKENS[0, :2]), 0.5, 2)
    assert y.tolist() == (100 + torch.tensor([[22.0, 44.0], [26.0, 48.0]], device=device) * kept).tolist()
    (dbias,) = torch.autograd.grad(y.sum(), bias)
    assert dbias.tolist() == (2.0 * kept.sum(dim=0)).tolist()


@pytest.mark.parametrize("backend", PATHS)
def test_the_mask_is_one_function_of_key_token_and_feature(backend, device):
    key = key_for(device)
    want = keep_mask(key, 0.3, 1500).cpu()
    assert torch.equal(mask_of(0.3, key, backend), want)
    for first, last in ((0, 100), (1, 1100), (1026, 1500)):  # shards of features, also not in quads
        assert torch.equal(mask_of(0.3, key, backend, last - first, first), want[..., first:last])
    assert torch.equal(mask_of(0.3, key_for(device, TOKENS[1:, ::2]), backend), want[1:, ::2])  # shards of tokens


@in_interpreter
@pytest.mark.parametrize("block", [4, 16, 64])
def test_the_mask_does_not_depend_on_the_size_of_blocks(block, monkeypatch):
    from megalith.fusions.residual.kernels import bias_dropout as kernels

    monkeypatch.setattr(kernels, "_BLOCK_H", block)
    key = key_for("cpu", TOKENS[:1, :2])
    assert torch.equal(mask_of(0.3, key, "triton", 50, 3), keep_mask(key, 0.3, 50, 3))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_right_share_is_dropped(p):
    key = key_for("cpu", torch.arange(400))
    share = mask_of(p, key, "blocked", 2500).double().mean().item()
    assert share == pytest.approx(1 - p, abs=4 * (p * (1 - p) / 1e6) ** 0.5)


@pytest.mark.parametrize("backend", PATHS)
def test_without_a_key_the_generator_draws_one_and_recomputation_repeats_it(backend, device):
    torch.manual_seed(3)
    first, second = mask_of(0.5, None, backend, 64), mask_of(0.5, None, backend, 64)
    torch.manual_seed(3)
    assert torch.equal(mask_of(0.5, None, backend, 64), first)
    assert not torch.equal(first, second)
    x, bias, residual = inputs(2, 3, 64, device=device)

    def layer(x: Tensor) -> Tensor:
        return bias_dropout_add_fused_train((torch.tanh(x), bias), residual, 0.5, backend=backend).square()

    torch.manual_seed(4)
    (stored,) = torch.autograd.grad(layer(x).sum(), x)
    torch.manual_seed(4)
    (recomputed,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
    assert torch.equal(recomputed, stored)


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_0_the_sum_is_rounded_once_and_no_random_number_is_drawn(dtype, backend, device):
    x, bias, residual = inputs(2, 3, 100, dtype=dtype, device=device)
    state = torch.get_rng_state()
    got = bias_dropout_add_fused_train((x, bias), residual, 0.0, backend=backend)
    without = bias_dropout_add_fused_inference((x, None), residual, 0.1, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, where a GPU rounds")
    assert torch.equal(got, (x.float() + bias.float() + residual.float()).to(dtype))
    assert torch.equal(without, (x.float() + residual.float()).to(dtype))


@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_what_is_kept_is_the_key_and_the_token_ids(backend, device):
    x, bias, residual = inputs(2, 3, 64, device=device)

    def kept(p: float, key: DropoutKey | None) -> int:
        return saved_bytes(lambda: bias_dropout_add_fused_train((x, bias), residual, p, key=key, backend=backend))

    assert kept(0.5, key_for(device)) == 8 + 8 * TOKENS.numel()
    assert kept(0.5, None) == 8
    assert kept(0.0, None) == 0


@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_gradients_that_pass_are_the_tensor_that_was_given(backend, device):
    x, _, residual = inputs(2, 3, 64, device=device)
    dy = torch.randn(2, 3, 64, device=device)
    for p, passed in ((0.0, (x, residual)), (0.5, (residual,))):
        y = bias_dropout_add_fused_train((x, None), residual, p, key=key_for(device), backend=backend)
        assert {dx.data_ptr() for dx in torch.autograd.grad(y, passed, dy)} == {dy.data_ptr()}


@pytest.mark.parametrize("backend", PATHS)
def test_the_result_has_the_dtype_of_the_residual(backend, device):
    x, bias, residual = inputs(2, 3, 64, dtype=torch.bfloat16, device=device)
    stream = residual.detach().float().requires_grad_()
    y = bias_dropout_add_fused_train((x, bias), stream, 0.0, backend=backend)
    assert torch.equal(y, x.float() + bias.float() + stream)
    gradients = torch.autograd.grad(y.sum(), (x, bias, stream))
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]
    lower = bias_dropout_add_fused_train((x.float(), None), residual, 0.0, backend=backend)
    assert lower.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, for inf * 0 in the interpreter
@pytest.mark.parametrize("backend", PATHS)
def test_nan_and_inf_pass_through_dropped_elements_as_in_torch(backend, device):
    x = torch.tensor([float("nan"), float("inf"), 1.0, 2.0], device=device).repeat(1, 16)
    y = bias_dropout_add_fused_train(
        (x, None), torch.zeros_like(x), 0.5, key=key_for(device, TOKENS[0, :1]), backend=backend
    )
    kept = keep_mask(key_for("cpu", TOKENS[0, :1]), 0.5, 64)
    assert str(y.tolist()) == str((x.cpu() * kept * 2.0).tolist())


def test_the_names_of_the_field_are_one_operation():
    x, bias, residual = inputs(2, 3, 64)
    key = key_for("cpu")
    fused = get_bias_dropout_add(training=True, fused=True)((x, bias), residual, 0.3, key=key)
    unfused = get_bias_dropout_add(training=True, fused=False)((x, bias), residual, 0.3, key=key)
    torch.testing.assert_close(fused, unfused)
    assert torch.equal(unfused, bias_dropout_add_unfused(True)((x, bias), residual, 0.3, key=key))
    for fused in (True, False):
        y = get_bias_dropout_add(training=False, fused=fused)((x, bias), residual, 0.3)
        torch.testing.assert_close(y, x + bias + residual)
    x, residual = x.detach(), residual.detach()
    before = x.clone()
    with torch.no_grad():
        assert bias_dropout_add_fused_inference((x, None), residual, 0.3).data_ptr() not in (
            x.data_ptr(),
            residual.data_ptr(),
        )
    assert torch.equal(x, before)


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    far = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0)
    x = torch.ones(3, 4, dtype=torch.float16, requires_grad=True)
    y = bias_dropout_add_fused_train((x, None), far, 0.5, backend="triton")
    (dx,) = torch.autograd.grad(y, x, far)
    assert torch.equal(dx, (y == 4.0) * far * 2.0)
    assert bias_dropout_add_fused_train((far, None), x, 0.0, backend="triton").tolist() == [[3.0] * 4] * 3


ONES = torch.ones(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: bias_dropout_add_fused_train((ONES, None), ONES, 1.0),
            ConfigError,
            r"prob must be in \[0, 1\).*got 1.0",
        ),
        (lambda: bias_dropout_add_fused_train((ONES, None), ONES, -0.1), ConfigError, r"got -0.1"),
        (lambda: bias_dropout_add_fused_inference((ONES, None), ONES, float("nan")), ConfigError, r"got nan"),
        (lambda: bias_dropout_add_fused_train((ONES, None), ONES, 0.1, feature_offset=-4), ConfigError, r"got -4"),
        (
            lambda: bias_dropout_add_fused_train((ONES, None), ONES[:1], 0.1),
            ShapeError,
            r"residual must be \[2, 3, 8\]",
        ),
        (
            lambda: bias_dropout_add_fused_train((ONES, ONES), ONES, 0.1),
            ShapeError,
            r"bias must be \[8\].*got \[2, 3, 8\]",
        ),
        (lambda: bias_dropout_add_fused_train((ONES.int(), None), ONES, 0.1), ShapeError, r"x must be float16.*int32"),
        (lambda: bias_dropout_add_fused_train((ONES, None), ONES.to("meta"), 0.1), ShapeError, r"on one device"),
        (
            lambda: bias_dropout_add_fused_train((ONES[0, 0, 0], None), ONES[0, 0, 0], 0.1),
            ShapeError,
            r"x must be \[\.\.\., H\]",
        ),
        (
            lambda: bias_dropout_add_fused_train((ONES, None), ONES, 0.1, key=key_for("cpu", TOKENS[:1])),
            ShapeError,
            r"one token id for each row of x, \[2, 3\] on cpu; got \[1, 3\]",
        ),
        (lambda: bias_dropout_add_fused_train((ONES, None), ONES, 0.1, backend="aten"), BackendError, r"no such path"),
        (
            lambda: bias_dropout_add_fused_train((ONES.double(), None), ONES, 0.1, backend="triton"),
            BackendError,
            r"float64",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_plain_sum_is_contiguous_as_the_compiler_is_told():
    x, residual = (torch.randn(8, 2, 3).permute(1, 2, 0) for _ in range(2))

    def add(x: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_add_fused_train((x, None), residual, 0.0, backend="blocked")

    assert add(x, residual).is_contiguous()
    assert torch.equal(add(x, residual), x + residual)
    torch.library.opcheck(torch.ops.megalith.bias_dropout_add_blocked, (x, None, residual, None, None, 0, 0.0, 0))
