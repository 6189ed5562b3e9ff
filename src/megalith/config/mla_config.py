"""Sizes of multi-head latent attention."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from megalith.config.settings_group import LARGEST_SIZE, SettingsGroup

__all__ = ["MLAConfig", "head_parts"]


class MLAConfig(SettingsGroup):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from one latent per token."""

    dotted_name: ClassVar[str] = "model.mla"

    kv_lora_rank: int = Field(
        ge=1, le=LARGEST_SIZE, description="[features] size of the latent of keys and values", examples=[512]
    )
    q_lora_rank: int | None = Field(
        default=None, ge=1, le=LARGEST_SIZE, description="[features] size of the latent of queries; null: no latent"
    )
    qk_nope_head_dim: int = Field(
        default=128, ge=1, le=LARGEST_SIZE, description="[features] of a query or key head that are not rotated"
    )
    qk_rope_head_dim: int = Field(
        default=64,
        ge=1,
        le=LARGEST_SIZE,
        description="[features] of a query or key head that are rotated; all key heads share them",
    )
    v_head_dim: int = Field(default=128, ge=1, le=LARGEST_SIZE, description="[features] of a value head")
    norm_epsilon: float | None = Field(
        default=None, gt=0, description="[variance] added in the norms of the latents; null: model.layernorm_epsilon"
    )


def head_parts(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the sizes of the two parts of a query or key head, from unchecked ``fields`` of an ``MLAConfig``."""
    nope, rope = (
        fields.get(name, MLAConfig.model_fields[name].default) for name in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    return nope, rope
