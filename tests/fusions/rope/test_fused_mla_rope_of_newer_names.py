"""fused_mla_rope_inplace, _out_of_place and _kv_split: the meaning of inverse and remove_interleaving."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions import (
    fused_apply_mla_rope_for_kv,
    fused_apply_mla_rope_for_q,
    fused_mla_rope_inplace,
    fused_mla_rope_kv_split,
    fused_mla_rope_out_of_place,
    yarn_cos_sin,
)
from tests.fusions.rope.paths import on_paths

S, B, A, K, R, V = 4, 2, 3, 5, 6, 7


def angles() -> Tensor:
    return torch.outer(torch.arange(float(S)), torch.tensor([1.0, 0.3, 0.1])).double()


def tables() -> tuple[Tensor, Tensor]:
    return angles().cos().float(), angles().sin().float()


def draw(*shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return drawn.to(torch.get_default_device())


def by_complex_numbers(x: Tensor, inverse: bool, remove_interleaving: bool) -> Tensor:
    """``x`` [S, ..., R], with pairs 2i and 2i + 1 as complex numbers multiplied by exp(i angle)."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    by = (-angles() if inverse else angles()).view(S, *[1] * (x.dim() - 2), R // 2)
    y = pairs * torch.polar(torch.ones_like(by), by)
    return torch.view_as_real(y).flatten(-2) if remove_interleaving else torch.cat((y.real, y.imag), dim=-1)


@on_paths
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("remove_interleaving", [False, True])
def test_pairs_are_read_and_multiplied_by_a_rotation_whichever_way_it_goes(backend, inverse, remove_interleaving):
    t = draw(S, B, A, K + R)
    options = {"inverse": inverse, "remove_interleaving": remove_interleaving, "backend": backend}
    want = torch.cat((t[..., :K].double(), by_complex_numbers(t[..., K:], inverse, remove_interleaving)), dim=-1)
    before = t.clone()
    y = fused_mla_rope_out_of_place(t, *tables(), K, R, **options)
    assert torch.equal(t, before)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
    same = fused_mla_rope_inplace(t, *tables(), K, R, **options)
    assert same is t
    assert torch.equal(t, y)


