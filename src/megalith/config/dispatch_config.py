"""How tokens are sent to the ranks of their experts."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["DispatchConfig"]


class DispatchConfig(SettingsGroup):
    """How tokens are sent to the ranks of their experts and back."""

    dotted_name: ClassVar[str] = "parallel.dispatch"

    method: Literal["all_to_all", "all_gather", "flex", "symmetric"] = Field(
        default="all_to_all",
        description="all_to_all sends each row to the rank of its expert, all_gather all tokens to all ranks; flex "
        "uses DeepEP (experimental: deep_ep), symmetric torch's symmetric memory (experimental: symmetric_memory)",
    )
    max_rows: float | None = Field(
        default=None,
        gt=0,
        description="[ratio] of the rows that a rank's experts compute at a time to those of a balanced load, at most; "
        "the rest is computed after them, so that imbalance costs time instead of memory; null: all at once",
        examples=[2.0],
    )
