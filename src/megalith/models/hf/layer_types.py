"""The fields ``layer_types`` and ``sliding_window`` of config.json: which layers have a window, both ways.

transformers masks keys that are ``sliding_window`` or more tokens before the query, so that a query sees that many
tokens with its own, which is what ``model.attention.window`` says.
"""

from collections.abc import Callable
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.layer_pattern import shortest_pattern
from megalith.models.hf.fields import Fields

__all__ = ["MOST_LAYERS", "read_layer_types", "write_layer_types"]

_WINDOW, _WHOLE = "sliding_attention", "full_attention"
MOST_LAYERS = 10_000  # a deeper model is refused anyway, whatever its layers are


def read_layer_types(fields: Fields, window: int | None, usual: Callable[[int], bool]) -> dict[str, Any]:
    """The settings ``window`` and ``window_layers`` of ``model.attention``.

    Args:
        window: [tokens] that layers of type ``sliding_attention`` see; None if the model has no such layers.
        usual: whether the layer with an index has the window, for a config without ``layer_types``.
    """
    kinds, num_layers = fields.optional("layer_types", list), fields["num_hidden_layers"]
    if kinds is None:
        windowed = tuple(usual(index) for index in range(min(num_layers, MOST_LAYERS)))
    elif len(kinds) != num_layers or any(kind not in (_WINDOW, _WHOLE) for kind in kinds):
        fields.refuse(f"layer_types must be {_WINDOW} or {_WHOLE} for each of {num_layers} layers; got {kinds!r:.80}")
        return {}
    else:
        windowed = tuple(kind == _WINDOW for kind in kinds)
    if not any(windowed):
        return {}
    if window is None:
        fields.refuse(f"layers of type {_WINDOW} need a window, and config.json has none switched on; give one")
        return {}
    return {"window": window, "window_layers": shortest_pattern(windowed)}


def write_layer_types(config: TransformerConfig) -> list[str]:
    """The type of every layer of ``config``."""
    attention = config.attention
    return [_WHOLE if attention.window_of(index) is None else _WINDOW for index in range(config.num_layers)]
