"""The pages in docs/: their text and their Python blocks."""

import re
from pathlib import Path

__all__ = ["ROOT", "page", "python_blocks"]

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """The text of docs/``name``."""
    return (ROOT / "docs" / name).read_text("utf-8")


def python_blocks(name: str) -> list[str]:
    """The Python blocks of docs/``name``, in order."""
    return re.findall(r"^```python\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)
