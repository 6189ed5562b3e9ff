"""rank_groups: groups over the right ranks, created on first use, and a mesh that FSDP2 and DTensor accept."""

from datetime import timedelta
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from megalith.errors import TopologyError
from megalith.topology.group_options import GroupOptions
from megalith.topology.process_groups_config import Axis, ProcessGroupCollection
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from tests.rank_pool import ranks


def state_of(**sizes: int) -> ParallelState:
    return ParallelState(RankGrid(dist.get_world_size(), **sizes))


def sums_of_ranks(axes: list[str], sizes: dict[str, int]) -> None:
    state = state_of(**sizes)
    for each in axes:
        together = torch.tensor(dist.get_rank())
        group = state.group(each)
        assert (group is None) == (state.size(each) == 1)
        if group is not None:
            dist.all_reduce(together, group=group)
            assert (group.size(), group.rank()) == (state.size(each), state.rank(each))
        assert together.item() == sum(state.grid.group_of(each, dist.get_rank()))


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"replicate": 2}], ids=str
)
def test_an_all_reduce_adds_the_ranks_of_the_group(sizes):
    ranks(4, sums_of_ranks, ["tp", "dp", "pp", "cp", "dp_shard", "tp-dp", "tp-pp", "ep", "edp"], sizes)


def test_an_all_reduce_adds_the_ranks_of_the_group_in_three_dimensions():
    ranks(8, sums_of_ranks, ["tp", "dp", "pp", "tp-dp", "dp-pp"], {"tensor": 2, "pipeline": 2})


def count_groups(sizes: dict[str, int], asked: list[str]) -> int:
    """How many groups are created when each of ``asked`` is requested twice; before that, none."""
    made = []
    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda ranks, **how: made.append(ranks) or new_group(ranks, **how))
        state = state_of(**sizes)
        assert not made
        assert [state.group(axes) for axes in asked] == [state.group(axes) for axes in asked]
    return len(made)


@pytest.mark.parametrize(
    ("sizes", "asked", "count"),
    [
        ({"tensor": 2}, [], 0),
        ({"tensor": 2}, ["tp"], 1),
        ({"tensor": 2}, ["cp", "pp", "dp_replicate"], 0),
        ({"tensor": 2}, ["dp", "dp_shard", "dp-cp"], 1),  # three names for the same ranks
        ({"tensor": 2, "pipeline": 2}, ["tp", "dp", "pp", "tp-pp"], 3),  # Megatron-Core makes 21 for these four ranks
        ({"replicate": 2}, ["dp_shard", "dp_replicate", "dp", "tp-dp-cp"], 3),
    ],
)
def test_groups_are_made_when_first_needed_and_once(sizes, asked, count):
    assert ranks(4, count_groups, sizes, asked) == [count] * 4


def two_states() -> list[int]:
    sums = []
    for state in (states := [state_of(tensor=2), state_of(tensor=4), state_of(tensor=2)]):
        together = torch.tensor(dist.get_rank())
        dist.all_reduce(together, group=state.group("tp"))
        sums.append(together.item())
    assert len({id(state.group("tp")) for state in states}) == 3
    return sums


def test_several_states_live_in_one_process():
    assert ranks(4, two_states) == [[1, 6, 1], [1, 6, 1], [5, 6, 5], [5, 6, 5]]


def mesh_of(sizes: dict[str, int], order: str) -> tuple[tuple[str, ...], list]:
    mesh = ParallelState(RankGrid(dist.get_world_size(), order=order, **sizes)).mesh("dense")
    for name in mesh.mesh_dim_names:
        together = torch.tensor(dist.get_rank())
        dist.all_reduce(together, group=mesh[name].get_group())
        assert together.item() == mesh[name].mesh.sum()
    return mesh.mesh_dim_names, mesh.mesh.tolist()


@pytest.mark.parametrize(
    ("sizes", "order", "meshes"),
    [
        ({"tensor": 2}, "tp-dp", [[[[0, 1], [2, 3]]]] * 4),
        ({"tensor": 2}, "dp-tp", [[[[0, 2], [1, 3]]]] * 4),
        ({"replicate": 2}, "tp-dp", [[[[0], [1]], [[2], [3]]]] * 4),
        ({"tensor": 2, "pipeline": 2}, "tp-dp-pp", [[[[0, 1]]], [[[0, 1]]], [[[2, 3]]], [[[2, 3]]]]),
        ({"tensor": 2, "context": 2}, "tp-cp-dp", [[[[0, 1], [2, 3]]]] * 4),  # weights are the same over cp
    ],
)
def test_the_mesh_is_of_this_stage(sizes, order, meshes):
    got = ranks(4, mesh_of, sizes, order)
    assert got == [(("dp_replicate", "dp_shard", "tp"), mesh) for mesh in meshes]


