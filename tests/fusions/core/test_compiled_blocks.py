"""Compiled formulas over rows: compiled once for any number of rows, results written to parts of tensors, sums."""

import functools

import pytest
import torch
from torch import Tensor

from megalith import fusions
from megalith.fusions.core import blocks, compiled_blocks
from megalith.fusions.core.compiled_blocks import compiled_by_blocks
from megalith.fusions.core.compiled_formulas import CompiledFormula
from megalith.fusions.core.compiler import why_not_compile
from megalith.numerics.dropout import Dropout, DropoutKey
from tests.compiling import builds

pytestmark = pytest.mark.skipif(bool(why_not_compile()), reason=f"{why_not_compile()}")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, new_folder):
    monkeypatch.setattr(compiled_blocks, "_compiled", CompiledFormula(compiled_blocks._compute))
    row_elements = blocks._THREAD_ELEMENTS * torch.get_num_threads() // 4  # a block has four such rows
    monkeypatch.setattr(compiled_blocks, "blocks", lambda num_rows, *_, **__: blocks.blocks(num_rows, row_elements))


def test_a_formula_of_rows_is_compiled_once_and_adds_up_the_sums_of_all_blocks():
    def formula(x: Tensor, absent: None) -> tuple[Tensor, Tensor]:
        return x + 1.0, x.sum(dim=0)

    for num_rows, num_builds in ((11, 1), (6, 0)):  # blocks of 4, 4, 3 and of 4, 2
        x = torch.randn(num_rows, 5)
        y, total = torch.empty(num_rows, 5), torch.zeros(5)
        with builds(num_builds):
            compiled_by_blocks(formula, (x, None), (y,), (total,))
        assert torch.equal(y, x + 1.0)
        torch.testing.assert_close(total, x.sum(dim=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_of_a_sum_are_those_before_rounding(dtype):
    def formula(x: Tensor, out: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        y = x * 1.01
        return y, y

    x = torch.randn(11, 3, 5).to(dtype)
    y, total = torch.empty_like(x), torch.zeros(5)
    compiled_by_blocks(formula, (x,), (y,), (total,), acc=torch.float32)
    terms = x.float() * 1.01
    assert torch.equal(y, terms.to(dtype))
    torch.testing.assert_close(total, terms.sum(dim=(0, 1)), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    "in_parts",
    [
        pytest.param(lambda y: y.chunk(2, dim=-1), id="halves"),
        pytest.param(lambda y: (y[:, ::2], y[:, 1::2]), id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_parts_of_one_tensor_are_written_as_if_they_were_tensors(in_parts):
    x, y = torch.randn(9, 6).bfloat16(), torch.full((9, 12), 7.0, dtype=torch.bfloat16)

    def formula(x: Tensor, out: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        assert (x.dtype, out) == (torch.float32, [None, None])
        return x * 2.0, x - 1.0

    parts = in_parts(y)
    compiled_by_blocks(formula, (x,), parts, acc=torch.float32)
    assert torch.equal(parts[0], (x.float() * 2.0).bfloat16())
    assert torch.equal(parts[1], (x.float() - 1.0).bfloat16())


def test_no_rows_compile_nothing():
    def formula(*_: object) -> tuple[Tensor]:
        raise AssertionError("there is nothing to compute")

    compiled_by_blocks(formula, (torch.empty(0, 4),), (torch.empty(0, 4),))


def norm_after_dropout(T: int, site: int, step: int) -> None:
    x, residual, weight = torch.randn(T, 8, requires_grad=True), torch.randn(T, 8), torch.ones(8)
    drop = Dropout(0.5, DropoutKey(seed=1, step=step, tokens=torch.arange(T), site=site))
    y, h = fusions.fused_add_norm(x, residual, weight, normalization="RMSNorm", dropout=drop, backend="compile")
    want = fusions.fused_add_norm(x, residual, weight, normalization="RMSNorm", dropout=drop, backend="reference")
    torch.testing.assert_close((y, h), want)
    (y.sum() + h.sum()).backward()


def rope(T: int, site: int, step: int) -> None:
    B, A = T // 2, T // 2 + 1
    x = torch.ones(T, B, A, 8)
    q, _ = fusions.fused_rope(x, None, torch.ones(T, 4), torch.zeros(T, 4), backend="compile")
    assert torch.equal(q, torch.ones(T, B, A, 8))


@pytest.mark.parametrize("layer", [norm_after_dropout, rope])
def test_other_lengths_steps_layers_batches_and_numbers_of_heads_compile_nothing_again(layer):
    layer(6, site=1, step=1)
    with builds(0):
        layer(10, site=2, step=5)


def test_tensors_of_the_caller_are_not_marked_for_a_compiler_of_its_own():
    x = torch.ones(6, 3, 4, 24)  # heads of a size that no other test compiles
    with builds(1):
        fusions.fused_rope(x, None, torch.ones(6, 12), torch.zeros(6, 12), backend="compile")
    assert not hasattr(x, "_dynamo_weak_dynamic_indices")


def test_backward_gets_what_it_gets_in_blocks():
    x = torch.randn(9, 16, requires_grad=True)
    bias = torch.randn(16, requires_grad=True)
    found = {}
    for path in ("compile", "blocked"):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(kept_by, kept), lambda x: x):
            y = fusions.glu(x, activation="silu", bias=bias, backend=path)
        found[path] = (sum(t.nbytes for t in kept), y, *torch.autograd.grad(y.square().sum(), (x, bias)))
    assert found["compile"][0] == found["blocked"][0]
    torch.testing.assert_close(found["compile"][1:], found["blocked"][1:])


def kept_by(kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(x)
    return x


def test_inside_torch_compile_its_compiler_sees_the_formula():
    graphs = []
    compute = torch.compile(
        functools.partial(fusions.glu, activation="silu", backend="compile"),
        fullgraph=True,
        backend=lambda graph, _: graphs.append(graph.code) or graph,
    )
    compute(torch.randn(3, 8))
    assert "silu" in graphs[0]
    assert "megalith.glu" not in graphs[0]
