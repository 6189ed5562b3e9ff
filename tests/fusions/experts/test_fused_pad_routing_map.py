"""fused_pad_routing_map: columns by hand, long maps of many tiles, preserved layouts and dtypes, refusals."""

import pytest
import torch

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.fused_pad_routing_map import fused_pad_routing_map

PATHS = ("triton", "blocked", "reference")


@pytest.mark.parametrize("path", PATHS)
def test_a_map_worked_out_by_hand(path, device):
    routing_map = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 1, 1]], device=device)
    padded = fused_pad_routing_map(routing_map, 4, backend=path)
    assert padded.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 1], [0, 1, 1]]  # the last has too few zeros
    assert routing_map.sum() == 8


@pytest.mark.parametrize("path", PATHS)
def test_the_zeros_that_turn_may_lie_in_any_tile_of_a_long_map(path, device):
    torch.manual_seed(0)
    routing_map = torch.rand(1000, 6, device=device) < 0.3
    routing_map[:, 0], routing_map[:, 1] = True, False
    routing_map[900:, 0] = False  # full for seven tiles: the first zeros are in the eighth
    routing_map[3:990, 2] = True
    padded = fused_pad_routing_map(routing_map, 300, backend=path)
    added = padded & ~routing_map
    assert (padded & routing_map).equal(routing_map)
    for n, before, column, new in zip(padded.sum(0), routing_map.sum(0), routing_map.t(), added.t(), strict=True):
        assert n == min(1000, -(-int(before) // 300) * 300)
        turned = int(new.sum())
        assert new.nonzero().flatten().equal((~column).nonzero().flatten()[:turned])  # the first zeros, in order


def test_a_block_of_rows_starts_where_the_one_before_left_off(monkeypatch):
    monkeypatch.setattr("megalith.fusions.core.blocks._THREAD_ELEMENTS", 40)
    torch.manual_seed(0)
    routing_map = torch.rand(97, 4) < 0.8
    got = fused_pad_routing_map(routing_map, 16, backend="blocked")
    assert got.equal(fused_pad_routing_map(routing_map, 16, backend="reference"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_dtype_and_order_of_strides_stay(dtype, path, device):
    routing_map = (torch.rand(3, 20, device=device) < 0.5).to(dtype).t()
    padded = fused_pad_routing_map(routing_map, 4, backend=path)
    assert padded.dtype == dtype
    assert padded.stride() == routing_map.stride() == (1, 20)
    assert (padded.sum(dim=0) % 4 == 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_entries_that_are_not_zero_stay_what_they_are(path, device):
    routing_map = torch.tensor([[0], [5], [-3]], device=device)
    assert fused_pad_routing_map(routing_map, 3, backend=path).tolist() == [[1], [5], [-3]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)], ids=str)
def test_an_empty_map_stays_empty(shape, path, device):
    assert fused_pad_routing_map(torch.zeros(shape, device=device, dtype=torch.bool), 8, backend=path).shape == shape


@pytest.mark.parametrize(
    ("routing_map", "pad_multiple", "error", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.bool), 0, ConfigError, r"pad_multiple must be 1 or more tokens; got 0"),
        (torch.zeros(2, 2, dtype=torch.bool), -8, ConfigError, r"pad_multiple must be .*got -8"),
        (torch.zeros(2, 2), 8, ShapeError, r"routing_map must be bool or an integer dtype; got torch.float32"),
        (torch.zeros(2, dtype=torch.bool), 8, ShapeError, r"routing_map must be \[T, E\], .*got \[2\]"),
    ],
)
def test_maps_that_do_not_fit_are_refused(routing_map, pad_multiple, error, message):
    with pytest.raises(error, match=message):
        fused_pad_routing_map(routing_map, pad_multiple)
