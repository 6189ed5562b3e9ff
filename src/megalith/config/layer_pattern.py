"""Which layers of a model have a property: booleans that repeat over the layers, beginning with layer 0.

``[true, true, true, true, true, false]`` is Gemma 3's: five layers with a window, then one without.
"""

from typing import Annotated

from pydantic import Field

__all__ = ["LayerPattern", "holds", "shortest_pattern"]

# at most one value for each layer of the deepest model
LayerPattern = Annotated[tuple[bool, ...], Field(min_length=1, max_length=10_000, strict=False)]


def holds(pattern: tuple[bool, ...], layer_index: int) -> bool:
    """Whether the layer with this global index, from 0, has what ``pattern`` says."""
    return pattern[layer_index % len(pattern)]


def shortest_pattern(layers: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """The shortest pattern that repeats to ``layers``, possibly truncated at the end; None if all are True."""
    if all(layers):
        return None
    length = next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n])
    return layers[:length]
