"""Megatron's accessors, for users' scripts: each reads the current parallel state.

Nothing inside this package calls them: groups are passed to constructors as a ``ProcessGroupCollection``. A group is
created by its members on first use; a group of a single rank is None.
"""

from torch.distributed import ProcessGroup

from megalith.errors import TopologyError
from megalith.topology.current_state import (
    current_parallel_state,
    current_vp_stage,
    destroy_model_parallel,
    initialize_model_parallel,
    model_parallel_is_initialized,
    use,
)
from megalith.topology.rank_groups import ParallelState

__all__ = [
    "ParallelState",
    "current_parallel_state",
    "destroy_model_parallel",
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_hierarchical_context_parallel_groups",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "get_model_parallel_group",
    "get_model_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "initialize_model_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "model_parallel_is_initialized",
    "use",
]


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("tp")


def get_tensor_model_parallel_rank() -> int:
    return current_parallel_state().rank("tp")


def get_tensor_model_parallel_world_size() -> int:
    return current_parallel_state().size("tp")


def get_pipeline_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("pp")


def get_pipeline_model_parallel_rank() -> int:
    return current_parallel_state().rank("pp")


def get_pipeline_model_parallel_world_size() -> int:
    return current_parallel_state().size("pp")


def get_context_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("cp")


def get_context_parallel_rank() -> int:
    return current_parallel_state().rank("cp")


def get_context_parallel_world_size() -> int:
    return current_parallel_state().size("cp")


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup | None:
    return current_parallel_state().group(_data_axes(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return current_parallel_state().rank(_data_axes(with_context_parallel, partial_data_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return current_parallel_state().size(_data_axes(with_context_parallel, partial_data_parallel))


def get_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("tp-pp")


def get_tensor_and_context_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("tp-cp")


def get_tensor_and_context_parallel_rank() -> int:
    return current_parallel_state().rank("tp-cp")


def get_tensor_and_context_parallel_world_size() -> int:
    return current_parallel_state().size("tp-cp")


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup | None:
    return current_parallel_state().group("tp-dp-cp" if with_context_parallel else "tp-dp")


def get_expert_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("ep")


def get_expert_model_parallel_rank() -> int:
    return current_parallel_state().rank("ep")


def get_expert_model_parallel_world_size() -> int:
    return current_parallel_state().size("ep")


def get_expert_tensor_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("etp")


def get_expert_tensor_parallel_rank() -> int:
    return current_parallel_state().rank("etp")


def get_expert_tensor_parallel_world_size() -> int:
    return current_parallel_state().size("etp")


def get_expert_tensor_and_model_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("etp-ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    return current_parallel_state().rank("etp-ep")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    return current_parallel_state().size("etp-ep")


def get_expert_tensor_model_pipeline_parallel_group() -> ProcessGroup | None:
    return current_parallel_state().group("etp-ep-pp")


def get_expert_data_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup | None:
    return current_parallel_state().group("edp_shard" if partial_expert_data_parallel else "edp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    return current_parallel_state().rank("edp_shard" if partial_expert_data_parallel else "edp")


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    return current_parallel_state().size("edp_shard" if partial_expert_data_parallel else "edp")


def get_context_parallel_global_ranks() -> list[int]:
    return current_parallel_state().ranks("cp")


def get_hierarchical_context_parallel_groups() -> list[ProcessGroup | None]:
    """One group per entry of ``hierarchical_context_parallel_sizes``. Raises TopologyError if that is not set."""
    state = current_parallel_state()
    if (sizes := state.script.hierarchical_context_parallel_sizes) is None:
        raise TopologyError(
            "context parallelism is not hierarchical; call "
            "initialize_model_parallel(hierarchical_context_parallel_sizes=...)"
        )
    return state.hierarchical_groups("cp", sizes)


def get_intra_distributed_optimizer_instance_group() -> ProcessGroup | None:
    """All ranks of this instance of the distributed optimizer."""
    return current_parallel_state().group("tp-cp-dp_shard-pp")


def get_inter_distributed_optimizer_instance_group() -> ProcessGroup | None:
    """The ranks that hold the same shards as this one, one per instance, for dense and expert weights alike."""
    return current_parallel_state().group("dp_replicate")


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup | None:
    """The ranks that agree on the scale of an FP8 tensor."""
    axes = "tp" if tp_only_amax_red else "tp-dp"
    return current_parallel_state().group(f"{axes}-cp" if with_context_parallel else axes)


def get_embedding_group() -> ProcessGroup | None:
    """Raises TopologyError on a rank outside the group; check ``is_rank_in_embedding_group`` first."""
    return current_parallel_state().embedding_group()


def get_position_embedding_group() -> ProcessGroup | None:
    """Raises TopologyError on a rank outside the group; check ``is_rank_in_position_embedding_group`` first."""
    return current_parallel_state().position_embedding_group()


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank shares the embedding table; without ``ignore_virtual``, whether this model chunk does.

    On the first rank that is its first chunk, on the last rank its last chunk.
    """
    state = current_parallel_state()
    ranks, rank = state.embedding_ranks, state.global_rank
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(False, vp_stage)
    return rank != ranks[-1] or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    state = current_parallel_state()
    return state.global_rank in state.position_embedding_ranks


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage and, without ``ignore_virtual``, the model chunk is the stage's first.

    ``vp_stage``: the chunk, if stages hold several; None: that of ``use``. Raises TopologyError if neither is given.
    """
    virtual = 0 if ignore_virtual else _virtual_rank(vp_stage)
    return get_pipeline_model_parallel_rank() == 0 and virtual == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage and, without ``ignore_virtual``, the model chunk is the stage's last; as above."""
    last = (get_virtual_pipeline_model_parallel_world_size() or 1) - 1
    virtual = last if ignore_virtual else _virtual_rank(vp_stage)
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1 and virtual == last


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The model chunk that ``use(state, vp_stage)`` made current; None outside of it."""
    return current_vp_stage()


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """The number of model chunks per stage; None without virtual pipeline stages."""
    return current_parallel_state().script.virtual_pipeline_model_parallel_size


def get_pipeline_model_parallel_first_rank() -> int:
    return current_parallel_state().ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return current_parallel_state().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The rank of the next stage; wraps around to the first."""
    return _rank_of_stage(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """The rank of the previous stage; wraps around to the last."""
    return _rank_of_stage(-1)


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this rank's group, the source of broadcasts."""
    return current_parallel_state().ranks("tp")[0]


def get_model_parallel_src_rank() -> int:
    return current_parallel_state().ranks("tp-pp")[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return current_parallel_state().ranks(_data_axes(with_context_parallel))[0]


def _data_axes(with_context_parallel: bool, partial: bool = False) -> str:
    if not partial:
        return "dp-cp" if with_context_parallel else "dp"
    if not with_context_parallel:
        raise TopologyError("an instance of the distributed optimizer also spans cp; pass with_context_parallel=True")
    return "dp_shard-cp"


def _rank_of_stage(step: int) -> int:
    state = current_parallel_state()
    ranks = state.ranks("pp")
    return ranks[(state.rank("pp") + step) % len(ranks)]


def _virtual_rank(vp_stage: int | None) -> int:
    """Returns the model chunk in question, 0 if the stage holds only one."""
    script = current_parallel_state().script
    vp_stage = current_vp_stage() if vp_stage is None else vp_stage
    if vp_stage is None and script.virtual_pipeline_model_parallel_size is None:
        return 0
    return script.checked_vp_stage(vp_stage)
