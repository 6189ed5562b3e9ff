"""Options of ``initialize_model_parallel`` other than axes; only the accessors for users' scripts read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalith.errors import TopologyError
from megalith.topology.rank_grid import RankGrid

__all__ = ["RanksOfPipeline", "ScriptOptions", "first_and_last_rank", "first_rank"]

# the ranks of a pipeline, in stage order -> the subset that holds something
RanksOfPipeline = Callable[[list[int]], Sequence[int]]


def first_and_last_rank(pp_ranks: list[int]) -> list[int]:
    """Returns the ranks with the embedding table: the first stage's, and the last stage's, whose head is tied to it."""
    return sorted({pp_ranks[0], pp_ranks[-1]})


def first_rank(pp_ranks: list[int]) -> list[int]:
    """Returns the rank with the learned position embeddings."""
    return pp_ranks[:1]


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """Arguments of ``initialize_model_parallel`` that do not concern the axes.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks per stage; None: no virtual stages.
        hierarchical_context_parallel_sizes: sizes of the levels of the context-parallel groups.
        get_embedding_ranks, get_position_embedding_ranks: which ranks of a pipeline share the embedding table, and
            which the position embeddings.
    """

    virtual_pipeline_model_parallel_size: int | None = None
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    get_embedding_ranks: RanksOfPipeline = first_and_last_rank
    get_position_embedding_ranks: RanksOfPipeline = first_rank

    def check(self, grid: RankGrid) -> None:
        """Raises TopologyError for options that do not fit ``grid``."""
        virtual, stages = self.virtual_pipeline_model_parallel_size, grid.size("pp")
        if virtual is not None and (type(virtual) is not int or virtual < 1 or stages == 1):
            raise TopologyError(
                "virtual_pipeline_model_parallel_size must be a positive integer, with pipeline_model_parallel_size "
                f"above 1; got {virtual!r} with {stages}; use None for one model chunk per stage"
            )
        if (sizes := self.hierarchical_context_parallel_sizes) is not None:
            grid.hierarchical_groups_of("cp", sizes, rank=0)

    def checked_vp_stage(self, vp_stage: int | None) -> int:
        """Returns ``vp_stage``. Raises TopologyError unless it is one of the model chunks of a stage."""
        parts = self.virtual_pipeline_model_parallel_size or 1
        if vp_stage is None or not 0 <= vp_stage < parts:
            raise TopologyError(f"vp_stage must be in [0, {parts}), the model chunks of a stage; got {vp_stage}")
        return vp_stage

    def embedding_ranks(self, pp_ranks: list[int]) -> list[int]:
        """Returns ``get_embedding_ranks`` of a pipeline. Raises TopologyError unless these are ranks of it."""
        return _some_of(pp_ranks, self.get_embedding_ranks(list(pp_ranks)), "get_embedding_ranks")

    def position_embedding_ranks(self, pp_ranks: list[int]) -> list[int]:
        """Returns ``get_position_embedding_ranks`` of a pipeline; raises as above."""
        return _some_of(pp_ranks, self.get_position_embedding_ranks(list(pp_ranks)), "get_position_embedding_ranks")


def _some_of(pp_ranks: list[int], chosen: Sequence[int], name: str) -> list[int]:
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(pp_ranks):
        raise TopologyError(f"{name} must return one or more distinct ranks of {pp_ranks}; got {list(chosen)}")
    return list(chosen)
