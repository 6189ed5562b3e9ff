"""fused_softmax: masks, windows and sinks by hand, wide rows, Megatron's names, and refusals."""

from enum import Enum
from itertools import product

import pytest
import torch
from torch import Tensor

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
    masked_softmax,
)
from tests.accuracy import assert_same
from tests.fusions.softmax.cases_of_softmax import CASES, formula
from tests.kernel_reports import TARGETS, compile_for, in_interpreter, launches, without_interpreter
from tests.sampling import sampled

INF = float("inf")
PATHS = ["triton", "blocked", "reference"]


def scores(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize("backend", PATHS)
def test_values_worked_out_by_hand(backend, device):
    x = torch.tensor([1.0, 3.0, 9.0], device=device).log().expand(1, 2, 3)
    thirteenths = [1 / 13, 3 / 13, 9 / 13]
    assert masked_softmax(x, backend=backend)[0, 0].tolist() == pytest.approx(thirteenths)
    # two queries and three keys: the queries are at the positions of the second and third key
    causal = masked_softmax(x, causal=True, backend=backend)[0]
    assert causal[0].tolist() == pytest.approx([1 / 4, 3 / 4, 0])
    assert causal[1].tolist() == pytest.approx(thirteenths)
    window = masked_softmax(x, causal=True, window=(1, -1), backend=backend)[0]
    assert window[1].tolist() == pytest.approx([0, 1 / 4, 3 / 4])
    one = torch.zeros(1, device=device)
    assert masked_softmax(x, sink=one, backend=backend)[0, 0].tolist() == pytest.approx([1 / 14, 3 / 14, 9 / 14])
    squared = masked_softmax(x, scale=2.0, backend=backend)[0, 0]
    assert squared.tolist() == pytest.approx([1 / 91, 9 / 91, 81 / 91])


@pytest.mark.parametrize("backend", PATHS)
def test_a_query_that_sees_nothing_has_zeros_and_no_gradient(backend, device):
    x = scores(2, 3, 4, 5, device=device)
    mask = torch.zeros(2, 1, 4, 5, dtype=torch.bool, device=device)
    mask[1, :, 2] = True
    sink = torch.zeros(3, device=device)
    for given in (None, sink):
        p = masked_softmax(x, mask, sink=given, backend=backend)
        (dx,) = torch.autograd.grad(p, x, torch.randn_like(p))
        assert not p[1, :, 2].any()
        assert not dx[1, :, 2].any()
        assert p[1, :, 1].all()
        assert dx.isfinite().all()
    below = x.detach().clone()
    below[0, 0, 0] = -INF  # masked beforehand by an additive mask
    assert masked_softmax(below, backend=backend)[0, 0, 0].tolist() == [0.0] * 5


@pytest.mark.parametrize("backend", PATHS)
def test_more_queries_than_keys_leave_the_first_queries_without_any(backend, device):
    p = masked_softmax(scores(1, 5, 3, device=device), causal=True, backend=backend)[0]
    assert (p > 0).sum(dim=-1).tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("causal", "window", "seen"),
    [
        (True, None, [1, 2, 3, 4, 5, 6]),
        (True, (-1, 0), [1, 2, 3, 4, 5, 6]),
        (True, (2, 0), [1, 2, 3, 3, 3, 3]),
        (True, (2, 3), [1, 2, 3, 3, 3, 3]),
        (False, (0, 0), [1] * 6),
        (False, (1, 1), [2, 3, 3, 3, 3, 2]),
        (False, (-1, 1), [2, 3, 4, 5, 6, 6]),
        (False, (1, -1), [6, 6, 5, 4, 3, 2]),
        (False, (-1, -1), [6] * 6),
        (True, (10**12, 10**12), [1, 2, 3, 4, 5, 6]),
    ],
)
@pytest.mark.parametrize("backend", PATHS)
def test_a_window_of_l_and_r_shows_l_plus_1_plus_r_keys(causal, window, seen, backend, device):
    p = masked_softmax(scores(1, 6, 6, device=device), causal=causal, window=window, backend=backend)[0]
    assert (p > 0).sum(dim=-1).tolist() == seen


@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5), (2, 1, 4, 1), (4, 5), (5,), ()], ids=str)
def test_masks_broadcast_and_join_the_window(shape, backend, device):
    x = scores(2, 3, 4, 5, device=device)
    mask = torch.rand(shape, device=device) < 0.5
    whole = mask.expand(2, 3, 4, 5).clone() | torch.ones(4, 5, dtype=torch.bool, device=device).triu(2)
    for form in (mask, mask.expand(2, 3, 4, 5), mask.t().contiguous().t() if mask.dim() == 2 else mask):
        p = masked_softmax(x, form, causal=True, backend=backend)
        assert_same(p, masked_softmax(x, whole, backend=backend))
        assert not p[whole].any()


