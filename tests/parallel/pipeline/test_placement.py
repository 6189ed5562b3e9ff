"""placement: stages as in torch, an inverse, neighbours one stage apart, and wrong sizes refused."""

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from megalith.errors import ConfigError
from megalith.parallel.pipeline.placement import Placement, check_sizes

PLACEMENTS = [Placement(p, v) for p in (1, 2, 3, 8) for v in (1, 2, 4)] + [Placement(p, 2, "v") for p in (1, 2, 5, 8)]


def test_looped_stages_go_on_from_the_last_rank_to_the_first():
    placement = Placement(3, 2)
    assert [[placement.stage(rank, chunk) for chunk in (0, 1)] for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_stages_of_a_v_come_back_up_so_that_the_first_rank_has_both_ends_of_the_model():
    placement = Placement(3, 2, "v")
    assert [[placement.stage(rank, chunk) for chunk in (0, 1)] for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_stage_lies_on_the_rank_where_torch_puts_it(placement):
    style = {"looped": "loop", "v": "v"}[placement.shape]
    theirs = generate_stage_to_rank_mapping(placement.num_ranks, placement.num_stages, style=style)
    assert {stage: placement.place(stage)[0] for stage in range(placement.num_stages)} == theirs


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_stage_has_one_place_and_neighbours_one_stage_away(placement):
    places = [(rank, chunk) for rank in range(placement.num_ranks) for chunk in range(placement.num_chunks)]
    assert sorted(placement.stage(*place) for place in places) == list(range(placement.num_stages))
    for place in places:
        stage = placement.stage(*place)
        assert placement.place(stage) == place
        previous, following = placement.previous(*place), placement.next(*place)
        assert (previous and placement.stage(*previous)) == (stage - 1 if stage else None)
        assert (following and placement.stage(*following)) == (stage + 1 if stage + 1 < placement.num_stages else None)


def test_wrong_sizes_are_refused_all_at_once():
    with pytest.raises(ConfigError, match=r"positive integers; got num_ranks=0, num_chunks=True; use 1 or more"):
        Placement(0, True)
    with pytest.raises(ConfigError, match=r"got num_chunks=3; use num_chunks=2, or shape='looped'"):
        Placement(4, 3, "v")
    check_sizes(num_ranks=1, anything=7)
