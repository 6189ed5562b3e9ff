"""The names of the paths that an operation may have; ``backend`` says what each is."""

from typing import Literal

__all__ = ["Backend"]

Backend = Literal["triton", "compile", "aten", "blocked", "reference"]
