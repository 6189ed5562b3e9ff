"""Reads and writes ``layer_types`` and ``sliding_window`` of config.json: which layers have a window.

transformers masks keys that are ``sliding_window`` or more tokens before the query, so a query sees that many tokens
including its own. ``model.attention.window`` has the same meaning.
"""

from collections.abc import Callable
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.layer_pattern import shortest_pattern
from megalith.models.hf.fields import Fields

__all__ = ["MOST_LAYERS", "read_layer_types", "write_layer_types"]

_WINDOW, _WHOLE = "sliding_attention", "full_attention"
MOST_LAYERS = 10_000  # deeper models are rejected elsewhere


def read_layer_types(fields: Fields, window: int | None, usual: Callable[[int], bool]) -> dict[str, Any]:
    """Returns the settings ``window`` and ``window_layers`` of ``model.attention``.

    Args:
        window: [tokens] the window of ``sliding_attention`` layers; None if the model has no such layers.
        usual: returns whether the layer with a given index has the window, for a config without ``layer_types``.
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
        fields.refuse(
            f"layers of type {_WINDOW} need a window, but config.json does not enable one; set sliding_window, and "
            "use_sliding_window=true if the model has that field"
        )
        return {}
    return {"window": window, "window_layers": shortest_pattern(windowed)}


def write_layer_types(config: TransformerConfig) -> list[str]:
    """Returns the type of every layer of ``config``."""
    attention = config.attention
    return [_WHOLE if attention.window_of(index) is None else _WINDOW for index in range(config.num_layers)]