@pytest.mark.parametrize("backend", PATHS)
def test_what_is_hidden_is_not_read(backend, device):
    x, want = scores(1, 4, 40, device=device).detach(), scores(1, 4, 40, device=device).detach()
    hidden = torch.ones(4, 40, dtype=torch.bool, device=device).triu(37)
    x[:, hidden] = float("nan")
    for given in ({"causal": True}, {"mask": hidden}):
        assert torch.equal(masked_softmax(x, backend=backend, **given), masked_softmax(want, backend=backend, **given))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, for inf - inf in the interpreter
@pytest.mark.parametrize("backend", PATHS)
def test_nan_and_inf_make_a_row_nan_as_in_torch(backend, device):
    x = torch.tensor([[[1.0, float("nan"), 2.0], [1.0, INF, 2.0], [1.0, -INF, 1.0]]], device=device)
    assert str(masked_softmax(x, backend=backend).tolist()) == str([[[float("nan")] * 3] * 2 + [[0.5, 0.0, 0.5]]])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, for a difference that is rightly -inf
@pytest.mark.parametrize("backend", PATHS)
def test_large_scores_do_not_overflow(backend, device):
    x = torch.tensor([[[3e38, 3e38, -3e38]]], device=device)
    assert masked_softmax(x, backend=backend).tolist() == [[[0.5, 0.5, 0.0]]]
    half = torch.tensor([[[6e4, 6e4, -6e4]]], dtype=torch.float16, device=device)
    assert masked_softmax(half, scale=100.0, backend=backend).tolist() == [[[0.5, 0.5, 0.0]]]


@pytest.mark.parametrize(("case", "dtype"), sampled([*product(CASES, (torch.float32, torch.bfloat16))]))
def test_rows_wider_than_a_block_are_summed_step_by_step(case, dtype, device, monkeypatch):
    from megalith.fusions.softmax.kernels import softmax as kernels

    monkeypatch.setattr(kernels, "tile", lambda num_keys: (2, 64))
    case.assert_accurate(case.make(1, 200, dtype, device), "triton")


