"""When Python collects garbage: hardly ever while a program starts, as usual while it trains.

Importing torch and what a run needs creates 400,000 objects that live as long as the program. With Python's own
threshold they are searched for garbage a thousand times meanwhile, a fifth of the time that the imports take.
"""

import gc

__all__ = ["collect_as_usual", "collect_rarely"]

_USUALLY = gc.get_threshold()
_RARELY = 1_000_000  # objects created since the last collection and not yet freed


def collect_rarely() -> None:
    """From here on this process collects garbage only once a million objects have been created and not freed."""
    gc.set_threshold(_RARELY)


def collect_as_usual() -> None:
    """Ends ``collect_rarely``, and excludes all objects that exist now from later collections."""
    if gc.get_threshold()[0] == _RARELY:
        gc.freeze()
        gc.set_threshold(*_USUALLY)
