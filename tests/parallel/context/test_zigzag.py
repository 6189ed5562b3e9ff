"""zigzag: chunks r and 2 cp - 1 - r on rank r, and back; groups of neighbours hold the parts of a smaller cp."""

import pytest
import torch

from megalith.errors import ShapeError
from megalith.parallel.context.zigzag import zigzag_join, zigzag_positions, zigzag_spans, zigzag_split

SIZES = [1, 2, 3, 4, 8]


def test_a_rank_holds_an_early_chunk_and_its_partner_from_the_end():
    assert [zigzag_positions(16, 4, rank).tolist() for rank in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_chunks_that_are_neighbours_are_one_range():
    assert zigzag_spans(16, 4, 3) == [range(6, 10)]
    assert zigzag_spans(16, 4, 0) == [range(2), range(14, 16)]
    assert zigzag_spans(17, 1, 0) == [range(17)]  # one rank splits nothing


@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_hold_every_position_once(size):
    held = torch.cat([zigzag_positions(48, size, rank) for rank in range(size)])
    assert sorted(held.tolist()) == list(range(48))
    assert torch.equal(zigzag_join(held, size), torch.arange(48))
    assert torch.equal(zigzag_split(torch.arange(48), size), held)


@pytest.mark.parametrize(("size", "inner"), [(4, 2), (8, 2), (8, 4), (6, 3), (4, 4)])
def test_neighbours_together_hold_what_one_of_fewer_ranks_would(size, inner):
    for group in range(size // inner):
        held = torch.cat([zigzag_positions(48, size, rank) for rank in range(group * inner, (group + 1) * inner)])
        assert torch.equal(zigzag_join(held, inner), zigzag_positions(48, size // inner, group))


def test_a_length_without_whole_chunks_is_refused():
    with pytest.raises(ShapeError, match=r"into 4 chunks, .* its length \(18\) must be divisible .*multiple of 4"):
        zigzag_spans(18, 2, 0)
