"""Wording of messages that depends on numbers."""

__all__ = ["counted"]


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Returns ``count`` with its noun: ``1 file``, ``1,234 files``; ``plural`` defaults to ``singular`` plus s."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