class Column(nn.Module):
    """x W^T for a W [7, 8] whose 7 rows are split unevenly over tp."""

    def __init__(self, whole: Tensor, pg_collection: ProcessGroupCollection) -> None:
        super().__init__()
        if pg_collection.size("tp") > 1:
            part = whole.chunk(pg_collection.size("tp"))[pg_collection.rank("tp")].clone()
            shape = {"shape": whole.shape, "stride": whole.stride()}
            whole = DTensor.from_local(part, pg_collection.weight_mesh("dense"), [Shard(0)], run_check=False, **shape)
        self.weight = nn.Parameter(whole)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x @ weight.t()


def train_on_the_mesh(sizes: dict[str, int]) -> str:
    """One AdamW step on gradients summed over dp, compared with one process; returns the final placements."""
    torch.manual_seed(0)
    whole, xs = torch.randn(7, 8, dtype=torch.float64), torch.randn(4, 3, 8, dtype=torch.float64)
    alone = Column(whole.clone(), ProcessGroupCollection.single())
    pg_collection = state_of(**sizes).collection()
    model = Column(whole.clone(), pg_collection)
    fully_shard(model, mesh=pg_collection.data_mesh("dense"), shard_placement_fn=lambda parameter: Shard(1))
    model.set_gradient_divide_factor(1.0)
    assert torch.equal(model.weight.full_tensor(), whole)
    for each, mine in ((alone, xs), (model, xs.chunk(pg_collection.size("dp"))[pg_collection.rank("dp")])):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(mine).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.grad.full_tensor(), alone.weight.grad, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(model.weight.full_tensor(), alone.weight.detach(), rtol=1e-13, atol=1e-13)
    return f"{model.weight.device_mesh.mesh_dim_names} {model.weight.placements}"


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "placed"),
    [
        (4, {"tensor": 2}, "('dp_shard', 'tp') (Shard(dim=1), Shard(dim=0))"),
        (
            4,
            {"tensor": 2, "replicate": 2},
            "('dp_replicate', 'dp_shard', 'tp') (Replicate(), Shard(dim=1), Shard(dim=0))",
        ),
        (4, {"tensor": 4}, "('dp_shard', 'tp') (Shard(dim=1), Shard(dim=0))"),
        (4, {"replicate": 2}, "('dp_replicate', 'dp_shard') (Replicate(), Shard(dim=1))"),
        (4, {"replicate": 4}, "('dp_replicate', 'dp_shard') (Replicate(), Shard(dim=1))"),
        (4, {}, "('dp_shard',) (Shard(dim=1),)"),
        (1, {}, "('dp_shard',) (Shard(dim=1),)"),
    ],
    ids=str,
)
def test_fsdp_and_dtensor_share_the_mesh(num_ranks, sizes, placed):
    assert ranks(num_ranks, train_on_the_mesh, sizes) == [placed] * num_ranks


def collected(sizes: dict[str, int]) -> tuple[str, bool, dict[str, tuple[int, int]]]:
    """The repr of a collection, whether it speaks for its tokens, and (size, rank) along each axis."""
    state = state_of(**sizes)
    pg_collection = state.collection()
    assert pg_collection == state.collection()
    assert pg_collection.tp is state.group("tp")
    assert pg_collection.dp_cp is state.group("dp-cp")
    along = {axis: (pg_collection.size(axis), pg_collection.rank(axis)) for axis in get_args(Axis)}
    assert along == {axis: (state.size(name), state.rank(name)) for axis, name in ON_GRID.items()}
    return repr(pg_collection), pg_collection.speaks_for_tokens, along


ON_GRID = {axis: axis.replace("_", "-") for axis in get_args(Axis)}


