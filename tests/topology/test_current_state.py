"""current_state: initialized, queried and destroyed on real ranks as in Megatron's scripts, and every refusal."""

import pytest
import torch
import torch.distributed as dist

from megalith.errors import TopologyError
from megalith.topology import parallel_state
from megalith.topology.group_options import GroupOptions, NCCLOptions
from megalith.topology.parallel_state import (
    ParallelState,
    current_parallel_state,
    destroy_model_parallel,
    initialize_model_parallel,
    model_parallel_is_initialized,
    use,
)
from megalith.topology.rank_grid import RankGrid
from tests.rank_pool import ranks

AXES = ("tensor_model", "data", "pipeline_model", "context", "expert_model", "expert_data")
GRID = {"tensor_model": "tp", "data": "dp", "pipeline_model": "pp", "context": "cp", "expert_model": "ep"}
GRID |= {"expert_data": "edp"}


def known_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def sums_over_every_axis(sizes: dict[str, int], grid_sizes: dict[str, int]) -> tuple[int, int]:
    """Compares each group's all-reduce of ranks with the grid; returns how many groups were requested and created."""
    before, asked = known_groups(), 0
    state = initialize_model_parallel(**sizes)
    assert known_groups() == before, "groups are made when they are asked for"
    grid = RankGrid(dist.get_world_size(), **grid_sizes)
    for axis in AXES:
        together = torch.tensor(dist.get_rank())
        group = getattr(parallel_state, f"get_{axis}_parallel_group")()
        members = grid.group_of(GRID[axis], dist.get_rank())
        assert (group is None) == (len(members) == 1)
        if group is not None:
            asked += 1
            dist.all_reduce(together, group=group)
            assert dist.get_process_group_ranks(group) == members
        assert together.item() == sum(members)
        assert getattr(parallel_state, f"get_{axis}_parallel_world_size")() == len(members)
        assert getattr(parallel_state, f"get_{axis}_parallel_rank")() == members.index(dist.get_rank())
    made = known_groups() - before
    assert current_parallel_state() is state
    destroy_model_parallel()
    assert not model_parallel_is_initialized()
    assert known_groups() == before
    destroy_model_parallel()  # harmless
    return asked, made


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "grid_sizes", "counts"),
    [
        (
            4,
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            {"tensor": 2, "pipeline": 2},
            (2, 2),  # tp and pp; Megatron-Core makes 21 groups for these four ranks
        ),
        (4, {"context_parallel_size": 2, "expert_model_parallel_size": 2}, {"context": 2, "expert": 2}, (4, 2)),
        (4, {"expert_model_parallel_size": 2, "order": "tp-ep-dp-pp"}, {"expert": 2}, (3, 3)),
        (
            8,
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_tensor_parallel_size": 1}
            | {"expert_model_parallel_size": 4},
            {"tensor": 2, "context": 2, "expert_tensor": 1, "expert": 4},
            (5, 4),  # edp spans the same ranks as dp
        ),
    ],
    ids=str,
)
def test_sums_of_ranks_are_those_of_the_groups_and_destroying_leaves_none(num_ranks, sizes, grid_sizes, counts):
    assert ranks(num_ranks, sums_over_every_axis, sizes, grid_sizes) == [counts] * num_ranks


def initialize_again_and_again() -> list[int]:
    """Two layouts one after the other, and a third nested in the second, each with a group that is used."""
    sums = []

    def add() -> None:
        together = torch.tensor(dist.get_rank())
        dist.all_reduce(together, group=parallel_state.get_tensor_model_parallel_group())
        sums.append(together.item())

    for size in (2, 4, 2):
        initialize_model_parallel(size)
        add()
        if size == 4:
            with use(ParallelState(RankGrid(4, tensor=2))) as inner:
                add()
            inner.destroy()
            add()
        destroy_model_parallel()
    return sums


def test_another_layout_can_follow_and_another_can_live_inside():
    assert ranks(4, initialize_again_and_again) == [[1, 6, 1, 6, 1]] * 2 + [[5, 6, 5, 6, 5]] * 2


def optimizer_instances() -> tuple[list[int], list[int], tuple[str, ...], bool]:
    state = initialize_model_parallel(num_distributed_optimizer_instances=2)
    groups = [
        parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        parallel_state.get_inter_distributed_optimizer_instance_group(),
    ]
    found = [dist.get_process_group_ranks(group) for group in groups]
    mesh = state.collection().data_mesh("dense")
    same = [mesh[name].get_group() for name in ("dp_shard", "dp_replicate")] == groups
    destroy_model_parallel()
    return *found, mesh.mesh_dim_names, same


def test_fsdp_shards_within_an_instance_of_the_optimizer_and_replicates_over_them():
    names = ("dp_replicate", "dp_shard")
    wanted = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert ranks(4, optimizer_instances) == [(*each, names, True) for each in wanted]


def a_part_of_the_world() -> tuple[list[int], int] | str:
    part = {"tensor_model_parallel_size": 2, "rank_offset": 1, "local_world_size": 2}
    if dist.get_rank() not in (1, 2):
        with pytest.raises(TopologyError) as refusal:
            initialize_model_parallel(**part)
        assert not model_parallel_is_initialized()
        return str(refusal.value)
    initialize_model_parallel(**part)
    together = torch.tensor(dist.get_rank())
    dist.all_reduce(together, group=parallel_state.get_tensor_model_parallel_group())
    found = together.item(), parallel_state.get_tensor_model_parallel_src_rank()
    destroy_model_parallel()
    return found


