"""rank_grid: Megatron's enumerations, properties of the groups of any grid, and refusals."""

import subprocess
import sys
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.config.layout import Layout
from megalith.errors import TopologyError
from megalith.topology.rank_grid import RankGrid
from tests.effort import effort

DENSE = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
EXPERT_PARTS = ("etp", "ep", "edp_shard", "edp_replicate", "pp")


def test_16_ranks_sit_where_megatron_puts_them():
    # what Megatron-Core's RankGenerator lists for world 16, tp 2, cp 2, dp 2, pp 2
    grid = RankGrid(16, tensor=2, context=2, pipeline=2)
    assert grid.groups("tp") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert grid.groups("cp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert grid.groups("dp")[:5] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    assert grid.groups("pp") == [[i, i + 8] for i in range(8)]
    assert grid.groups("dp-cp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert grid.groups("tp-pp")[:2] == [[0, 1, 8, 9], [2, 3, 10, 11]]
    assert grid.groups("tp-dp-cp") == [[*range(8)], [*range(8, 16)]]


def test_the_same_ranks_hold_experts_in_another_way():
    # as above, with etp 1, ep 4, edp 2, pp 2
    grid = RankGrid(16, tensor=2, context=2, pipeline=2, expert=4, expert_tensor=1)
    assert grid.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert grid.groups("edp")[:5] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    assert grid.groups("etp-ep-pp") == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert grid.groups("pp") == [[i, i + 8] for i in range(8)]


def test_replicas_are_cut_from_dp_outside_of_its_shards():
    grid = RankGrid(16, tensor=2, replicate=2)
    assert grid.groups("dp_shard") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert grid.groups("dp_replicate") == [[i, i + 8] for i in range(8)]
    assert grid.groups("dp") == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    assert grid.coordinates(13) == {
        **{"tp": 1, "cp": 0, "dp": 6, "dp_shard": 2, "dp_replicate": 1, "pp": 0},
        **{"etp": 1, "ep": 0, "edp": 6, "edp_shard": 2, "edp_replicate": 1},
    }


def test_replicas_of_experts_are_cut_from_edp_outside_of_its_shards():
    # 16 ranks, ep 2, two replicas of the dense weights: edp is 8, of which 2 replicas of 4 shards
    grid = RankGrid(16, tensor=2, replicate=2, expert=2, expert_tensor=1)
    assert grid.groups("ep")[:2] == [[0, 1], [2, 3]]
    assert grid.groups("edp_shard") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert grid.groups("edp_replicate") == [[i, i + 8] for i in range(8)]
    assert grid.groups("edp") == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    assert grid.groups("edp") == grid.groups("edp_replicate-edp_shard")
    # where replicate does not divide edp, the experts are replicated as far as possible
    sizes = RankGrid(12, replicate=6, expert=3).layout
    assert (sizes.edp_replicate, sizes.edp_shard) == (2, 2)


def test_a_grid_of_a_layout_is_the_grid_of_its_degrees():
    sizes = {"tensor": 2, "context": 2, "pipeline": 2, "replicate": 2, "expert": 4, "expert_tensor": 1}
    layout = Layout.resolve(32, **sizes)
    grid = RankGrid(layout, order="tp-ep-cp-dp-pp")
    assert grid.layout == layout
    same = RankGrid(32, **sizes, order="tp-ep-cp-dp-pp")
    assert [grid.coordinates(rank) for rank in range(32)] == [same.coordinates(rank) for rank in range(32)]


def test_the_order_says_which_axis_is_fastest():
    grid = RankGrid(8, tensor=2, pipeline=2, order="pp-dp-tp")
    assert grid.groups("pp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("tp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@st.composite
def grids(draw) -> tuple[RankGrid, list[str]]:
    """A grid of up to a thousand ranks whose experts fit, and its order; pp comes first or last, as stages require."""
    tensor, context, pipeline, replicate, shard = (draw(st.integers(1, 4)) for _ in range(5))
    inside = tensor * context * replicate * shard  # the ranks of a stage
    expert_tensor = draw(st.sampled_from([n for n in range(1, inside + 1) if inside % n == 0]))
    expert = draw(st.sampled_from([n for n in range(1, inside + 1) if inside // expert_tensor % n == 0]))
    tokens = draw(st.permutations(["tp", "cp", "ep", "dp"]))
    order = draw(st.sampled_from([[*tokens, "pp"], ["pp", *tokens]]))
    grid = RankGrid(
        inside * pipeline,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        replicate=replicate,
        shard=draw(st.sampled_from([shard, -1])),
        expert=expert,
        expert_tensor=expert_tensor,
        order="-".join(order),
    )
    return grid, order


@settings(max_examples=60)
@given(grids(), st.data())
def test_groups_partition_the_world_and_meet_complementary_groups_in_one_rank(made, data):
    grid, _ = made
    factorisation = data.draw(st.sampled_from([DENSE, EXPERT, EXPERT_PARTS]))
    axes = data.draw(st.lists(st.sampled_from(factorisation), min_size=1, unique=True))
    others = [axis for axis in factorisation if axis not in axes]
    groups = grid.groups("-".join(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        assert group == sorted(group)
        assert len(group) == grid.size("-".join(axes))
        for index, rank in enumerate(group):
            assert grid.group_of("-".join(axes), rank) == group
            assert grid.position("-".join(axes), rank) == index
    assert groups == sorted(groups)  # by first rank
    if others:
        for group, other in product(groups, grid.groups("-".join(others))):
            assert len({*group} & {*other}) == 1


@settings(max_examples=60)
@given(grids(), st.sampled_from([DENSE, EXPERT, EXPERT_PARTS]), st.data())
def test_a_rank_is_the_sum_of_its_coordinates_times_strides(made, factorisation, data):
    grid, order = made
    rank = data.draw(st.integers(0, grid.world_size - 1))
    tokens = {"etp": "tp", "edp": "dp", **dict.fromkeys(DENSE[2:4] + EXPERT_PARTS[2:4], "dp")}
    total, stride = 0, 1
    for axis in sorted(factorisation, key=lambda axis: order.index(tokens.get(axis, axis))):
        total += grid.coordinates(rank)[axis] * stride
        stride *= grid.size(axis)
    assert total == rank
    assert stride == grid.world_size


def test_axes_may_be_asked_for_in_any_sequence():
    grid = RankGrid(24, tensor=2, context=3, replicate=2)
    for axes in permutations(["tp", "cp", "dp"]):
        assert grid.groups("-".join(axes)) == [list(range(24))]
    assert grid.groups("dp") == grid.groups("dp_replicate-dp_shard") == grid.groups("dp_shard-dp_replicate")


def test_axes_of_size_1_may_be_left_out_of_the_order():
    grid = RankGrid(4, tensor=2, order="dp-tp")
    assert grid.groups("tp") == [[0, 2], [1, 3]]
    assert grid.groups("cp") == grid.groups("pp") == grid.groups("ep") == [[0], [1], [2], [3]]


def test_a_group_is_found_in_a_world_of_131072_ranks_without_walking_it():
    def find() -> None:
        grid = RankGrid(131_072, tensor=8, context=4, pipeline=16, replicate=4, expert=64, expert_tensor=1)
        assert len(grid.group_of("tp-pp", 100_000)) == 128
        assert grid.group_of("tp", 131_071) == list(range(131_064, 131_072))
        assert grid.coordinates(131_071)["pp"] == 15

    cost = effort(find)
    assert cost.lines < 2000  # 562
    assert cost.peak_bytes < 50_000  # measured: 12 thousand; a list of the world's ranks takes 5 million


@pytest.mark.parametrize(
    ("world_size", "sizes", "message"),
    [
        (0, {}, r"sizes must be positive integers.*got world_size=0;"),
        (4, {"tensor": 0}, r"got tensor=0; use 1 for an unused axis"),
        (4, {"pipeline": -2, "context": 1.0, "replicate": True}, r"got context=1.0, pipeline=-2, replicate=True;"),
        (4, {"tensor": "2"}, r"got tensor='2';"),
        (4, {"expert_tensor": 0}, r"got expert_tensor=0;"),
        (4, {"expert": None}, r"got expert=None"),
        (4, {"shard": 0}, r"shard may be -1.*got shard=0"),
        (4, {"shard": -2}, r"got shard=-2"),
        (
            7,
            {"tensor": 2},
            r"tensor \(2\) x context \(1\).* = 2 must divide world_size \(7\); use sizes.*multiple of 2",
        ),
        (8, {"tensor": 2, "shard": 3}, r"= 6 must equal world_size \(8\); use shard=4, or -1"),
        (8, {"tensor": 2, "shard": 8}, r"x shard \(8\) = 16 must equal world_size \(8\)"),
        (8, {"expert": 3}, r"expert_tensor \(1\) x expert \(3\) x pipeline \(1\) = 3 must divide world_size \(8\)"),
        (8, {"order": "tp-xp-dp"}, r"order must consist of tp, cp, ep, dp, pp.*got 'xp' in 'tp-xp-dp'"),
        (8, {"order": ""}, r"got '' in ''"),
        (8, {"order": "tp-dp-tp"}, r"each axis once; got 'tp' repeated"),
        (8, {"tensor": 2, "order": "cp-dp-pp"}, r"'cp-dp-pp' without tp \(tp has size 2\); add it"),
        (8, {"order": "tp-pp"}, r"without dp \(dp_shard has size 8\)"),
        (8, {"expert": 2, "order": "tp-dp"}, r"without ep \(ep has size 2\)"),
        (8, {"expert_tensor": 2, "order": "dp"}, r"without tp \(etp has size 2\)"),
        (16, {"tensor": 2, "pipeline": 2, "expert": 4, "order": "tp-ep-pp-dp"}, r"stages.*same ranks.*put pp last"),
    ],
)
def test_wrong_sizes_and_orders_are_refused(world_size, sizes, message):
    with pytest.raises(TopologyError, match=message):
        RankGrid(world_size, **sizes)


@pytest.mark.parametrize("axes", ["", "xp", "tp-", "tp-ep", "dp-edp", "TP", "tp cp"])
def test_axes_of_no_factorisation_are_refused(axes):
    with pytest.raises(TopologyError, match=rf"axes must be .* names from one factorization.*got '{axes}'"):
        RankGrid(8, tensor=2).groups(axes)


@pytest.mark.parametrize("rank", [-1, 8])
def test_ranks_outside_of_the_world_are_refused(rank):
    for ask in (RankGrid(8).coordinates, lambda rank: RankGrid(8).group_of("tp", rank)):
        with pytest.raises(TopologyError, match=rf"must be in \[0, 8\); got {rank}"):
            ask(rank)


def test_it_needs_no_torch():
    code = "import sys, megalith.topology.rank_grid; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_shows_the_sizes_that_matter():
    assert repr(RankGrid(8, tensor=2)) == "RankGrid(world_size=8, tp=2, dp_shard=4, etp=2, edp_shard=4)"
    assert repr(RankGrid(1)) == "RankGrid(world_size=1)"


def test_levels_of_a_group_differ_in_one_digit_of_mixed_radix():
    # 16 ranks, tp 2, cp 8 with levels (4, 2): rank 13 is tp 1, and number 6 = 2 + 4 * 1 along cp
    grid = RankGrid(16, tensor=2, context=8)
    assert grid.hierarchical_groups_of("cp", [4, 2], rank=13) == [[9, 11, 13, 15], [5, 13]]
    assert grid.hierarchical_groups_of("cp", [2, 2, 2], rank=13) == [[13, 15], [9, 13], [5, 13]]
    assert grid.hierarchical_groups_of("cp", [8], rank=13) == [grid.group_of("cp", 13)]
    assert grid.hierarchical_groups_of("cp", [1, 8], rank=13) == [[13], grid.group_of("cp", 13)]


@settings(max_examples=40)
@given(grids(), st.data())
def test_levels_partition_the_world_and_from_level_to_level_reach_the_whole_group(made, data):
    grid, _ = made
    axes = data.draw(st.sampled_from(["cp", "dp", "dp-cp", "tp-dp", "edp", "ep"]))
    sizes, left = [], grid.size(axes)
    while left > 1:
        sizes.append(data.draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= sizes[-1]
    every = [grid.hierarchical_groups_of(axes, sizes, rank) for rank in range(grid.world_size)]
    for level, size in enumerate(sizes):
        groups = {tuple(groups[level]) for groups in every}
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    rank = data.draw(st.integers(0, grid.world_size - 1))
    reached = {rank}
    for level in range(len(sizes)):
        reached = {other for each in reached for other in every[each][level]}
    assert sorted(reached) == grid.group_of(axes, rank)


@pytest.mark.parametrize("sizes", [[2, 2], [3], [0, 8], [-2, -4], [2, 4.0], [True, 8], []])
def test_levels_that_do_not_make_up_the_group_are_refused(sizes):
    with pytest.raises(TopologyError, match=r"positive integers whose product is 8, the size of cp; got \["):
        RankGrid(16, context=8).hierarchical_groups_of("cp", sizes, rank=0)


def test_axes_are_known_by_any_sequence_of_their_names():
    grid = RankGrid(8, tensor=2)
    assert grid.single_axes("cp-dp") == grid.single_axes("dp-cp") == {"cp", "dp_shard", "dp_replicate"}
    assert grid.single_axes("etp-ep") == {"etp", "ep"}
