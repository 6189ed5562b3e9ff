"""parallel_state: Megatron's accessors, against Megatron-Core's numbers for the same 16 ranks."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import megalith
from megalith.errors import TopologyError
from megalith.topology import current_state, parallel_state
from megalith.topology.parallel_state import ParallelState, current_parallel_state, use
from megalith.topology.rank_grid import RankGrid
from megalith.topology.script_options import ScriptOptions

# Megatron-Core's enumerations for world 16, tp 2, cp 2, dp 2, pp 2 and etp 1, ep 4, edp 2: those of rank 13, which is
# (tp 1, cp 0, dp 1, pp 1) and (ep 1, edp 1, pp 1)
DENSE_13 = {
    "tensor_model_parallel": [12, 13],
    "context_parallel": [13, 15],
    "data_parallel": [9, 13],
    "pipeline_model_parallel": [5, 13],
    "model_parallel": [4, 5, 12, 13],
    "tensor_and_context_parallel": [12, 13, 14, 15],
    "tensor_and_data_parallel": [8, 9, 12, 13],
}
EXPERT_13 = {
    "expert_model_parallel": [12, 13, 14, 15],
    "expert_tensor_parallel": [13],
    "expert_tensor_and_model_parallel": [12, 13, 14, 15],
    "expert_tensor_model_pipeline_parallel": [4, 5, 6, 7, 12, 13, 14, 15],
    "expert_data_parallel": [9, 13],
}


class RecordedState(ParallelState):
    """Returns a group's ranks in place of the group, so that no process is needed."""

    def _made(self, ranks, axes):
        return ranks


def state_of(rank: int, script: ScriptOptions | None = None, **sizes: int) -> ParallelState:
    sizes = sizes or {"tensor": 2, "context": 2, "pipeline": 2, "expert": 4, "expert_tensor": 1}
    return RecordedState(RankGrid(16, **sizes), rank=rank, script=script)


@pytest.mark.parametrize(("name", "members"), [*DENSE_13.items(), *EXPERT_13.items()])
def test_a_rank_is_where_megatron_puts_it(name, members):
    with use(state_of(13)):
        group = getattr(parallel_state, f"get_{name}_group")()
        assert group == (None if members == [13] else members)
        if of_rank := getattr(parallel_state, f"get_{name}_rank", None):
            assert of_rank() == members.index(13)
            assert getattr(parallel_state, f"get_{name}_world_size")() == len(members)


def test_context_parallelism_joins_groups_on_request():
    with use(state_of(13)):
        assert parallel_state.get_data_parallel_group(with_context_parallel=True) == [9, 11, 13, 15]
        assert parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True) == [*range(8, 16)]
        assert parallel_state.get_context_parallel_global_ranks() == [13, 15]


@pytest.mark.parametrize(
    ("arguments", "members"),
    [
        ({"tp_only_amax_red": True}, [12, 13]),
        ({"tp_only_amax_red": True, "with_context_parallel": True}, [12, 13, 14, 15]),
        ({}, [8, 9, 12, 13]),
        ({"with_context_parallel": True}, [*range(8, 16)]),
    ],
)
def test_the_scale_of_a_float8_tensor_is_agreed_upon_along_tp_and_more(arguments, members):
    with use(state_of(13)):
        assert parallel_state.get_amax_reduction_group(**arguments) == members


def test_instances_of_the_optimizer_are_contiguous_parts_of_dp_and_cp():
    # 16 ranks, tp 2, cp 2, dp 4, 2 instances: dp-cp of rank 13 is 1, 3, ..., 15, and its instance the second half
    with use(state_of(13, tensor=2, context=2, replicate=2)):
        partial = {"with_context_parallel": True, "partial_data_parallel": True}
        assert parallel_state.get_data_parallel_group(**partial) == [9, 11, 13, 15]
        assert parallel_state.get_data_parallel_rank(**partial) == 2
        assert parallel_state.get_data_parallel_world_size(**partial) == 4
        assert parallel_state.get_inter_distributed_optimizer_instance_group() == [5, 13]
        assert parallel_state.get_intra_distributed_optimizer_instance_group() == [*range(8, 16)]
        assert parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True) == [9, 11, 13, 15]
        with pytest.raises(TopologyError, match="also spans cp; pass with_context_parallel=True"):
            parallel_state.get_data_parallel_group(partial_data_parallel=True)


