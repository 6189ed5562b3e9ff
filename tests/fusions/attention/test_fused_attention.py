"""fused_attention against torch's own and by hand, with documents, caches, windows and sinks; and every refusal."""

import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import fused_attention, sink_correction
from megalith.fusions.attention.paths import FUSION
from megalith.packed_seq_params import PackedSeqParams
from tests.accuracy import assert_accurate
from tests.fusions.attention.cases_of_attention import formula
from tests.kernel_reports import TARGETS, in_interpreter, without_interpreter
from tests.sampling import sampled

PATHS = ("triton", "aten", "reference")
KERNELS = ("triton", "aten")
INF = float("inf")
# relative L2 errors: of float32 where dout . v and delta nearly cancel; of probabilities, and of sums over queries in
# torch's kernels, which are rounded to 16 bits on the way
NEAR = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
LAST_DIGIT = torch.finfo(torch.float32).eps
on_paths = pytest.mark.parametrize("backend", PATHS)


def qkv(
    Sq: int, Sk: int | None = None, heads: tuple[int, int] = (2, 1), D: int = 16, dtype: torch.dtype = torch.float32,
    device: str = "cpu", B: int = 1,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(Sq)
    (A, G), Sk = heads, Sk or Sq
    shapes = ((Sq, B, A, D), (Sk, B, G, D), (Sk, B, G, D))
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def with_gradients(compute: Callable[..., Any], leaves: Sequence[Tensor], which: str = "both") -> list[Tensor]:
    """out, lse, and the gradients of ``leaves`` from those in ``which``."""
    out, lse = compute(*leaves)
    generator = torch.Generator().manual_seed(7)
    dout, dlse = (torch.randn(y.shape, generator=generator).to(y.device) for y in (out, lse))
    roots = {"out": [(out, dout)], "lse": [(lse, dlse)], "both": [(out, dout), (lse, dlse)]}[which]
    gradients = torch.autograd.grad([y for y, _ in roots], leaves, [g.to(y.dtype) for y, g in roots], allow_unused=True)
    return [
        out.detach(),
        lse.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)),
    ]


