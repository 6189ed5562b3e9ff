"""Names of the paths that an operation may have; ``core.dispatch`` describes each."""

from typing import Literal

__all__ = ["Backend"]

Backend = Literal["triton", "compile", "aten", "blocked", "reference"]