@on_paths
@pytest.mark.parametrize("remove_interleaving", [False, True])
def test_keys_are_split_and_rotated(backend, remove_interleaving):
    kv, k_pe = draw(S, B, A, K + V), draw(S, B, 1, R)
    options = {"remove_interleaving": remove_interleaving, "backend": backend}
    k, v = fused_mla_rope_kv_split(kv, k_pe, *tables(), R, K, V, **options)
    pe = by_complex_numbers(k_pe, False, remove_interleaving).expand(S, B, A, R)
    torch.testing.assert_close(k.double(), torch.cat((kv[..., :K].double(), pe), dim=-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(v, kv[..., K:])


def test_by_default_they_are_the_older_names():
    t, kv, k_pe = draw(S, B, A, K + R), draw(S, B, A, K + V), draw(S, B, 1, R)
    assert torch.equal(fused_mla_rope_out_of_place(t, *tables(), K, R), fused_apply_mla_rope_for_q(t, *tables(), K, R))
    got = fused_mla_rope_kv_split(kv, k_pe, *tables(), R, K, V)
    want = fused_apply_mla_rope_for_kv(kv, k_pe, *tables(), R, K, V)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_the_inverse_of_the_newer_names_is_not_that_of_the_older():
    t = draw(S, B, A, K + R)
    undone = fused_apply_mla_rope_for_q(fused_apply_mla_rope_for_q(t, *tables(), K, R), *tables(), K, R, inverse=True)
    torch.testing.assert_close(undone, t)
    # it reads pairs again, where the first call wrote halves
    twice = fused_mla_rope_out_of_place(fused_mla_rope_out_of_place(t, *tables(), K, R), *tables(), K, R, inverse=True)
    assert not torch.allclose(twice, t)
    kept = fused_mla_rope_out_of_place(t, *tables(), K, R, remove_interleaving=True)
    torch.testing.assert_close(
        fused_mla_rope_out_of_place(kept, *tables(), K, R, inverse=True, remove_interleaving=True), t
    )


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("remove_interleaving", [False, True])
def test_the_gradient_in_place_is_that_out_of_place(inverse, remove_interleaving):
    x, dy = draw(S, B, A, K + R).requires_grad_(), draw(S, B, A, K + R) + 1.0
    options = {"inverse": inverse, "remove_interleaving": remove_interleaving}

    def gradient(function: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(function(2 * x, *tables(), K, R, **options), x, dy)[0]

    want = gradient(fused_mla_rope_out_of_place)
    assert torch.equal(gradient(fused_mla_rope_inplace), want)
    by_torch = 2 * torch.cat((x[..., :K], by_complex_numbers(x[..., K:], inverse, remove_interleaving)), dim=-1)
    torch.testing.assert_close(torch.autograd.grad(by_torch, x, dy.double())[0], want, rtol=1e-5, atol=1e-6)


def test_autograd_is_told_of_what_is_overwritten():
    leaf = draw(S, B, A, K + R).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        fused_mla_rope_inplace(leaf, *tables(), K, R)
    saved = leaf.exp()  # its gradient is computed from its value
    fused_mla_rope_inplace(saved, *tables(), K, R)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    fused_mla_rope_out_of_place(leaf.exp(), *tables(), K, R).sum().backward()


def test_one_graph_of_torch_compile_holds_them():
    torch.compiler.reset()

    def compute(t: Tensor, kv: Tensor, k_pe: Tensor) -> tuple[Tensor, ...]:
        options = {"remove_interleaving": True}
        q = fused_mla_rope_inplace(t * 1.0, *tables(), K, R, inverse=True, **options)
        return (
            q,
            fused_mla_rope_out_of_place(t, *tables(), K, R),
            *fused_mla_rope_kv_split(kv, k_pe, *tables(), R, K, V, **options),
        )

    inputs = [draw(*shape).requires_grad_() for shape in ((S, B, A, K + R), (S, B, A, K + V), (S, B, 1, R))]
    got, want = torch.compile(compute, fullgraph=True, backend="aot_eager")(*inputs), compute(*inputs)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(
        torch.autograd.grad([y.sum() for y in got], inputs),
        torch.autograd.grad([y.sum() for y in want], inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_positions_take_the_place_of_borders_that_are_given_beside_them():
    borders, positions = torch.tensor([0, 3, 4]), torch.tensor([2, 0, 1, 3])
    t, kv, k_pe = draw(S, A, K + R), draw(S, A, K + V), draw(S, 1, R)
    want = fused_mla_rope_out_of_place(t, *tables(), K, R, position_ids=positions)
    assert torch.equal(fused_mla_rope_out_of_place(t, *tables(), K, R, borders, 1, 2, position_ids=positions), want)
    assert not torch.equal(fused_mla_rope_out_of_place(t, *tables(), K, R, borders), want)
    by_both = fused_mla_rope_kv_split(kv, k_pe, *tables(), R, K, V, borders, position_ids=positions)
    alone = fused_mla_rope_kv_split(kv, k_pe, *tables(), R, K, V, position_ids=positions)
    assert all(torch.equal(x, y) for x, y in zip(by_both, alone, strict=True))
    assert torch.equal(fused_mla_rope_inplace(t.clone(), *tables(), K, R, borders, position_ids=positions), want)


def test_arguments_have_the_names_and_the_order_of_the_field():
    def positional(function: object) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    ends = "cp_rank cp_size rotary_interleaved"
    of_q = f"t cos sin nope_dim emb_dim cu_seqlens_q {ends} inverse remove_interleaving position_ids".split()
    assert positional(fused_mla_rope_inplace) == positional(fused_mla_rope_out_of_place) == of_q
    of_kv = f"kv k_pos_emb cos sin emb_dim k_dim v_dim cu_seqlens_kv {ends} remove_interleaving".split()
    assert positional(fused_mla_rope_kv_split) == of_kv


@pytest.mark.parametrize("function", [fused_mla_rope_inplace, fused_mla_rope_out_of_place])
def test_what_does_not_fit_is_refused_before_anything_is_written(function):
    t = draw(S, B, A, K + R)
    before = t.clone()
    with pytest.raises(ConfigError, match=r"rotary_interleaved=True.*to write pairs .*use remove_interleaving=True"):
        function(t, *tables(), K, R, rotary_interleaved=True)
    with pytest.raises(ShapeError, match=r"t must be \[S, B, A, 10\].*nope_dim \+ emb_dim columns"):
        function(t, *tables(), K - 1, R)
    with pytest.raises(ConfigError, match="pass cu_seqlens or position_ids"):
        function(t[:, 0], *tables(), K, R)
    with pytest.raises(ShapeError, match="a row for each of 4 tokens"):
        function(t, *yarn_cos_sin(S - 1, R), K, R)
    assert torch.equal(t, before)


def test_keys_refuse_interleaved_tables_too():
    kv, k_pe = draw(S, B, A, K + V), draw(S, B, 1, R)
    with pytest.raises(ConfigError, match="rotary_interleaved=True is not supported here"):
        fused_mla_rope_kv_split(kv, k_pe, *tables(), R, K, V, rotary_interleaved=True)
