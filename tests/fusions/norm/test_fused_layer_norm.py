"""LayerNorm and RMSNorm: values from torch and by hand, wide rows, strided heads, modules, refusals."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import use
from megalith.fusions.fused_layer_norm import FusedLayerNorm, FusedRMSNorm, fused_layer_norm, fused_rms_norm
from megalith.fusions.norm.formulas import WIDEST_WHOLE_ROW, nested_rows, rows_per_program
from tests.accuracy import assert_same
from tests.fusions.norm.cases_of_norms import CASES
from tests.fusions.observe import operator_calls
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "blocked", "reference")
TINY = 1e-30  # the interpreter warns of the reciprocal of 0 in masked lanes
CASE = {case.name: case for case in CASES}


@pytest.mark.parametrize("path", PATHS)
def test_values_worked_out_by_hand(path, device):
    x, w = torch.tensor([[1.0, 3.0]], device=device), torch.tensor([2.0, 0.5], device=device)
    b = torch.tensor([10.0, 20.0], device=device)
    assert fused_layer_norm(x, w, b, TINY, backend=path).tolist() == [[8.0, 20.5]]
    assert fused_layer_norm(x, w, b, TINY, True, backend=path).tolist() == [[7.0, 21.5]]
    y = fused_rms_norm(torch.tensor([[1.0, 7.0]], device=device), w, TINY, backend=path)
    assert y[0].tolist() == pytest.approx([0.4, 0.7])


def test_both_are_torchs_in_float64():
    x, w, b = (torch.randn(n, dtype=torch.float64) for n in ((3, 5, 9), 9, 9))
    assert torch.allclose(fused_layer_norm(x, w, b, 1e-3), nn.functional.layer_norm(x, (9,), w, b, 1e-3), rtol=1e-13)
    assert torch.allclose(fused_rms_norm(x, w, 1e-3), nn.functional.rms_norm(x, (9,), w, 1e-3), rtol=1e-13)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norm", [fused_layer_norm, fused_rms_norm])
def test_rows_need_no_parameters(norm, path, device):
    x = torch.randn(4, 33, device=device, requires_grad=True)
    y = norm(x, backend=path)
    want = norm(x, torch.ones(33, device=device), backend=path)
    assert torch.equal(y, want)
    assert_same(*(torch.autograd.grad(z.sin().sum(), x)[0] for z in (y, want)))


@pytest.mark.parametrize("path", PATHS)
def test_a_zero_centred_gain_is_formed_in_float32(path, device):
    x = torch.ones(1, 8, device=device)
    weight = torch.full((8,), 2.0**-9, dtype=torch.bfloat16, device=device)  # 1 + weight is 1 in bfloat16
    assert fused_rms_norm(x, weight, TINY, zero_centered=True, backend=path).tolist() == [[1 + 2.0**-9] * 8]


@pytest.mark.parametrize("path", PATHS)
def test_a_row_of_one_is_its_own_mean_and_of_size_one(path, device):
    x = torch.tensor([[3.0], [-7.0]], device=device, requires_grad=True)
    layer, rms = fused_layer_norm(x, eps=1e-6, backend=path), fused_rms_norm(x, eps=1e-6, backend=path)
    torch.testing.assert_close(layer, torch.zeros_like(x), rtol=0.0, atol=1e-3)  # torch's operator: x rstd - mean rstd
    torch.testing.assert_close(rms, x.sign())
    for y in (layer, rms):
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.zeros_like(x), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("width", [500, pytest.param(20000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS)
def test_a_large_mean_does_not_cancel_the_variance(path, width, device):
    x = 4096 + torch.randn(2, width, device=device)  # in float32, E[x^2] has no digits left for a variance of 1
    exact = nn.functional.layer_norm(x.double(), (width,), eps=0.0)
    assert (fused_layer_norm(x, eps=TINY, backend=path) - exact).abs().max() < 2e-3  # the mean is known to 4096 * 2^-24


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_float32_parameters_get_gradients_that_no_rounding_of_rows_has_touched(kind, path, device):
    torch.manual_seed(0)
    x, dy = (torch.randn(300, 256, device=device).bfloat16() for _ in range(2))

    def gradients(x: Tensor, backend: str | None) -> list[Tensor]:
        w, b = (torch.ones(256, device=device, dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
        leaves = [w.requires_grad_(), b.requires_grad_()][: 2 if kind == "LayerNorm" else 1]
        if backend is None:
            norm = nn.functional.layer_norm if kind == "LayerNorm" else nn.functional.rms_norm
            y = norm(x, (256,), *leaves, eps=1e-5)
        else:
            y = (fused_layer_norm if kind == "LayerNorm" else fused_rms_norm)(x, *leaves, backend=backend)
        return list(torch.autograd.grad(y, leaves, dy.to(y.dtype)))

    exact, torchs = gradients(x.double(), None), gradients(x.float(), None)
    for got, peer, want in zip(gradients(x, path), torchs, exact, strict=True):
        error = (got - want).norm() / want.norm()
        assert error < 1e-5
        assert error < 2 * (peer - want).norm() / want.norm() + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["layer norm", "rms norm, zero-centred"])
@pytest.mark.parametrize("width", [9001, WIDEST_WHOLE_ROW + 5])
def test_rows_wider_than_registers_are_read_in_tiles(width, name, dtype, device):
    CASE[name].assert_accurate(CASE[name].make(2, width, dtype, device), "triton")


@pytest.mark.parametrize("width", [1536, pytest.param(9001, marks=pytest.mark.slow)])
def test_a_program_adds_up_many_rows(width, monkeypatch, device):
    monkeypatch.setattr("megalith.fusions.norm.kernels.add_norm.rows_per_program", lambda _, at_once, *__: 3 * at_once)
    for name in ("layer norm", "rms norm"):
        CASE[name].assert_accurate(CASE[name].make(7, width, torch.float32, device), "triton")


def test_rows_are_shared_out_among_at_least_so_many_programs():
    assert [rows_per_program(num_rows, 1, 1, 512) for num_rows in (1, 1023, 8192)] == [1, 1, 16]
    assert rows_per_program(2**18, 16, 1, 512) == 512
    assert rows_per_program(8192, 1, 8, 512) == 128
    assert rows_per_program(8192, 1, 1, 264) == 31


S, B, G, D = 3, 2, 4, 8
HEADS = {
    "two heads of each group": (lambda x: x.view(S, B, G, 3, D)[:, :, :, :2], True),
    "two heads of two groups": (lambda x: x.view(S, B, G, 3, D)[:, :, :2, :2], False),
    "queries of a packed projection": (lambda x: x[..., : G * D].view(S, B, G, D), True),
    "one head of each group": (lambda x: x.view(S, B, G, 3 * D)[..., D : 2 * D], True),
    "one sequence": (lambda x: x[:, :1], True),
    "every second position": (lambda x: x[::2], True),
    "transposed": (lambda x: x.transpose(0, 1), True),
    "expanded": (lambda x: x[:1].expand(4, -1, -1), True),
    "one row": (lambda x: x[0, 0], True),
    "no rows": (lambda x: x[:0], True),
}


@pytest.mark.parametrize("view", HEADS.values(), ids=HEADS)
def test_rows_are_found_without_a_copy_where_two_strides_reach_them(view, device):
    make, is_view = view
    x = make(torch.randn(S, B, 3 * G * D, device=device))
    rows = nested_rows(x)
    assert torch.equal(rows.reshape(x.shape), x)
    assert x.numel() == 0 or (rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == is_view
    for norm in (fused_layer_norm, fused_rms_norm):
        leaf = x.detach().requires_grad_()
        want = norm(leaf, backend="reference")
        got = norm(leaf, backend="triton")
        dy = torch.randn_like(want)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y, leaf, dy)[0] for y in (got, want)), atol=1e-6, rtol=1e-5)


def test_the_kernels_get_heads_as_they_lie(device):
    qkv = torch.randn(S, B, 3 * G * D, device=device)
    q = qkv[..., : G * D].view(S, B, G, D)
    ((_, (given, *_)),) = operator_calls(lambda: fused_rms_norm(q, torch.ones(D, device=device), backend="triton"))
    assert given.data_ptr() == qkv.data_ptr()
    assert given.shape == (S * B, G, D)


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    x = memory.as_strided((3, 4), (2**30, 1), 2**31).copy_(torch.tensor([2.0, -2.0, 2.0, -2.0])).requires_grad_()
    w = torch.ones(4, requires_grad=True)
    for y in (fused_layer_norm(x, w, backend="triton"), fused_rms_norm(x, w, backend="triton")):
        _, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert y.tolist() == [[1.0, -1.0, 1.0, -1.0]] * 3
        assert dw.tolist() == pytest.approx([3.0, -3.0, 3.0, -3.0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, in the interpreter
@pytest.mark.parametrize("path", PATHS)
def test_nan_and_inf_stay_in_their_row_and_do_there_what_they_do_in_torch(path, device):
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [-1.0, 1.0]], device=device)
    assert str(fused_rms_norm(x, eps=TINY, backend=path).tolist()) == "[[nan, nan], [nan, 0.0], [-1.0, 1.0]]"
    assert str(fused_layer_norm(x, eps=TINY, backend=path).tolist()) == "[[nan, nan], [nan, nan], [-1.0, 1.0]]"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_the_others_keep_theirs(frozen, path, device):
    given = {"x": torch.randn(3, 40, device=device), "weight": torch.randn(40, device=device)}
    given["bias"] = torch.randn(40, device=device)

    def gradients() -> dict[str, Tensor]:
        leaves = [x for x in given.values() if x.requires_grad]
        found = torch.autograd.grad(fused_layer_norm(**given, backend=path).square().sum(), leaves)
        return dict(zip((name for name, x in given.items() if x.requires_grad), found, strict=True))

    for x in given.values():
        x.requires_grad_()
    whole = gradients()
    given[frozen].requires_grad_(False)
    for name, gradient in gradients().items():
        assert torch.equal(gradient, whole[name])


def test_the_modules_are_their_functions(device):
    x = torch.randn(5, 12, device=device)
    for zero_centered in (False, True):
        layer = FusedLayerNorm(None, 12, 1e-3, zero_centered_gamma=zero_centered, device=device)
        rms = FusedRMSNorm(None, 12, 1e-3, zero_centered_gamma=zero_centered, device=device)
        assert set(layer.state_dict()) == {"weight", "bias"}
        assert set(rms.state_dict()) == {"weight"}
        assert layer.weight.tolist() == rms.weight.tolist() == [0.0 if zero_centered else 1.0] * 12
        assert layer.bias.tolist() == [0.0] * 12
        with use("reference"):
            torch.testing.assert_close(layer(x), nn.functional.layer_norm(x, (12,), eps=1e-3))
            torch.testing.assert_close(rms(x), nn.functional.rms_norm(x, (12,), eps=1e-3))
        with torch.no_grad():
            for parameter in (*layer.parameters(), *rms.parameters()):
                parameter.fill_(3.0)
        assert torch.equal(layer(x), fused_layer_norm(x, layer.weight, layer.bias, 1e-3, zero_centered))
        assert torch.equal(rms(x), fused_rms_norm(x, rms.weight, 1e-3, zero_centered))
        layer.reset_parameters()
        assert layer.weight.tolist() == [0.0 if zero_centered else 1.0] * 12


def test_parameters_are_made_where_and_of_what_is_asked():
    norm = FusedLayerNorm(None, 12, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in norm.parameters()} == {("meta", torch.bfloat16)}
    assert repr(FusedRMSNorm(None, 12)) == "FusedRMSNorm(12, eps=1e-05, zero_centered_gamma=False)"


def test_a_config_decides_where_it_speaks():
    config = SimpleNamespace(layernorm_zero_centered_gamma=True, persist_layer_norm=False, sequence_parallel=True)
    norm = FusedLayerNorm(config, 2 * WIDEST_WHOLE_ROW, device="meta")
    assert norm.zero_centered_gamma
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert not FusedLayerNorm(None, 4).weight.sequence_parallel
    assert FusedLayerNorm(None, 20480, device="meta").weight.shape == (20480,)  # Megatron's also uses tiles then


REFUSED_MODULES = {
    "FusedRMSNorm": (FusedLayerNorm, {"normalization": "RMSNorm"}, {}),
    "FusedLayerNorm": (FusedRMSNorm, {"normalization": "LayerNorm"}, {}),
    r"must be 'LayerNorm' here; got 'RMSNorm'": (FusedLayerNorm, {}, {"normalization": "RMSNorm"}),
    r"16384 columns; got hidden_size=16385; use persist_layer_norm=False": (
        FusedLayerNorm,
        {"hidden_size": 16385, "persist_layer_norm": True},
        {},
    ),
    r"zero_centered_gamma=True contradicts config.layernorm_zero_centered_gamma=False": (
        FusedRMSNorm,
        {"zero_centered_gamma": True},
        {"layernorm_zero_centered_gamma": False},
    ),
    r"memory_efficient_layer_norm.*recompute": (FusedLayerNorm, {}, {"memory_efficient_layer_norm": True}),
    r"hidden_size must be": (FusedLayerNorm, {"hidden_size": 0}, {}),
}


@pytest.mark.parametrize("message", REFUSED_MODULES)
def test_a_module_that_would_not_do_what_was_asked_is_refused(message):
    module, arguments, config = REFUSED_MODULES[message]
    with pytest.raises(ConfigError, match=message):
        module(SimpleNamespace(**config), **{"hidden_size": 8, "device": "meta"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4)), ShapeError, r"weight must be \[3\], one for each feature of x; got \[4\]"),
        ((torch.ones(2, 3), None, torch.ones(2)), ShapeError, r"bias must be \[3\]"),
        ((torch.ones(()),), ShapeError, "without dimensions"),
        ((torch.ones(2, 3).long(),), ShapeError, "x must be float16"),
        ((torch.ones(2, 3), torch.ones(3, device="meta")), ShapeError, "on one device"),
        ((torch.ones(2, 3), torch.ones(3), None, -1e-5), ConfigError, "eps must be 0 or more; got -1e-05"),
        ((torch.ones(2, 3), None, None, 1e-5, True), ConfigError, "weight is None"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        fused_layer_norm(*arguments)


def test_torchs_layer_norm_takes_no_16_bits_for_it_rounds_statistics():
    with pytest.raises(BackendError, match=r"keeps 16-bit statistics for 16-bit inputs, .* use .*blocked"):
        fused_layer_norm(torch.ones(2, 3, dtype=torch.bfloat16), backend="aten")
