"""Wording of messages that depends on numbers."""

__all__ = ["counted", "range_of"]


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Returns ``count`` with its noun: ``1 file``, ``1,234 files``; ``plural`` defaults to ``singular`` plus s."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def range_of(least: int, most: int, singular: str) -> str:
    """Returns a range of counts with its noun: ``2 files``, ``1 to 3 files``."""
    return counted(least, singular) if least == most else f"{least:,} to {counted(most, singular)}"
