"""Programs that sum several rows, or the counts of many tiles, which happens only with thousands of rows.

In Triton's interpreter the thresholds are lowered instead; a GPU gets that many rows.
"""

from collections.abc import Callable

import pytest
import torch

from megalith.fusions import row_map
from megalith.fusions.activation.kernels import bias_gelu
from megalith.fusions.experts.kernels import pad_routing_map, routing
from megalith.fusions.experts.kernels import row_map as row_map_kernels
from megalith.fusions.fused_pad_routing_map import fused_pad_routing_map
from megalith.fusions.gated.kernels import glu
from megalith.fusions.norm.kernels import add_norm
from megalith.fusions.residual.kernels import bias_dropout
from megalith.fusions.rope.kernels import rope
from megalith.optional import triton_interprets
from tests.fusions.harness import all_cases

INTERPRETED = triton_interprets()
NUM_ROWS, WIDTHS = (7, (1000,)) if INTERPRETED else (4099, (4096, 5120))
# the name of a case: the launcher of its backward, and its function for the number of rows that a program sums
SUMS = {
    "swiglu, clamped, bias and weights": (glu, "rows_per_sum"),
    "swiglu, interleaved, bias": (glu, "rows_per_sum"),
    "swiglu of two tensors, bias": (glu, "rows_per_sum"),
    "bias gelu": (bias_gelu, "rows_per_sum"),
    "bias dropout add": (bias_dropout, "rows_per_sum"),
    "bias dropout add of a shard of features": (bias_dropout, "rows_per_sum"),
    "rope after a norm": (rope, "rows_per_sum"),
    "rope of half of the features after a zero-centred norm": (rope, "rows_per_sum"),
    "layer norm": (add_norm, "rows_per_program"),
    "rms norm, zero-centred": (add_norm, "rows_per_program"),
    "bias, dropout, add and layer norm": (add_norm, "rows_per_program"),
}
CASES = {case.name: case for case in all_cases()}


def watched(function: Callable[..., int], found: list[int], at_once: int) -> Callable[..., int]:
    """``function``, but in the interpreter three times the rows summed at once; results are added to ``found``."""

    def num_rows(*sizes: int) -> int:
        least = sizes[1] if len(sizes) >= 3 else at_once  # for a norm, a program takes several rows at once
        found.append(3 * least if INTERPRETED else function(*sizes))
        assert least < found[-1] < sizes[0]
        return found[-1]

    return num_rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_several_rows_a_program_match_float64(name, width, monkeypatch, device):
    kernels, function = SUMS[name]
    found: list[int] = []
    at_once = 1
    if kernels is rope:
        at_once = 2
        monkeypatch.setattr(rope, "_tile", lambda num_heads, sizes: (at_once, 2))  # tokens and heads
    monkeypatch.setattr(kernels, function, watched(getattr(kernels, function), found, at_once))
    case = CASES[name]
    # multiples of 2^-10, whose sums are exact: of millions, some would be rounded to the other side of a bound
    inputs = {
        name: (x.detach() * 1024).round().div(1024).requires_grad_() if x is not None and x.requires_grad else x
        for name, x in case.make(NUM_ROWS, width, torch.float32, device).items()
    }
    case.assert_accurate(inputs, "triton")
    assert found


@pytest.fixture
def num_tokens(monkeypatch) -> int:
    """Enough that the counts of their tiles are read in several chunks, with a partial last one."""
    if INTERPRETED:
        monkeypatch.setattr(routing, "_MIN_TOKENS", 8)
        monkeypatch.setattr(routing, "_BLOCK", 32)
    num_tokens, chunk = (163 if INTERPRETED else 4099), row_map_kernels._CHUNK
    assert chunk == pad_routing_map._CHUNK
    num_tiles = routing.Tiling.of(num_tokens, num_experts=6).num_tiles
    assert num_tiles > 2 * chunk
    assert num_tiles % chunk
    return num_tokens


@pytest.mark.parametrize("of_indices", [True, False])
def test_rows_of_more_tiles_than_are_read_together_are_those_of_the_reference(of_indices, num_tokens, device):
    torch.manual_seed(0)
    indices = torch.randint(-1, 6, (num_tokens, 2), device=device)
    routed = indices if of_indices else torch.rand(num_tokens, 6, device=device) < 0.3
    options = {"num_experts": 6} if of_indices else {}
    got = row_map(routed, pad_multiple=16, backend="triton", **options)
    want = row_map(routed, pad_multiple=16, backend="reference", **options)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def test_columns_of_more_tiles_than_are_read_together_are_padded_as_by_the_reference(num_tokens, device):
    torch.manual_seed(0)
    routing_map = torch.rand(num_tokens, 6, device=device) < 0.3
    routing_map[: num_tokens - 20, 0] = True  # its first zeros are in the last tiles
    got = fused_pad_routing_map(routing_map, 64, backend="triton")
    assert got.equal(fused_pad_routing_map(routing_map, 64, backend="reference"))
    assert got[:, 1:].sum(0).remainder(64).eq(0).all()