def assert_near(got: Sequence[Tensor], want: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Within ``NEAR`` of the norm; or, for a gradient, within two float32 ulps of the norm of all gradients together.

    For a query with one key, dout . v = delta, so the gradient of its score is only that of the log-sum-exp, a tenth of
    the two terms that cancel. In float32 their last digits remain, which are as large as those of all gradients.
    """
    all_norm = torch.stack([g.double().norm().cpu() for g in want[2:]]).norm()
    for index, (a, b) in enumerate((a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True)):
        assert a.shape == b.shape
        finite = b.isfinite()
        assert torch.equal(a[~finite].double(), b[~finite].double()), index
        error, size = (a[finite].double() - b[finite].double()).norm(), b[finite].double().norm()
        allowed = max(NEAR[dtype] * size, 2 * LAST_DIGIT * all_norm if index >= 2 else 1e-15)
        assert error <= allowed, f"{index}: error is {error / allowed:.2f} times what is allowed"


def in_double(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in leaves]


OPTIONS = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": (5, 0)},
    "window both ways": {"causal": False, "window": (40, 3)},
    "window ahead": {"causal": False, "window": (0, -1)},
    "scale": {"scale": 0.4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("Sq", "Sk"), [(129, 129), (17, 129)], ids=["whole", "after a cache"])
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.slow), "aten", "reference"])
def test_every_option_is_the_softmax_of_float64(backend, Sq, Sk, options, device):
    leaves = qkv(Sq, Sk, (4, 2), dtype=torch.bfloat16, device=device)
    got = with_gradients(functools.partial(fused_attention, backend=backend, **options), leaves)
    want = with_gradients(functools.partial(formula, **options), in_double(leaves))
    assert_near(got, want, torch.bfloat16)


@on_paths
def test_more_queries_than_keys_see_them_all_where_nothing_is_causal(backend, device):
    leaves = qkv(40, 17, device=device)
    got = with_gradients(lambda *x: fused_attention(*x, causal=False, backend=backend), leaves)
    assert_near(got, with_gradients(lambda *x: formula(*x, causal=False), in_double(leaves)), torch.float32)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_several_blocks_agree_with_float64(backend, dtype, device):
    # blocks end one key before, and begin one key after, what all of their queries see
    leaves = qkv(129, 191, dtype=dtype, device=device)
    got = with_gradients(lambda *x: fused_attention(*x, window=(124, 0), backend=backend), leaves)
    want = with_gradients(lambda *x: formula(*x, window=(124, 0)), in_double(leaves))
    assert_near(got, want, dtype)


@pytest.mark.parametrize("S", [1, 17, 64, 129])
@pytest.mark.parametrize("D", [16, 64, 72, 128])
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.slow), "aten"])
def test_head_sizes_and_lengths(backend, D, S, device):
    leaves = qkv(S, D=D, device=device)
    got = with_gradients(lambda *x: fused_attention(*x, backend=backend), leaves)
    assert_near(got, with_gradients(formula, in_double(leaves)), torch.float32)


@on_paths
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_documents_are_sequences_of_their_own(backend, window, device):
    lengths = [[1, 30, 2, 7], [39, 1]]
    leaves = qkv(40, heads=(2, 2), device=device, B=2)
    packed = PackedSeqParams.from_lengths(lengths).to(device)
    got = with_gradients(
        lambda *x: fused_attention(*x, packed_seq_params=packed, window=window, backend=backend), leaves
    )

    def apart(*x: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for b, row in enumerate(lengths):
            tokens = zip(*(part[:, b : b + 1].split(row) for part in x), strict=True)
            parts = [formula(*document, window=window or (-1, -1)) for document in tokens]
            rows.append((torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=2)))
        return torch.cat([out for out, _ in rows], dim=1), torch.cat([lse for _, lse in rows])

    assert_near(got, with_gradients(apart, in_double(leaves)), torch.float32)


CACHED = [*product(PATHS, [(1, 40), (1, 31), (20, 40), (31, 31)], [(True, None), (True, (4, 0)), (False, None)])]


@pytest.mark.parametrize(("backend", "sizes", "seen"), sampled(CACHED, lambda case: {case[:2], case[::2]}))
@torch.no_grad()
def test_queries_after_a_cache_see_the_keys_of_their_own_document(backend, sizes, seen, device):
    (Sq, Sk), (causal, window) = sizes, seen
    lengths = [[25, 15], [40], [3, 37]]  # whole rows, of which the first Sk tokens exist so far
    q, k, v = qkv(Sq, Sk, heads=(4, 2), device=device, B=3)
    packed = PackedSeqParams.from_lengths(lengths).to(device)
    got = fused_attention(q, k, v, causal=causal, packed_seq_params=packed, window=window, backend=backend)
    for b, row in enumerate(packed.rows()):
        for start, end in ((start, min(end, Sk)) for start, end in row if Sk - Sq < end and start < Sk):
            queries = slice(max(start - (Sk - Sq), 0), end - (Sk - Sq))
            parts = (x[:, b : b + 1].double().cpu() for x in (q[queries], k[start:end], v[start:end]))
            out, lse = formula(*parts, causal=causal, window=window or (-1, -1))
            torch.testing.assert_close(got[0][queries, b : b + 1].double().cpu(), out, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[1][b : b + 1, :, queries].double().cpu(), lse, rtol=1e-5, atol=1e-5)


@on_paths
def test_a_query_that_sees_no_key_gives_zero_and_takes_no_gradient(backend, device):
    leaves = [*qkv(5, 3, device=device), torch.tensor([0.5, -2.0], device=device, requires_grad=True)]
    out, lse, dq, dk, _, _ = with_gradients(
        lambda q, k, v, _: fused_attention(q, k, v, backend=backend), leaves
    )  # the first two of five queries precede all three keys
    assert (out[:2] == 0).all()
    assert (lse[:, :, :2] == -INF).all()
    assert (dq[:2] == 0).all()
    assert out.isfinite().all()
    assert dq.isfinite().all()
    assert dk.isfinite().all()
    out, lse, dq, _, _, dsink = with_gradients(lambda *x: fused_attention(*x[:3], sink=x[3], backend=backend), leaves)
    assert (out[:2] == 0).all()
    assert lse[0, :, :2].tolist() == [[0.5, 0.5], [-2.0, -2.0]]
    assert (dq[:2] == 0).all()
    assert dsink.isfinite().all()


@on_paths
@pytest.mark.parametrize("which", ["out", "lse"])
def test_each_result_alone_gives_its_gradients(backend, which, device):
    leaves = [*qkv(9, device=device), torch.tensor([0.5, -2.0], device=device, requires_grad=True)]
    got = with_gradients(lambda *x: fused_attention(*x[:3], sink=x[3], backend=backend), leaves, which)
    want = with_gradients(lambda *x: formula(*x[:3], sink=x[3]), in_double(leaves), which)
    assert_near(got, want, torch.float32)


@on_paths
def test_two_equal_keys_share_a_query_and_a_sink_takes_its_part(backend, device):
    q, k = torch.ones(1, 1, 1, 16, device=device), torch.full((2, 1, 1, 16), 0.25, device=device)
    v = torch.stack((torch.zeros(16), torch.full((16,), 6.0))).view(2, 1, 1, 16).to(device)
    out, lse = fused_attention(q, k, v, backend=backend)  # scores: 16 * 0.25 / sqrt(16) = 1
    torch.testing.assert_close(out, torch.full_like(q, 3.0))
    torch.testing.assert_close(lse.item(), 1.0 + 0.6931471805599453, rtol=1e-6, atol=0.0)
    out, lse = fused_attention(q, k, v, sink=torch.ones(1, device=device), backend=backend)
    torch.testing.assert_close(out, torch.full_like(q, 2.0))
    torch.testing.assert_close(lse.item(), 1.0 + 1.0986122886681098, rtol=1e-6, atol=0.0)


@on_paths
def test_a_window_of_no_keys_before_is_the_value_beside_and_minus_one_is_no_bound(backend, device):
    q, k, v = qkv(7, 9, device=device)
    out, _ = fused_attention(q, k, v, window=(0, 0), backend=backend)
    torch.testing.assert_close(out, v[2:].expand(-1, -1, 2, -1))
    for causal in (True, False):
        got = fused_attention(q, k, v, causal=causal, window=(-1, -1), backend=backend)
        assert all(map(torch.equal, got, fused_attention(q, k, v, causal=causal, backend=backend)))


@on_paths
def test_a_sink_at_minus_infinity_is_none_and_one_at_zero_is_off_by_one(backend, device):
    q, k, v = qkv(7, device=device)
    out, lse = fused_attention(q, k, v, backend=backend)
    same = fused_attention(q, k, v, sink=torch.full((2,), -INF, device=device), backend=backend)
    torch.testing.assert_close(same, (out, lse), rtol=0.0, atol=0.0)
    got = fused_attention(q, k, v, sink=torch.zeros(2, device=device), backend=backend)
    torch.testing.assert_close(got, sink_correction(out, lse, torch.zeros(2, device=device)))


@pytest.mark.parametrize("backend", ["triton", "reference"])  # torch's CPU kernel returns zero for such a query
def test_nan_stays_with_its_query(backend, device):
    q, k, v = (x.detach().clone() for x in qkv(4, device=device))
    q[2, 0, 1] = float("nan")
    out, lse = fused_attention(q, k, v, backend=backend)
    assert out.isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[2, 0, 1]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("backend", PATHS)
def test_no_tokens_and_no_keys(backend, device):
    q, k, v = (torch.randn(S, 2, 2, 8, device=device, requires_grad=True) for S in (3, 0, 0))
    out, lse, *gradients = with_gradients(lambda *x: fused_attention(*x, backend=backend), (q, k, v))
    assert (out == 0).all()
    assert (lse == -INF).all()
    assert [g.abs().sum().item() for g in gradients] == [0.0, 0.0, 0.0]
    out, lse = fused_attention(q[:0], k, v, backend=backend)
    assert (out.shape, lse.shape) == ((0, 2, 2, 8), (2, 2, 0))


@in_interpreter
def test_rows_may_lie_past_what_32_bits_address(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 16, dtype=torch.float16)
    far = memory.as_strided((3, 1, 1, 16), (2**30, 16, 16, 1), 2**31).copy_(torch.randn(3, 1, 1, 16)).requires_grad_()
    near = far.detach().clone().requires_grad_()
    got, want = (with_gradients(lambda *x: fused_attention(*x, backend="triton"), [x, x, x]) for x in (far, near))
    assert all(map(torch.equal, got, want))


@in_interpreter
def test_only_blocks_that_some_token_sees_are_read(monkeypatch):
    from megalith.fusions.attention.kernels import attention

    met = []
    monkeypatch.setattr(attention, "_meet", _counting(attention._meet, met))
    q, k, v = (x.detach() for x in qkv(512, heads=(1, 1), dtype=torch.bfloat16))
    counts = {}
    for name, options in {
        "causal": {},
        "window": {"window": (63, 0)},
        "documents": {"packed_seq_params": PackedSeqParams.from_lengths([[128] * 4])},
    }.items():
        met.clear()
        fused_attention(q, k, v, backend="triton", **options)
        counts[name] = len(met)
    # four blocks of 128 queries, eight of 64 keys
    assert counts == {"causal": 2 + 4 + 6 + 8, "window": 2 + 3 + 3 + 3, "documents": 2 * 4}


def _counting(function: Any, calls: list[None]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    return counted


def test_tiles_on_a_cpu_are_no_larger_than_what_tokens_see():
    from megalith.fusions.attention.flash_for_cpu import _tiles

    x = torch.empty(1, 1, 4096, 8)

    def areas(bounds: Tensor | None, left: int) -> list[int]:
        found = _tiles(x, x, bounds, left, 0)
        return [tile.of_queries(x).shape[2] * tile.of_keys(x).shape[2] for tile in found]

    windowed = areas(None, 128)
    assert len(windowed) == 16
    assert max(windowed) == 256 * (256 + 128)
    packed = PackedSeqParams.from_lengths([[1024, 96, 2976]])
    assert areas(packed.document_bounds, 2**30) == [1024**2, 96**2, 2976**2]  # causal, without a mask


REFUSED = {
    "q without heads": ({"q": (3, 2, 16)}, r"q must be \[Sq, B, A, D\]"),
    "three heads in two groups": ({"q": (3, 2, 3, 16)}, r"G divides the 3 heads of q; got \[3, 2, 2, 16\]"),
    "keys of another head size": ({"k": (3, 2, 2, 8)}, r"k must be \[3, 2, 2, 16\]"),
    "keys of another batch": ({"k": (3, 1, 2, 16)}, r"k must be \[3, 2, 2, 16\]"),
    "fewer values than keys": ({"v": (2, 2, 2, 16)}, r"v must be \[3, 2, 2, 'Dv'\], like k"),
    "one sink for two heads": ({"sink": (1,)}, r"sink must be \[4\], one for each head"),
}


@pytest.mark.parametrize(("shapes", "message"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_do_not_fit_are_refused(shapes, message):
    sizes = {"q": (3, 2, 4, 16), "k": (3, 2, 2, 16), "v": (3, 2, 2, 16), **shapes}
    with pytest.raises(ShapeError, match=message):
        fused_attention(**{name: torch.zeros(size) for name, size in sizes.items()})


def test_other_wrong_arguments_are_refused():
    q, k, v = (x.detach() for x in qkv(4))
    with pytest.raises(ShapeError, match=r"same dtype; got torch.float32, torch.bfloat16"):
        fused_attention(q, k.bfloat16(), v)
    with pytest.raises(ShapeError, match="k must be float16"):
        fused_attention(q, k.long(), v)
    with pytest.raises(ShapeError, match="q and k must match packed_seq_params, 1 rows of 3 tokens"):
        fused_attention(q, k, v, packed_seq_params=PackedSeqParams.from_lengths([[3]]))
    with pytest.raises(ShapeError, match="q and k must match packed_seq_params, 2 rows of 4 tokens"):
        fused_attention(q, k, v, packed_seq_params=PackedSeqParams.from_lengths([[4], [4]]))
    with pytest.raises(ShapeError, match="queries that follow a KV cache have no gradient in packed rows"):
        fused_attention(q[:2].requires_grad_(), k, v, packed_seq_params=PackedSeqParams.from_lengths([[4]]))
    with pytest.raises(ConfigError, match=r"-1 for no limit; got \(-2, 0\)"):
        fused_attention(q, k, v, window=(-2, 0))
    with pytest.raises(ConfigError, match=r"window must be \(left, 0\) or \(left, -1\) with causal=True"):
        fused_attention(q, k, v, window=(4, 4))
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="scale must be positive"):
            fused_attention(q, k, v, scale=scale)
        with pytest.raises(ConfigError, match="softcap must be positive"):
            fused_attention(q, k, v, softcap=scale)


def test_paths_that_cannot_are_refused_and_others_named():
    wide = torch.zeros(2, 1, 1, 257)
    with pytest.raises(BackendError, match="a head size of at most 256; got 257; use aten or"):
        fused_attention(wide, wide, wide, backend="triton")
    with pytest.raises(BackendError, match="at most 256; got 257"):
        fused_attention(wide[..., :16], wide[..., :16], wide, backend="triton")
    elsewhere = torch.zeros(2, 1, 1, 16, device="meta")
    with pytest.raises(BackendError, match="kernels on meta have no gradient for the log-sum-exp"):
        fused_attention(elsewhere, elsewhere, elsewhere, backend="aten")
    with pytest.raises(BackendError, match="no such path, only triton, aten, reference"):
        fused_attention(wide, wide, wide, backend="blocked")


def test_defaults_never_make_every_score():
    assert FUSION.default(torch.zeros(1)) == "aten"
    assert FUSION.default(torch.zeros(1, dtype=torch.float64)) == "reference"  # but in float64, as everywhere


# bytes of shared memory that a program may use
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


def most_shared_memory() -> dict[str, int]:
    from tests.kernel_reports import compile_for, launches

    most = dict.fromkeys(TARGETS, 0)
    for D in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            leaves = qkv(64, D=D, dtype=dtype)
            run = functools.partial(with_gradients, functools.partial(fused_attention, backend="triton"), leaves)
            for launch in launches(run):
                for target, options in TARGETS.items():
                    most[target] = max(most[target], compile_for(launch, options).shared)
    return most


@pytest.mark.slow
def test_every_size_of_head_fits_the_shared_memory_of_every_target():
    most = without_interpreter(most_shared_memory)
    assert {target: size for target, size in most.items() if size > SHARED[target]} == {}


@on_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_log_sum_exp_is_accurate_in_float32_whatever_the_dtype(dtype, backend, device):
    q, k, v = (x.detach() for x in qkv(33, dtype=dtype, device=device))
    _, want = formula(q.double(), k.double(), v.double())
    _, lse = fused_attention(q, k, v, backend=backend)
    assert_accurate(lse, want, 33 * 16)