def test_a_job_may_lay_out_some_ranks_of_a_world():
    outside = "rank must be in [1, 3); got "
    assert ranks(4, a_part_of_the_world) == [f"{outside}0", (3, 1), (3, 1), f"{outside}3"]


def device_types() -> list[str]:
    """The device of the mesh after init_process_group() without a backend, without and with GPUs."""
    found = []
    for has_gpus in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend", lambda: "undefined")
            patch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
            patch.setattr(torch.cuda, "is_available", lambda has_gpus=has_gpus: has_gpus)
            found.append(initialize_model_parallel().device_type)
            GroupOptions(nccl=NCCLOptions(max_ctas=4))  # accepted
        destroy_model_parallel()
    return found


def test_a_default_group_without_an_explicit_backend_is_that_of_the_gpus_where_there_are_some():
    assert ranks(1, device_types) == [["cpu", "cuda"]]


def with_a_timeout() -> tuple[float, float]:
    options = {"pp": GroupOptions(backend="gloo")}
    initialize_model_parallel(1, 2, distributed_timeout_minutes=0.5, group_options=options)
    group = parallel_state.get_pipeline_model_parallel_group()
    assert dist.get_backend(group) == "gloo"
    seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    destroy_model_parallel()
    initialize_model_parallel(1, 2)
    group = parallel_state.get_pipeline_model_parallel_group()
    default = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    destroy_model_parallel()
    return seconds, default


def test_the_timeout_reaches_every_group():
    assert ranks(2, with_a_timeout) == [(30.0, 1800.0)] * 2


# what is wrong on four ranks: a part of the message
REFUSALS = [
    ({"tensor_model_parallel_size": 3}, "= 3 must divide world_size (4)"),
    (
        {"tensor_model_parallel_size": 0},
        "sizes must be positive integers (shard may be -1, which takes the remaining ranks)",
    ),
    ({"pipeline_model_parallel_size": -2}, "got pipeline=-2"),
    ({"context_parallel_size": 0}, "got context=0"),
    ({"expert_model_parallel_size": 0}, "got expert=0"),
    ({"expert_tensor_parallel_size": 0}, "got expert_tensor=0"),
    ({"expert_model_parallel_size": 3}, "x expert (3) x pipeline (1) = 3 must divide world_size (4)"),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size must be a positive integer, with pipeline_model_parallel_size above 1; "
        "got 2 with 1; use None",
    ),
    ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 0}, "got 0 with 2"),
    (
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 3]},
        "hierarchical sizes must be positive integers whose product is 4, the size of cp; got [2, 3]",
    ),
    ({"hierarchical_context_parallel_sizes": [0, 2]}, "product is 1, the size of cp; got [0, 2]"),
    (
        {"num_distributed_optimizer_instances": 3},
        "num_distributed_optimizer_instances (3) must divide the data-parallel sizes of dense weights (4) and of "
        "expert weights (4); use 1, 2, 4",
    ),
    ({"num_distributed_optimizer_instances": 0}, "num_distributed_optimizer_instances (0) must divide"),
    ({"num_distributed_optimizer_instances": 4, "expert_model_parallel_size": 2}, "of expert weights (2); use 1, 2"),
    (
        {"num_distributed_optimizer_instances": 2, "context_parallel_size": 2, "order": "tp-dp-cp-ep-pp"},
        "would not have the same ranks for dense and expert weights; put dp after cp and ep in the order",
    ),
    ({"tensor_model_parallel_size": 2, "order": "cp-dp-pp"}, "without tp (tp has size 2); add it"),
    ({"order": "tp-xp-dp"}, "got 'xp' in 'tp-xp-dp'"),
    (
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "order": "tp-ep-pp-dp"},
        "put pp last in the order",
    ),
    ({"distributed_timeout_minutes": 0}, "timeout must be positive; got 0.0 s"),
    (
        {"get_embedding_ranks": lambda pp_ranks: [sum(pp_ranks) + 1]},
        "get_embedding_ranks must return one or more distinct ranks of",
    ),
    ({"group_options": {"zz": GroupOptions()}}, "got 'zz'"),
    ({"rank_offset": 1, "local_world_size": 4}, "rank_offset (1) must be in [0, 0], so that the 4 ranks of the grid"),
    ({"local_world_size": 0}, "got world_size=0"),
]


def refused() -> list[str]:
    messages = []
    for arguments, _ in REFUSALS:
        with pytest.raises(TopologyError) as refusal:
            initialize_model_parallel(**arguments)
        messages.append(str(refusal.value))
        assert not model_parallel_is_initialized()
    return messages


def test_what_cannot_be_is_refused_on_every_rank_before_any_group():
    for messages in ranks(4, refused):
        for message, (_, part) in zip(messages, REFUSALS, strict=True):
            assert part in message


def initialize_twice() -> str:
    initialize_model_parallel()
    with pytest.raises(TopologyError) as refusal:
        initialize_model_parallel()
    destroy_model_parallel()
    return str(refusal.value)


def test_a_second_initialisation_is_refused():
    assert ranks(1, initialize_twice) == [
        "model parallelism is already initialized; call destroy_model_parallel() first"
    ]


def test_without_torch_distributed_there_is_nothing_to_lay_out():
    with pytest.raises(TopologyError, match=r"torch.distributed is not initialized; call .*init_process_group first"):
        initialize_model_parallel()
    destroy_model_parallel()