@pytest.mark.slow
@pytest.mark.parametrize("backend", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_16385_keys(case, dtype, backend, device):
    case.assert_accurate(case.make(1, 16385, dtype, device), backend)


def test_a_sink_learns_and_0_is_the_off_by_one_softmax():
    x = scores(2, 3, 4, 5)
    offset = torch.nn.Parameter(torch.zeros(3))
    p = SoftmaxOne(-1, offset)(x)
    want = x.exp() / (1 + x.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(p, want)
    torch.testing.assert_close(SoftmaxOne()(x), want)  # dim=None, as in Megatron
    assert torch.equal(SoftmaxOne(-1)(x), SoftmaxOne()(x))
    p[..., 0].sum().backward()
    assert offset.grad.abs().min() > 0
    assert [*SoftmaxOne(-1, offset).state_dict()] == ["denominator_offset"]
    assert [*SoftmaxOne(-1, torch.zeros(3)).state_dict()] == []


def test_the_names_of_the_field_are_one_operation():
    x = scores(2, 3, 4, 4)
    mask = torch.rand(2, 1, 4, 4) < 0.3
    assert torch.equal(ScaledSoftmax.apply(x, 0.5), masked_softmax(x, scale=0.5))
    assert torch.equal(ScaledMaskedSoftmax.apply(x, mask, 0.5), masked_softmax(x, mask, scale=0.5))
    upper = ScaledUpperTriangMaskedSoftmax.apply(x[0], 0.5)
    torch.testing.assert_close(
        upper, torch.softmax((x[0] * 0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF), -1)
    )
    names = ["padding", "causal", "no_mask", "padding_causal", "arbitrary"]
    assert [(kind.name, kind.value) for kind in AttnMaskType] == list(zip(names, range(1, 6), strict=True))


def module(kind: AttnMaskType = AttnMaskType.padding, fused: bool = True, **settings: object) -> FusedScaleMaskSoftmax:
    given = {"input_in_fp16": False, "input_in_bf16": False, "mask_func": None, "softmax_in_fp32": True, "scale": None}
    return FusedScaleMaskSoftmax(attn_mask_type=kind, scaled_masked_softmax_fusion=fused, **given | settings)


@pytest.mark.parametrize("window", [None, (2, 0), (-1, 0)])
@pytest.mark.parametrize("kind", [kind for kind in AttnMaskType if kind is not AttnMaskType.no_mask])
def test_the_module_computes_the_same_on_both_of_its_paths(kind, window):
    x, mask, offset = scores(2, 3, 4, 6, dtype=torch.bfloat16), torch.rand(2, 1, 4, 6) < 0.3, torch.randn(3)
    settings = {"scale": 0.7, "window_size": window, "input_in_bf16": True}
    causal = kind in (AttnMaskType.causal, AttnMaskType.padding_causal)
    for given in (mask, None):
        fused = module(kind, True, **settings)(x, given, offset)
        assert torch.equal(fused, module(kind, False, **settings)(x, given, offset))
        want = formula(x.double(), given, offset.double(), causal=causal, window=window or (-1, -1), scale=0.7)
        torch.testing.assert_close(fused, want.bfloat16(), rtol=2**-8, atol=0)


# as Megatron declares it
MegatronMaskType = Enum("AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", AttnMaskType, ids=str)
def test_a_mask_type_is_known_by_its_name_whichever_enum_it_is_of(kind, fused):
    x = scores(2, 3, 4, 6)
    want = module(kind, fused)(x, None)
    for given in (MegatronMaskType[kind.name], kind.name):
        assert torch.equal(module(given, fused)(x, None), want)
        assert module(given, fused).attn_mask_type is kind


def test_the_torch_path_masks_by_the_function_that_it_was_given():
    seen = []

    def mask_func(x: Tensor, mask: Tensor) -> Tensor:
        seen.append((x.dtype, mask))
        return x.masked_fill_(mask, -10000.0)

    x = scores(1, 1, 3, 3, dtype=torch.float16).detach()
    before, mask = x.clone(), torch.tensor([True, False, False]).expand(1, 1, 3, 3)
    p = module(AttnMaskType.causal, False, mask_func=mask_func)(x, mask)
    assert p[0, 0, 0].tolist() == pytest.approx([1 / 3] * 3, abs=1e-3)  # nothing is visible: a finite fill is uniform
    assert p.dtype == torch.float16
    assert torch.equal(x, before)
    assert seen[0][0] == torch.float32
    assert seen[0][1][0, 0].tolist() == [[True, True, True], [True, False, True], [True, False, False]]
    plain = x.float()
    module(AttnMaskType.padding, False, mask_func=mask_func, softmax_in_fp32=False)(plain, mask)
    assert torch.equal(plain, before.float())
    assert not module(AttnMaskType.causal, True, mask_func=mask_func)(x, mask)[0, 0, 0].any()


def test_the_kernel_is_available_for_every_length_and_every_mask_that_fits():
    fused = module()
    assert fused.is_kernel_available(None, 1, 1, 1, 1)
    assert fused.is_kernel_available(torch.ones(2, 1, 7, 100_001, dtype=torch.bool), 2, 3, 7, 100_001)
    assert fused.is_kernel_available(torch.ones(7, 5, dtype=torch.bool), 2, 3, 7, 5)
    assert not fused.is_kernel_available(torch.ones(2, 2, 7, 5, dtype=torch.bool), 2, 3, 7, 5)
    assert not fused.is_kernel_available(torch.ones(2, 1, 7, 5), 2, 3, 7, 5)
    assert not module(AttnMaskType.no_mask).is_kernel_available(torch.ones(7, 5, dtype=torch.bool), 2, 3, 7, 5)
    assert not module(fused=False).is_kernel_available(None, 2, 3, 7, 5)
    rows = [FusedScaleMaskSoftmax.get_batch_per_block(64, sk, 2, 3) for sk in (16, 1000, 2048, 2049, 100_000)]
    assert rows == [128, 2, 1, 1, 1]
    assert FusedScaleMaskSoftmax.get_batch_per_block(1, 16, 2, 3) == 6


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: masked_softmax(torch.ones(4, 4)), ShapeError, r"\[B, A, Sq, Sk\] or \[A, Sq, Sk\]; got \[4, 4\]"),
        (lambda: masked_softmax(torch.ones(1, 4, 4).int()), ShapeError, r"scores must be float16.*got torch.int32"),
        (lambda: masked_softmax(torch.ones(1, 4, 4), torch.zeros(4, 4)), ShapeError, r"mask must be bool.*mask < 0"),
        (
            lambda: masked_softmax(torch.ones(1, 4, 4), torch.ones(2, 4, 4) > 0),
            ShapeError,
            r"broadcast to scores \[1, 4, 4\]; got \[2, 4, 4\]",
        ),
        (lambda: masked_softmax(torch.ones(1, 4, 4), torch.ones(1, 1, 4, 4) > 0), ShapeError, r"got \[1, 1, 4, 4\]"),
        (lambda: masked_softmax(torch.ones(3, 4, 4), sink=torch.ones(4)), ShapeError, r"sink must be \[3\].*got \[4\]"),
        (
            lambda: masked_softmax(torch.ones(3, 4, 4), window=(-2, 0)),
            ConfigError,
            r"-1 for no limit; got \(-2, 0\)",
        ),
        (lambda: masked_softmax(torch.ones(3, 4, 4), window=3), ConfigError, r"-1 for no limit; got 3"),
        (lambda: masked_softmax(torch.ones(3, 4, 4), torch.ones(4, device="meta") > 0), ShapeError, r"on one device"),
        (lambda: masked_softmax(torch.ones(3, 4, 4), backend="aten"), BackendError, r"it has no such path"),
        (lambda: SoftmaxOne(1), ConfigError, r"dim must be -1 or 3.*got 1"),
        (lambda: module(input_in_fp16=True, input_in_bf16=True), ConfigError, r"set one, or neither"),
        (lambda: module(scale=2.0, softmax_in_fp32=False), ConfigError, r"scale=2.0 requires softmax_in_fp32=True"),
        (lambda: module(None), ConfigError, r"attn_mask_type must be one of padding, causal, .*; got None"),
        (lambda: module("Causal"), ConfigError, r"AttnMaskType.causal or as 'causal'; got 'Causal'"),
        (lambda: module(2), ConfigError, r"attn_mask_type must be one of .*; got 2"),
        (lambda: module(Enum("Kind", ["bottom_right"]).bottom_right), ConfigError, r"got <Kind.bottom_right: 1>"),
        (lambda: module(window_size=(1, 2, 3)), ConfigError, r"got \(1, 2, 3\)"),
        (lambda: module(input_in_fp16=True)(torch.ones(1, 1, 2, 2), None), ShapeError, r"float16.*got torch.float32"),
        (lambda: module()(torch.ones(1, 2, 2), None), ShapeError, r"\[B, A, Sq, Sk\]; got \[1, 2, 2\]"),
        (lambda: module()(torch.ones(1, 1, 2, 2), torch.ones(2, 2)), ShapeError, r"mask must be bool"),
        (
            lambda: module(AttnMaskType.no_mask)(torch.ones(1, 1, 2, 2), torch.ones(2, 2) > 0),
            ConfigError,
            r"no_mask; pass None, or use AttnMaskType.arbitrary",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_keys_give_no_probabilities():
    assert masked_softmax(torch.ones(2, 3, 4, 0)).shape == (2, 3, 4, 0)


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    x = memory.as_strided((1, 3, 4), (0, 2**30, 1), 2**31).copy_(torch.tensor([1.0, 1.0, 3.0, 3.0]).log())
    assert masked_softmax(x, backend="triton")[0, 2].tolist() == pytest.approx([1 / 8, 1 / 8, 3 / 8, 3 / 8], abs=1e-3)
    contiguous = scores(1, 3, 4, dtype=torch.float16)
    (dx,) = torch.autograd.grad(masked_softmax(contiguous, backend="triton"), contiguous, x)
    assert dx[0, 2].any()


def spills_of_wide_kernels() -> dict[tuple[str, str], int]:
    """What the kernels for rows wider than a block spill, by kernel and target."""
    found = {}
    for case in (CASES[0], CASES[4]):
        inputs = case.make(1, 16385, torch.bfloat16, "cpu")
        for launch in launches(lambda: case.run(inputs, "triton", case.upstream(inputs, "triton"))):  # noqa: B023
            for name, target in TARGETS.items():
                found[launch.kernel.__name__, name] = compile_for(launch, target).spilled
    return found


@pytest.mark.slow
def test_kernels_for_wide_rows_compile_ahead_of_time_without_spilling():
    found = without_interpreter(spills_of_wide_kernels)
    assert {name for name, _ in found} == {"_wide_forward_kernel", "_wide_backward_kernel"}
    assert {target for _, target in found} == TARGETS.keys()
    assert not any(found.values()), found