def test_levels_of_context_parallelism_are_those_of_the_script():
    script = ScriptOptions(hierarchical_context_parallel_sizes=(4, 2))
    with use(state_of(13, script, tensor=2, context=8)):
        assert parallel_state.get_hierarchical_context_parallel_groups() == [[9, 11, 13, 15], [5, 13]]
    with (
        use(state_of(13)),
        pytest.raises(TopologyError, match=r"not hierarchical; call .*hierarchical_context_parallel_siz"),
    ):
        parallel_state.get_hierarchical_context_parallel_groups()


FOUR_STAGES = {"tensor": 2, "pipeline": 4}  # rank 13 is stage 3 of the stages on ranks 1, 5, 9, 13


def answers(ask: Callable[[], object], script: ScriptOptions | None = None) -> list[object]:
    """The answer on each stage of the pipeline of rank 1."""
    found = []
    for rank in (1, 5, 9, 13):
        with use(state_of(rank, script, **FOUR_STAGES)):
            found.append(ask())
    return found


def test_stages_know_their_neighbours_and_where_to_broadcast_from():
    assert answers(parallel_state.get_pipeline_model_parallel_next_rank) == [5, 9, 13, 1]
    assert answers(parallel_state.get_pipeline_model_parallel_prev_rank) == [13, 1, 5, 9]
    assert answers(parallel_state.get_pipeline_model_parallel_first_rank) == [1] * 4
    assert answers(parallel_state.get_pipeline_model_parallel_last_rank) == [13] * 4
    assert answers(parallel_state.is_pipeline_first_stage) == [True, False, False, False]
    assert answers(parallel_state.is_pipeline_last_stage) == [False, False, False, True]
    with use(state_of(13)):
        assert parallel_state.get_tensor_model_parallel_src_rank() == 12
        assert parallel_state.get_model_parallel_src_rank() == 4
        assert parallel_state.get_data_parallel_src_rank() == 9
        assert parallel_state.get_data_parallel_src_rank(with_context_parallel=True) == 9


def test_the_embedding_is_on_the_first_and_last_stage_and_positions_on_the_first():
    assert answers(parallel_state.is_rank_in_embedding_group) == [True, False, False, True]
    assert answers(parallel_state.is_rank_in_position_embedding_group) == [True, False, False, False]
    for rank in (1, 13):
        with use(state_of(rank, **FOUR_STAGES)):
            assert parallel_state.get_embedding_group() == [1, 13]
    with use(state_of(1, **FOUR_STAGES)):
        assert parallel_state.get_position_embedding_group() is None
    with use(state_of(5, **FOUR_STAGES)):
        with pytest.raises(TopologyError, match=r"rank 5 is not in the group embd of ranks \[1, 13\]; request it"):
            parallel_state.get_embedding_group()
        with pytest.raises(TopologyError, match=r"rank 5 is not in the group pos_embd of ranks \[1\]; request it"):
            parallel_state.get_position_embedding_group()
    with use(state_of(3, tensor=2)):  # one stage
        assert parallel_state.is_rank_in_embedding_group()
        assert parallel_state.get_embedding_group() is None


def encoder_and_decoder(pp_ranks: list[int]) -> list[int]:
    return [pp_ranks[0], pp_ranks[2], pp_ranks[-1]]


def test_a_script_says_which_stages_hold_the_embedding():
    script = ScriptOptions(get_embedding_ranks=encoder_and_decoder, get_position_embedding_ranks=lambda pp: pp[0:3:2])
    assert answers(parallel_state.is_rank_in_embedding_group, script) == [True, False, True, True]
    assert answers(parallel_state.is_rank_in_position_embedding_group, script) == [True, False, True, False]
    with use(state_of(9, script, **FOUR_STAGES)):
        assert parallel_state.get_embedding_group() == [1, 9, 13]
        assert parallel_state.get_position_embedding_group() == [1, 9]


@pytest.mark.parametrize("chosen", [[], [0], [1, 1], [1, 14]])
def test_ranks_outside_of_the_pipeline_hold_no_embedding(chosen):
    for name in ("get_embedding_ranks", "get_position_embedding_ranks"):
        script = ScriptOptions(**{name: lambda pp_ranks: chosen})
        with pytest.raises(TopologyError, match=rf"{name} must return one or more distinct ranks of \[1, 5, 9, 13\]; "):
            state_of(1, script, **FOUR_STAGES)


