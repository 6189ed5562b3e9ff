"""Imports that Python's garbage collector does not interrupt.

Importing torch and what a run needs creates 400,000 objects that live as long as the program. They would be searched
for garbage a thousand times meanwhile, a quarter of the time that the imports take.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """Collects no garbage inside the block, and excludes all objects that exist at its end from later collections.

    For programs only: a library must leave both to the program that imports it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