def test_a_collection_knows_sizes_and_ranks():
    answers = ranks(4, collected, {"tensor": 2})
    assert {shown for shown, _, _ in answers} == {"ProcessGroupCollection(tp=2, dp=2, etp=2, edp=2)"}
    assert [(along["tp"], along["dp"]) for _, _, along in answers] == [
        ((2, rank % 2), (2, rank // 2)) for rank in range(4)
    ]
    (shown, _, along), *_ = ranks(4, collected, {"context": 2, "expert": 2})
    assert shown == "ProcessGroupCollection(cp=2, dp=2, ep=2, edp=2)"
    assert along["dp_cp"] == (4, 0)
    assert {along[axis] for axis in ("tp", "pp", "etp")} == {(1, 0)}


@pytest.mark.parametrize(
    ("sizes", "speakers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"tensor": 2}, [0, 2]),
        ({"pipeline": 2}, [2, 3]),  # the last stage has the loss
        ({"tensor": 2, "pipeline": 2}, [2]),
        ({"context": 2}, [0, 1, 2, 3]),  # each has its own tokens
    ],
    ids=str,
)
def test_of_the_ranks_that_see_the_same_tokens_one_speaks_for_them(sizes, speakers):
    assert [rank for rank, (_, speaks, _) in enumerate(ranks(4, collected, sizes)) if speaks] == speakers


def test_sizes_and_ranks_need_no_torch_distributed():
    state = ParallelState(RankGrid(131_072, tensor=8, pipeline=16), rank=100_001)
    assert (state.size("tp"), state.rank("tp"), state.rank("pp")) == (8, 1, 12)
    with pytest.raises(TopologyError, match=r"groups of rank 100001.*outside torch.distributed; call.*init_process"):
        state.group("tp")


def test_one_process_without_torch_distributed_is_single():
    assert ParallelState(RankGrid(1)).collection() == ProcessGroupCollection.single()


def test_a_grid_of_another_world_is_refused():
    with pytest.raises(TopologyError, match=r"the grid has 4 ranks, but the world size is 1; start 4 processes"):
        ParallelState(RankGrid(4))
    with pytest.raises(TopologyError, match=r"in \[0, 4\); got 4"):
        ParallelState(RankGrid(4), rank=4)


def other_ranks_group() -> str:
    with pytest.raises(TopologyError) as refusal:
        ParallelState(RankGrid(2, tensor=2), rank=1 - dist.get_rank()).group("tp")
    return str(refusal.value)


def test_the_groups_of_another_rank_are_refused():
    assert (
        "the groups of rank 1 can be created only on that rank, but this process is rank 0"
        in ranks(2, other_ranks_group)[0]
    )


def sums_over_levels() -> list[int]:
    sums = []
    for group in state_of(context=4).hierarchical_groups("cp", [2, 2]):
        together = torch.tensor(dist.get_rank())
        dist.all_reduce(together, group=group)
        sums.append(together.item())
    return sums


def test_levels_of_a_group_are_groups():
    # ranks 0 to 3: digit 0 joins 0 with 1 and 2 with 3, digit 1 joins 0 with 2 and 1 with 3
    assert ranks(4, sums_over_levels) == [[1, 2], [1, 4], [5, 2], [5, 4]]


def with_options() -> dict[str, object]:
    long, short = GroupOptions(timeout=timedelta(minutes=7)), GroupOptions(backend="gloo", timeout=timedelta(minutes=3))
    options = {"cp-dp": long, "tp": short, "dp": GroupOptions(), "embd": long}
    state = ParallelState(RankGrid(4, tensor=2, pipeline=2), timeout=timedelta(minutes=5), group_options=options)
    minutes = {}
    for axes in ("tp", "pp", "dp-cp"):
        group = state.group(axes)
        if group is not None:
            made_with = group._get_backend(torch.device("cpu")).options
            minutes[axes] = made_with._timeout.total_seconds() / 60
    minutes["embd"] = state.embedding_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60
    assert state.embedding_group() is not state.group("pp"), "the same ranks, and other options"
    assert state.group("tp") is state.mesh("dense")["tp"].get_group()
    return minutes


def test_a_group_is_made_with_the_options_of_its_axes():
    assert ranks(4, with_options) == [{"tp": 3.0, "pp": 5.0, "embd": 7.0}] * 4


def timeouts_of_the_same_ranks() -> list[float]:
    options = {"dp": GroupOptions(timeout=timedelta(minutes=2)), "cp-dp": GroupOptions(timeout=timedelta(minutes=3))}
    state = ParallelState(RankGrid(2), group_options=options)
    groups = [state.group(axes) for axes in ("dp", "dp-cp", "dp_shard", "dp")]
    assert groups[3] is groups[0]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for group in groups[:2]]


def test_the_same_ranks_with_other_options_are_another_group():
    assert ranks(2, timeouts_of_the_same_ranks) == [[2.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xp": GroupOptions()}, r"axes must be .* names from one factorization.*got 'xp'"),
        ({"dp-cp": GroupOptions(), "cp-dp": GroupOptions()}, r"name each group once; got 'cp-dp' a second time"),
    ],
)
def test_options_of_no_group_or_of_one_twice_are_refused(options, message):
    with pytest.raises(TopologyError, match=message):
        ParallelState(RankGrid(4), rank=0, group_options=options)


def two_jobs() -> tuple[list[int], list[int], int, str]:
    """Ranks 0 and 1 are one job, 2 to 4 the other, each with its own layout and one collective over its dp."""
    first = dist.get_rank() < 2
    grid = RankGrid(2, tensor=2) if first else RankGrid(3, context=3)
    state = ParallelState(grid, rank_offset=0 if first else 2)
    axes = "tp" if first else "cp"
    together = torch.tensor(dist.get_rank())
    dist.all_reduce(together, group=state.group(axes))
    mesh = state.collection().mesh
    return state.ranks(axes), mesh.mesh.flatten().tolist(), together.item(), str(state.rank(axes))


def test_jobs_that_share_a_world_have_groups_of_their_own_ranks():
    one, other = ([0, 1], [0, 1], 1), ([2, 3, 4], [2, 3, 4], 9)
    assert ranks(5, two_jobs) == [(*one, "0"), (*one, "1"), (*other, "0"), (*other, "1"), (*other, "2")]


def offsets_refused() -> list[str]:
    messages = []
    for world, offset in ((1, 2), (1, -1), (3, 0), (1, None), (1, 1 - dist.get_rank())):
        with pytest.raises(TopologyError) as refusal:
            ParallelState(RankGrid(world), rank_offset=offset)
        messages.append(str(refusal.value))
    return messages


def test_a_part_of_the_world_that_is_none_is_refused():
    outside, below, large, unsaid, elsewhere = ranks(2, offsets_refused)[0]
    assert outside == "rank_offset (2) must be in [0, 1], so that the 1 ranks of the grid fit in this world of 2"
    assert "rank_offset (-1) must be in [0, 1]" in below
    assert "the grid has 3 ranks, but the world size is 2; start 3 processes" in large
    assert "the grid has 1 ranks, but the world size is 2" in unsaid
    assert elsewhere == "rank must be in [1, 2); got 0"


def known_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def destroy_and_make_again() -> list[int]:
    """Sums over the ranks of a stage and over pipelines, with the state destroyed in between."""
    before, sums = known_groups(), []
    state = state_of(tensor=2, pipeline=2)
    for _ in range(3):
        for axes in ("tp", "pp"):
            together = torch.tensor(dist.get_rank())
            dist.all_reduce(together, group=state.group(axes))
            sums.append(together.item())
        mesh = state.mesh("dense")
        part = DTensor.from_local(torch.full((1,), float(dist.get_rank())), mesh["tp"], [Shard(0)])
        sums.append(int(part.full_tensor().sum()))
        group = state.group("tp")
        state.destroy()
        assert known_groups() == before
        with pytest.raises(ValueError, match="not registered"):
            dist.get_group_rank(group, dist.get_rank())
    return sums


def test_a_state_that_is_destroyed_leaves_no_group_and_can_be_made_again():
    assert ranks(4, destroy_and_make_again) == [[1, 2, 1] * 3, [1, 4, 1] * 3, [5, 2, 5] * 3, [5, 4, 5] * 3]


def make_groups_that_others_have_not() -> list[int]:
    """The first and last of four stages share a group, the others have none; then all create one over the pipeline."""
    state, sums = state_of(pipeline=4), []
    groups = [state.embedding_group()] if dist.get_rank() in (0, 3) else []
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)  # created by a user's script
    for group in [*groups, state.group("pp")]:
        together = torch.tensor(dist.get_rank())
        dist.all_reduce(together, group=group)
        sums.append(together.item())
    return sums


def test_ranks_that_have_different_numbers_of_groups_still_find_each_other():
    assert ranks(4, make_groups_that_others_have_not) == [[3, 6], [6], [6], [3, 6]]


def destroy_after_the_world() -> None:
    with pytest.MonkeyPatch.context() as patch:
        state = state_of(tensor=2)
        group = state.group("tp")
        dist.barrier(group)  # if a rank destroys a group while another is still connecting, that one fails
        patch.setattr(dist, "is_initialized", lambda: False)
        state.destroy()
    state.destroy()  # knows no group any more, also now that a world is there again
    dist.destroy_process_group(group)  # not destroyed by the state, since it would have ended with the world


def test_groups_that_ended_with_the_world_are_forgotten():
    ranks(2, destroy_after_the_world)
