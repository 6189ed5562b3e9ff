"""How the work is distributed over ranks."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from megalith.config.dispatch_config import DispatchConfig
from megalith.config.layout import Layout
from megalith.config.settings_group import LARGEST_SIZE, Follows, SettingsGroup

__all__ = ["ModelParallelConfig"]


def _positive_or_rest(degree: int) -> int:
    if degree == 0 or degree < -1:
        raise ValueError("must be at least 1, or -1 for the remaining ranks")
    if degree > LARGEST_SIZE:
        raise ValueError(f"must be at most {LARGEST_SIZE}")
    return degree


class ModelParallelConfig(SettingsGroup):
    """The layout: tensor x context x pipeline x replicate x shard ranks; experts are distributed over some of them."""

    dotted_name: ClassVar[str] = "parallel"

    tensor: int = Field(
        default=1, ge=1, le=LARGEST_SIZE, description="[ranks] that share each weight matrix (tensor parallelism)"
    )
    sequence: bool = Field(
        default=False, description="norms and dropout split the sequence over the tensor-parallel ranks"
    )
    context: int = Field(
        default=1, ge=1, le=LARGEST_SIZE, description="[ranks] that share each sequence (context parallelism)"
    )
    context_method: Literal["ring", "all_gather", "all_to_all", "two_level"] = Field(
        default="ring",
        description="how context-parallel ranks exchange keys and values: ring passes them from rank to rank, "
        "all_gather gathers them at once, all_to_all trades sequence for heads (Ulysses), and two_level does so among "
        "context_inner neighbours, with a ring over those groups",
    )
    context_inner: int | None = Field(
        default=None, ge=2, le=LARGEST_SIZE, description="[ranks] neighbours that trade sequence for heads in two_level"
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=LARGEST_SIZE,
        description="[ranks] over which the experts are distributed (expert parallelism)",
    )
    expert_tensor: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[ranks] that share each weight matrix of an expert; null: parallel.tensor",
    )
    dispatch: DispatchConfig = Field(
        default_factory=DispatchConfig, description="how tokens are sent to the ranks of their experts"
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=LARGEST_SIZE,
        description="[ranks] over which the layers are distributed (pipeline parallelism)",
    )
    virtual: int = Field(
        default=1, ge=1, le=LARGEST_SIZE, description="[stages] on each pipeline rank, far apart in the model"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v"] = Field(
        default_factory=Follows(lambda parallel: "1f1b" if parallel["virtual"] == 1 else "interleaved"),
        description="the order in which the stages process a step's micro-batches",
    )
    stage_layers: tuple[Annotated[int, Field(ge=1, le=LARGEST_SIZE)], ...] | None = Field(
        default=None, strict=False, description="[layers] of each stage; null: balanced by their cost"
    )
    replicate: int = Field(
        default=1,
        ge=1,
        le=LARGEST_SIZE,
        description="[ranks] copies of the weights (data parallelism without sharding)",
    )
    shard: Annotated[int, AfterValidator(_positive_or_rest)] = Field(
        default=-1, description="[ranks] over which FSDP shards the weights; -1: all remaining ranks"
    )

    def layout(self, world_size: int) -> Layout:
        """Returns the layout of ``world_size`` ranks. Raises TopologyError if the degrees do not multiply to it."""
        return Layout.resolve(
            world_size,
            tensor=self.tensor,
            context=self.context,
            pipeline=self.pipeline,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            replicate=self.replicate,
            shard=self.shard,
        )
