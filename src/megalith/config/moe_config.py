"""Settings of a mixture of experts."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.layer_pattern import LayerPattern, holds
from megalith.config.router_config import RouterConfig
from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["CapacityConfig", "MoEConfig"]


class CapacityConfig(SettingsGroup):
    """A limit on the tokens per expert, beyond which tokens are dropped: they keep only their residual."""

    dotted_name: ClassVar[str] = "model.moe.capacity"

    factor: float = Field(
        gt=0,
        description="[ratio] of an expert's capacity to T K / E, rounded up, of the T tokens that a rank has at a time",
        examples=[1.25],
    )
    drop: Literal["probability", "position"] = Field(
        default="probability", description="drop the tokens with the lowest weights, or the last ones"
    )
    pad: bool = Field(
        default=False, description="pad every expert to its capacity, so that no shape depends on the data"
    )


class MoEConfig(SettingsGroup):
    """A mixture of experts in place of the MLP: a router sends each token to ``top_k`` of ``num_experts`` MLPs."""

    dotted_name: ClassVar[str] = "model.moe"

    num_experts: int = Field(ge=1, le=LARGEST_SIZE, description="[experts] in each layer that has them", examples=[8])
    top_k: int = Field(default=2, ge=1, le=LARGEST_SIZE, description="[experts] that each token is sent to")
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[features] inner width of an expert; null: model.ffn_hidden_size",
    )
    layers: LayerPattern | None = Field(
        default=None,
        description="which layers have experts, repeated from layer 0 on; the others have an MLP; null: all layers",
        examples=[[False, True]],
    )
    shared_ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[features] total inner width of the shared experts, an MLP that every token is sent to; null: no "
        "shared experts",
    )
    shared_expert_gate: bool = Field(
        default=False, description="multiply the output of the shared experts by sigmoid(gate x) (Qwen2-MoE)"
    )
    latent_size: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_SIZE,
        description="[features] to which tokens are projected before dispatch, and projected back after it; null: no "
        "projection",
    )
    router: RouterConfig = Field(default_factory=RouterConfig, description="how experts are selected")
    capacity: CapacityConfig | None = Field(default=None, description="limit on the tokens per expert")

    def has_experts(self, layer_index: int) -> bool:
        """Whether the layer with this global index has experts."""
        return self.layers is None or holds(self.layers, layer_index)
