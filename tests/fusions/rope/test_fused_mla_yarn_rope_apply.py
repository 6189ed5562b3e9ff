"""fused_mla_yarn_rope_apply: Megatron's names and tables, packed and split documents, gradients over the heads."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from megalith.errors import BackendError, ConfigError, ShapeError
from megalith.fusions import (
    fused_apply_mla_rope_for_kv,
    fused_apply_mla_rope_for_q,
    positions_from_cu_seqlens,
    yarn_cos_sin,
)
from tests.fusions.rope.paths import PATHS, on_device, on_paths
from tests.kernel_reports import in_interpreter

S, B, A, K, R, V = 4, 2, 3, 5, 4, 7


def tables(rows: int = 8) -> tuple[Tensor, Tensor]:
    return yarn_cos_sin(rows, R, scaling_factor=40.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device()).requires_grad_()


@on_paths
def test_values_worked_out_by_hand(backend):
    cos, sin = torch.tensor([[0.0, 0.5]]), torch.tensor([[1.0, 0.5]])
    t = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 5)
    q = fused_apply_mla_rope_for_q(t, cos, sin, 1, 4, backend=backend)
    assert q.flatten().tolist() == [9.0, -2.0, -0.5, 1.0, 3.5]
    kv = torch.tensor([[9.0, 8.0], [7.0, 6.0]]).view(1, 1, 2, 2)
    k, v = fused_apply_mla_rope_for_kv(kv, t[..., 1:], cos, sin, 4, 1, 1, backend=backend)
    assert k[0, 0].tolist() == [[9.0, -2.0, -0.5, 1.0, 3.5], [7.0, -2.0, -0.5, 1.0, 3.5]]
    assert v[0, 0].tolist() == [[8.0], [6.0]]


def test_arguments_have_the_names_and_the_order_of_the_field():
    def positional(function: object) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    ends = ["cp_rank", "cp_size", "rotary_interleaved"]
    starts = ["t", "cos", "sin", "qk_head_dim", "emb_dim", "cu_seqlens_q"]
    assert positional(fused_apply_mla_rope_for_q) == [*starts, *ends]
    starts = ["kv", "k_pos_emb", "cos", "sin", "emb_dim", "k_dim", "v_dim", "cu_seqlens_kv"]
    assert positional(fused_apply_mla_rope_for_kv) == [*starts, *ends]


@on_device
@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=in_interpreter)])  # on a GPU it is not read
def test_tables_of_full_width_hold_each_angle_twice(interleaved):
    def full(table: Tensor) -> Tensor:
        twice = table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)
        return twice[:, None, None]

    t, kv, k_pe = draw(S, B, A, K + R), draw(S, B, A, K + V), draw(S, B, 1, R)
    options = {"rotary_interleaved": interleaved}
    for backend in PATHS:
        got, want = (
            [
                fused_apply_mla_rope_for_q(t, *given, K, R, **options, backend=backend),
                *fused_apply_mla_rope_for_kv(kv, k_pe, *given, R, K, V, **options, backend=backend),
            ]
            for given in ([full(table) for table in tables()], tables())
        )
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_table_says_itself_whether_its_angles_stand_in_both_halves_or_side_by_side():
    t, (cos, sin) = draw(S, B, A, K + R), tables()
    in_halves = [torch.cat((table, table), dim=-1)[:, None, None] for table in (cos, sin)]  # as in Megatron's YaRN
    want = fused_apply_mla_rope_for_q(t, cos, sin, K, R, rotary_interleaved=True)
    assert torch.equal(fused_apply_mla_rope_for_q(t, *in_halves, K, R, rotary_interleaved=True), want)
    assert not torch.equal(fused_apply_mla_rope_for_q(t, *in_halves, K, R), want)


@on_paths
def test_queries_are_written_elsewhere_and_can_be_rotated_back(backend):
    t = draw(S, B, A, K + R)
    before = t.detach().clone()
    unscaled = yarn_cos_sin(S, R)  # a concentration would be squared
    q = fused_apply_mla_rope_for_q(t, *unscaled, K, R, backend=backend)
    assert torch.equal(t, before)
    assert torch.equal(q[..., :K], t[..., :K])
    assert not torch.equal(q[1:], t[1:])
    torch.testing.assert_close(fused_apply_mla_rope_for_q(q, *unscaled, K, R, inverse=True, backend=backend), t)


@on_paths
def test_ranks_that_share_documents_rotate_each_token_as_the_whole_does(backend):
    cu_seqlens, T = torch.tensor([0, 8, 12], dtype=torch.int32), 12
    positions = positions_from_cu_seqlens(cu_seqlens, T)
    t, kv, k_pe = draw(T, A, K + R), draw(T, A, K + V), draw(T, 1, R)
    q = fused_apply_mla_rope_for_q(t, *tables(), K, R, cu_seqlens, backend=backend)
    k, _ = fused_apply_mla_rope_for_kv(kv, k_pe, *tables(), R, K, V, cu_seqlens, backend=backend)
    by_ids = fused_apply_mla_rope_for_q(t, *tables(), K, R, position_ids=positions, backend=backend)
    assert torch.equal(by_ids, q)
    for rank, tokens in enumerate(([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])):
        cut = (cu_seqlens, rank, 2)
        assert torch.equal(fused_apply_mla_rope_for_q(t[tokens], *tables(), K, R, *cut, backend=backend), q[tokens])
        got, _ = fused_apply_mla_rope_for_kv(kv[tokens], k_pe[tokens], *tables(), R, K, V, *cut, backend=backend)
        assert torch.equal(got, k[tokens])


@on_device
@pytest.mark.parametrize("interleaved", [False, True])
def test_more_heads_than_a_tile_holds(interleaved):
    heads, k_dim, v_dim = 37, 40, 72
    kv, k_pe = draw(3, heads, k_dim + v_dim), draw(3, 1, R)

    def with_gradients(backend: str) -> list[Tensor]:
        options = {"position_ids": torch.tensor([2, 0, 5]), "rotary_interleaved": interleaved, "backend": backend}
        k, v = fused_apply_mla_rope_for_kv(kv, k_pe, *tables(), R, k_dim, v_dim, **options)
        return [k, v, *torch.autograd.grad([k.square().sum(), v.square().sum()], (kv, k_pe))]

    want = with_gradients("reference")
    for backend in ("triton", "blocked"):
        torch.testing.assert_close(with_gradients(backend), want, rtol=1e-5, atol=1e-5)


@on_device
@pytest.mark.parametrize("backend", ["triton", "blocked"])
def test_gradients_of_the_shared_part_are_summed_in_float32(backend):
    kv = torch.zeros(1, 1, 3, 2, dtype=torch.bfloat16, requires_grad=True)
    k_pe = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    k, _ = fused_apply_mla_rope_for_kv(kv, k_pe, torch.ones(1, 1), torch.zeros(1, 1), 2, 1, 1, backend=backend)
    dk = torch.tensor([512.0, 1.0, -512.0], dtype=torch.bfloat16).view(1, 1, 3, 1).expand_as(k)  # 513 is not a bfloat16
    (dk_pe,) = torch.autograd.grad(k, k_pe, dk)
    assert dk_pe.flatten().tolist() == [1.0, 1.0]


@in_interpreter
def test_tokens_are_addressed_in_64_bits(tmp_path):
    # tokens 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 8, dtype=torch.float16)
    kv = memory.as_strided((3, 1, 1, 2), (2**30, 4, 4, 1), 2**31).fill_(2.0)
    k_pe = memory.as_strided((3, 1, 1, 2), (2**30, 4, 4, 1), 2**31 + 4).fill_(3.0)
    k, v = fused_apply_mla_rope_for_kv(kv, k_pe, torch.ones(3, 1), torch.zeros(3, 1), 2, 1, 1, backend="triton")
    assert k.flatten(1).tolist() == [[2.0, 3.0, 3.0]] * 3
    assert v.flatten().tolist() == [2.0] * 3


@on_paths
def test_nan_and_inf_are_copied_and_rotated(backend):
    kv = torch.tensor([math.nan, math.inf]).view(1, 1, 1, 2)
    k_pe = torch.tensor([math.inf, 1.0]).view(1, 1, 1, 2)
    half = torch.full((1, 1), 0.5)
    k, v = fused_apply_mla_rope_for_kv(kv, k_pe, half, half, 2, 1, 1, backend=backend)
    assert str([k.flatten().tolist(), v.flatten().tolist()]) == "[[nan, inf, inf], [inf]]"


PACKED = {"t": torch.ones(6, A, K + R)}
BORDERS = torch.tensor([0, 6])
DISTINCT = torch.arange(32.0).view(8, 1, 1, R)
SIDE_BY_SIDE = torch.arange(16.0).repeat_interleave(2).view(8, 1, 1, R)
FULL = {"cos": torch.ones(8, 1, 1, R), "sin": torch.ones(8, 1, 1, R)}
INTERLEAVED = {"rotary_interleaved": True}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"t": torch.ones(S, B, A, 8)}, ShapeError, r"t must be \[S, B, A, 9\].*qk_head_dim \+ emb_dim columns; got"),
        ({"emb_dim": 3}, ShapeError, "sizes must be positive, and emb_dim even.*got emb_dim=3, qk_head_dim=5"),
        ({"qk_head_dim": 0}, ShapeError, "sizes must be positive.*got emb_dim=4, qk_head_dim=0"),
        ({"cos": torch.ones(8, 3), "sin": torch.ones(8, 3)}, ShapeError, r"cos must be \[rows, 2\].*got \[8, 3\]"),
        ({"cos": torch.ones(8, 1, 1, 2)}, ShapeError, r"cos and sin must be \[8, 1, 1, 4\].*got \[8, 1, 1, 2\]"),
        (
            {"cos": DISTINCT, "sin": DISTINCT} | INTERLEAVED,
            ConfigError,
            r"must hold each angle twice.*pass \[rows, 2\]",
        ),
        (
            {"cos": SIDE_BY_SIDE, "sin": SIDE_BY_SIDE},
            ConfigError,
            r"in both halves; this one does not; pass \[rows, 2\]",
        ),
        (
            {name: x.to("meta") for name, x in ({"t": torch.ones(S, B, A, K + R)} | FULL).items()} | INTERLEAVED,
            ConfigError,
            r"or in both halves; .*synchronize with the device.*pass \[rows, 2\]: cos\[:, 0, 0, ::2\]",
        ),
        (
            {"cos": torch.ones(8, 2, device="meta")},
            ShapeError,
            "the heads, cos.* must be on one device; got the heads on cpu, cos on meta",
        ),
        ({"cp_size": 2}, ConfigError, "no effect without cu_seqlens.*the position_ids of this rank"),
        ({"cu_seqlens_q": BORDERS}, ConfigError, r"cu_seqlens is for packed tokens \[T, A, ...\]"),
        (PACKED, ConfigError, r"packed tokens.*need positions; pass cu_seqlens or position_ids"),
        (PACKED | {"cu_seqlens_q": BORDERS, "position_ids": BORDERS}, ConfigError, "position_ids for"),
        (
            PACKED | {"position_ids": BORDERS},
            ShapeError,
            r"positions must be int32 or int64 with shape \[6\].*got .* \[2\]",
        ),
        ({"backend": "aten"}, BackendError, "rope cannot run with backend='aten'"),
    ],
)
def test_queries_that_do_not_fit_are_refused(changed, error, message):
    cos, sin = tables()
    given = {"t": torch.ones(S, B, A, K + R), "cos": cos, "sin": sin, "qk_head_dim": K, "emb_dim": R} | changed
    with pytest.raises(error, match=message):
        fused_apply_mla_rope_for_q(**given)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"kv": torch.ones(S, B, A, 8)}, ShapeError, r"kv must be \[S, B, A, 12\].*k_dim \+ v_dim columns; got"),
        ({"v_dim": 0}, ShapeError, "sizes must be positive.*v_dim=0"),
        ({"k_pos_emb": torch.ones(S, B, A, R)}, ShapeError, r"k_pos_emb must be \[4, 2, 1, 4\].*got \[4, 2, 3, 4\]"),
        ({"k_pos_emb": torch.ones(S, B, 1, R).half()}, ShapeError, "k_pos_emb must be torch.float32, like kv"),
        ({"k_pos_emb": torch.ones(S, B, 1, R, device="meta")}, ShapeError, "must be on one device"),
        ({"backend": "aten"}, BackendError, "mla_rope_kv cannot run with backend='aten'"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused(changed, error, message):
    cos, sin = tables()
    given = {"kv": torch.ones(S, B, A, K + V), "k_pos_emb": torch.ones(S, B, 1, R), "cos": cos, "sin": sin}
    with pytest.raises(error, match=message):
        fused_apply_mla_rope_for_kv(**(given | {"emb_dim": R, "k_dim": K, "v_dim": V} | changed))
