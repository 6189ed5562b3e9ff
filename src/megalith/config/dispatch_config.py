"""How tokens travel to the ranks of their experts."""

from typing import ClassVar, Literal

from pydantic import Field

from megalith.config.settings_group import SettingsGroup

__all__ = ["DispatchConfig"]


class DispatchConfig(SettingsGroup):
    """How tokens travel to the ranks of their experts and back."""

    dotted_name: ClassVar[str] = "parallel.dispatch"

    method: Literal["all_to_all", "all_gather", "flex", "symmetric"] = Field(
        default="all_to_all",
        description="each row to the rank of its expert; all tokens to all ranks; by DeepEP (experimental: deep_ep); "
        "or through torch's symmetric memory (experimental: symmetric_memory)",
    )
    max_rows: float | None = Field(
        default=None,
        gt=0,
        description="[ratio] of the rows that a rank's experts compute at a time to those of even loads, at most; the "
        "rest is computed after them, so that uneven loads take time and not memory; null: all at once",
        examples=[2.0],
    )
