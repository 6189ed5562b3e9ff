"""fused_rope: values by hand, layouts, strides of a packed QKV, a norm of q or k only, far addresses, refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import fused_rope
from tests.accuracy import assert_same
from tests.fusions.rope.paths import on_device, on_paths
from tests.kernel_reports import in_interpreter

LAYOUTS = ["neox", "interleaved", "deepseek"]
S, B, A, G, D = 5, 2, 3, 2, 8


def tables(rows: int = S, half: int = D // 2) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows * half).view(rows, half) / 7.0
    return angles.cos(), angles.sin()


def heads(num_heads: int, *, dtype: torch.dtype = torch.float32, size: int = D, tokens: int = S) -> Tensor:
    generator = torch.Generator().manual_seed(num_heads)
    drawn = torch.randn(tokens, B, num_heads, size, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device(), dtype).requires_grad_()


@on_paths
@pytest.mark.parametrize(
    ("layout", "rotated"),
    [("neox", [-3.0, -4.0, 1.0, 2.0]), ("interleaved", [-2.0, 1.0, -4.0, 3.0]), ("deepseek", [-2.0, -4.0, 1.0, 3.0])],
)
def test_a_quarter_turn_takes_pairs_to_minus_the_second_and_the_first(layout, rotated, backend):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    quarter = torch.zeros(1, 2), torch.ones(1, 2)  # cos and sin of 90 degrees, for two pairs
    y, y_k = fused_rope(x, x, *quarter, layout=layout, backend=backend)
    assert y.tolist() == y_k.tolist() == [[rotated]]
    back, _ = fused_rope(y, None, *quarter, layout=layout, inverse=True, backend=backend)
    assert back.tolist() == x.tolist()


def test_the_default_rotates_as_rotate_half_with_a_concatenation():
    def rotate_half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    q, k, (cos, sin) = heads(A), heads(G), tables()
    full_cos, full_sin = (torch.cat((table, table), dim=-1)[:, None, None] for table in (cos, sin))
    want = [x * full_cos + rotate_half(x) * full_sin for x in (q, k)]
    torch.testing.assert_close(list(fused_rope(q, k, cos, sin)), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_and_reference_are_equal_bit_for_bit(layout, dtype):
    q, k = heads(A, dtype=dtype), heads(G, dtype=dtype)
    options = {"layout": layout, "rotary_dim": 4}
    want = fused_rope(q, k, *tables(half=2), backend="reference", **options)
    for got, expected in zip(fused_rope(q, k, *tables(half=2), backend="blocked", **options), want, strict=True):
        assert torch.equal(got, expected)


@on_paths
def test_packed_documents_need_no_batch_dimension(backend):
    q, k = heads(A)[:, 0], heads(G)[:, 0]
    positions = torch.tensor([0, 1, 0, 1, 2])
    y, y_k = fused_rope(q, k, *tables(), positions=positions, backend=backend)
    for got, x in ((y, q), (y_k, k)):
        want, _ = fused_rope(x.unsqueeze(1), None, *(table[positions] for table in tables()), backend=backend)
        assert_same(got, want.squeeze(1))


@on_paths
def test_without_positions_the_first_rows_of_longer_tables_are_taken(backend):
    q = heads(A)
    want, _ = fused_rope(q, None, *tables(), backend=backend)
    assert torch.equal(fused_rope(q, None, *tables(2 * S), backend=backend)[0], want)


@on_device
@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_parts_of_a_packed_qkv_are_read_where_they_are(backend, monkeypatch):
    qkv = torch.randn(S, B, A + 2 * G, D)
    q, k, _ = qkv.split((A, G, G), dim=2)
    want = fused_rope(q.contiguous(), k.contiguous(), *tables(), backend=backend)

    def copied(*_: Any, **__: Any) -> None:
        raise AssertionError("a strided view was copied")

    monkeypatch.setattr(Tensor, "contiguous", copied)
    for got, expected in zip(fused_rope(q, k, *tables(), backend=backend), want, strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, expected)


@on_device
@pytest.mark.parametrize("normed", ["q and k", "q alone", "k alone", "neither"])
def test_more_heads_than_a_tile_holds_and_norms_of_one_of_the_two(normed):
    q, k = heads(9, size=260, tokens=2), heads(2, size=260, tokens=2)
    weights = {f"{name}_norm_weight": torch.rand(260, requires_grad=True) for name in ("q", "k")}
    given = {name: w for name, w in weights.items() if normed == "q and k" or name[0] == normed[0]}

    def with_gradients(backend: str) -> list[Tensor]:
        y = fused_rope(q, k, *tables(half=130), layout="deepseek", **given, backend=backend)
        return [*y, *torch.autograd.grad([x.square().sum() for x in y], (q, k, *given.values()))]

    want = with_gradients("reference")
    for backend in ("triton", "blocked"):
        for got, expected in zip(with_gradients(backend), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_a_norm_comes_before_the_rotation_and_is_that_of_torch():
    q, weight = heads(A, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    cos, sin = (table.double() for table in tables())
    normed = torch.nn.functional.rms_norm(q, (D,), weight, eps=1e-3)
    want, _ = fused_rope(normed, None, cos, sin)
    got, _ = fused_rope(q, None, cos, sin, q_norm_weight=weight, eps=1e-3)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@on_paths
def test_sections_rotate_by_time_height_and_width(backend):
    cos, sin = tables(9)
    positions = torch.tensor([[0, 1, 2, 3, 3], [4, 4, 5, 5, 6], [7, 8, 7, 8, 7]])  # by time, height, width
    chosen = [torch.cat([t[positions[i], i : i + n] for i, n in ((0, 1), (1, 1), (2, 2))], dim=-1) for t in (cos, sin)]
    want, _ = fused_rope(heads(A), None, *chosen, backend=backend)
    got, _ = fused_rope(heads(A), None, cos, sin, positions=positions, sections=(1, 1, 2), backend=backend)
    assert torch.equal(got, want)


@in_interpreter
def test_tokens_are_addressed_in_64_bits(tmp_path):
    # tokens 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    q = memory.as_strided((3, 1, 1, 4), (2**30, 4, 4, 1), 2**31).fill_(2.0)
    cos, sin = torch.zeros(3, 2), torch.ones(3, 2)
    y, _ = fused_rope(q, None, cos, sin, backend="triton")
    assert y.tolist() == [[[[-2.0, -2.0, 2.0, 2.0]]]] * 3


@on_paths
def test_nan_and_inf_stay_in_their_pair(backend):
    x = torch.tensor([math.nan, 1.0, math.inf, 2.0]).view(1, 1, 4)
    y, _ = fused_rope(x, None, torch.full((1, 2), 0.5), torch.full((1, 2), 0.5), layout="interleaved", backend=backend)
    assert str(y.flatten().tolist()) == "[nan, nan, inf, inf]"


@pytest.mark.parametrize("position", [-1, S])
def test_a_position_that_no_row_has_raises_on_the_cpu_and_gives_nan_in_a_kernel(position, device):
    positions = torch.tensor([position, 0, 0, 0, 0])
    with pytest.raises(IndexError):
        fused_rope(heads(A), None, *tables(), positions=positions)
    q, cos, sin, positions = (x.to(device) for x in (heads(A), *tables(), positions))
    y, _ = fused_rope(q, None, cos, sin, positions=positions, backend="triton")
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layout": "gptj"}, ConfigError, "layout must be one of neox, interleaved, deepseek; got 'gptj'"),
        ({"q": torch.ones(S, D)}, ShapeError, r"q must be \[S, B, A, D\], or \[T, A, D\].*got \[5, 8\]"),
        ({"q": torch.ones(S, B, A, D).long()}, ShapeError, "q must be float16.*got torch.int64"),
        ({"k": torch.ones(S, B, G, 4)}, ShapeError, r"k must be \[5, 2, 2, 8\].*got \[5, 2, 2, 4\]"),
        ({"k": torch.ones(S, B, G, D, device="meta")}, ShapeError, "must be on one device; got .*k on meta"),
        ({"rotary_dim": 3}, ShapeError, "rotary_dim must be even, positive and at most the head size 8; got 3"),
        ({"rotary_dim": 10}, ShapeError, "rotary_dim must be even, positive and at most the head size 8; got 10"),
        ({"rotary_dim": 4}, ShapeError, r"cos must be \[rows, 2\] or \[5, 2, 2\].*got \[5, 4\]"),
        ({"sin": torch.ones(S, 2)}, ShapeError, r"sin must be \[5, 4\], like cos; got \[5, 2\]"),
        ({"cos": torch.ones(3, 4), "sin": torch.ones(3, 4)}, ShapeError, "a row for each of 5 tokens.*got 3"),
        (
            {"positions": torch.ones(3).long()},
            ShapeError,
            r"int32 or int64 with shape \[5\] or \[5, 2\].*got torch.int64 \[3\]",
        ),
        ({"positions": torch.ones(S)}, ShapeError, r"positions must be int32 or int64.*got torch.float32 \[5\]"),
        (
            {"positions": torch.ones(S).int(), "cos": torch.ones(S, B, 4), "sin": torch.ones(S, B, 4)},
            ShapeError,
            r"positions need a table \[rows, 4\] to index; got \[5, 2, 4\]",
        ),
        ({"sections": (1, 1, 2)}, ShapeError, r"sections need 3 positions per token; pass positions \[3, 5\]"),
        ({"sections": (1, 1, 1)}, ConfigError, r"three non-negative numbers of pairs that sum to 4; got \(1, 1, 1\)"),
        ({"sections": (5, -2, 1)}, ConfigError, r"three non-negative numbers of pairs that sum to 4; got \(5, -2, 1\)"),
        ({"cos": torch.ones(S, 4).long()}, ShapeError, "cos must be float16.*got torch.int64"),
        ({"k_norm_weight": torch.ones(D, device="meta")}, ShapeError, "k_norm_weight on meta"),
        ({"q_norm_weight": torch.ones(4)}, ShapeError, r"q_norm_weight must be \[8\].*got \[4\]"),
        ({"k": None, "k_norm_weight": torch.ones(D)}, ConfigError, "k_norm_weight has no effect without k"),
        ({"zero_centered": True}, ConfigError, "zero_centered has no effect without q_norm_weight or k_norm_weight"),
        ({"inverse": True, "q_norm_weight": torch.ones(D)}, ConfigError, "QK norm, which has no inverse"),
        ({"backend": "aten"}, BackendError, "rope cannot run with backend='aten': it has no such path"),
    ],
)
def test_what_does_not_fit_is_refused(changed, error, message):
    cos, sin = tables()
    given = {"q": torch.ones(S, B, A, D), "k": torch.ones(S, B, G, D), "cos": cos, "sin": sin} | changed
    with pytest.raises(error, match=message):
        fused_rope(**given)
