"""Counts what torch.compile builds in a test."""

from collections.abc import Iterator
from contextlib import contextmanager

from megalith.torch_compat.compiler import watch_compiler

__all__ = ["builds"]


@contextmanager
def builds(num: int) -> Iterator[None]:
    """Asserts that the block makes torch.compile build ``num`` times."""
    started: list[None] = []
    with watch_compiler(lambda: started.append(None), lambda: None):
        yield
    assert len(started) == num, f"built {len(started)} times, not {num}"