def test_of_several_parts_of_the_model_the_first_and_last_hold_the_embedding():
    script = ScriptOptions(virtual_pipeline_model_parallel_size=3, get_embedding_ranks=encoder_and_decoder)

    def first(vp_stage: int) -> list[object]:
        return answers(lambda: parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage), script)

    def last(vp_stage: int) -> list[object]:
        return answers(lambda: parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage), script)

    def embeds(vp_stage: int) -> list[object]:
        return answers(lambda: parallel_state.is_rank_in_embedding_group(False, vp_stage), script)

    none = [False] * 4
    assert [first(part) for part in range(3)] == [[True, False, False, False], none, none]
    assert [last(part) for part in range(3)] == [none, none, [False, False, False, True]]
    middle = [False, False, True, False]
    assert [embeds(part) for part in range(3)] == [[True, False, True, False], middle, [False, False, True, True]]
    assert answers(parallel_state.get_virtual_pipeline_model_parallel_world_size, script) == [3] * 4


def test_the_part_of_the_model_is_that_of_use_or_given():
    script = ScriptOptions(virtual_pipeline_model_parallel_size=2)
    state = state_of(1, script, **FOUR_STAGES)
    with use(state, vp_stage=1):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
        assert not parallel_state.is_pipeline_first_stage(ignore_virtual=False)
        assert parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=0)
        with use(state, vp_stage=0):
            assert parallel_state.is_pipeline_first_stage(ignore_virtual=False)
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
    with use(state):
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None
        assert parallel_state.is_pipeline_first_stage()
        with pytest.raises(TopologyError, match=r"vp_stage must be in \[0, 2\), .*; got None"):
            parallel_state.is_pipeline_first_stage(ignore_virtual=False)
        with pytest.raises(TopologyError, match=r"got 2"):
            parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=2)
    with pytest.raises(TopologyError, match=r"vp_stage must be in \[0, 2\), .*; got -1"), use(state, vp_stage=-1):
        pass
    with use(state_of(1, **FOUR_STAGES)):  # one part, without a number
        assert parallel_state.is_pipeline_first_stage(ignore_virtual=False)
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None


def test_accessors_speak_of_the_innermost_state():
    outer = ParallelState(RankGrid(16, tensor=2, context=2, pipeline=2), rank=13)
    with use(outer) as given, use(ParallelState(RankGrid(1))):
        assert given is outer
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        assert parallel_state.get_tensor_model_parallel_group() is None
        assert parallel_state.get_pipeline_model_parallel_group() is None
        assert parallel_state.get_context_parallel_group() is None
        assert parallel_state.get_data_parallel_group(with_context_parallel=True) is None
    with use(outer):
        assert current_parallel_state() is outer
        places = {
            "tensor_model": (1, 2),
            "context": (0, 2),
            "data": (1, 2),
            "pipeline_model": (1, 2),
        }
        for axis, place in places.items():
            rank = getattr(parallel_state, f"get_{axis}_parallel_rank")()
            assert (rank, getattr(parallel_state, f"get_{axis}_parallel_world_size")()) == place
        assert parallel_state.get_data_parallel_rank(with_context_parallel=True) == 2
        assert parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 4


def test_outside_of_use_no_state_is_current():
    with pytest.raises(RuntimeError, match="inside"), use(ParallelState(RankGrid(1))):
        raise RuntimeError("inside")
    with pytest.raises(TopologyError, match=r"no current parallel state; call initialize.*with use"):
        parallel_state.get_data_parallel_rank()
    assert not parallel_state.model_parallel_is_initialized()


def test_nothing_in_the_package_asks_the_accessors():
    accessor = re.compile(
        r"\bget_\w+_parallel_(group|rank|world_size)\b|\bcurrent_parallel_state\b|\b(initialize|destroy)_model_parallel\("
    )
    own = {Path(parallel_state.__file__), Path(current_state.__file__)}
    package = Path(megalith.__file__).parent
    callers = [path for path in package.rglob("*.py") if path not in own and accessor.search(path.read_text())]
    assert all(path.is_relative_to(package) for path in own)
    assert callers == []
