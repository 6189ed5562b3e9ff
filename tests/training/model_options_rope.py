"""Options of rotary embeddings and windows, for tests/training/test_model_options.py."""

from typing import Any

PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0, "beta_slow": 0.5}
EVERY_OTHER = [True, False]


def model(rope: dict[str, Any] | None = None, attention: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    groups = {name: group for name, group in (("rope", rope), ("attention", attention)) if group}
    # heads of eight features, half of which are two pairs; initial weights large enough for scores to differ
    return {"model": {"kv_channels": 8, "init_method_std": 0.2, **groups, **more}}


OPTIONS: dict[str, dict[str, Any]] = {
    "half of the features rotated": model({"percent": 0.5}),
    "neighbouring features rotated": model({"interleaved": True}),
    "no positions in some layers": model({"layers": EVERY_OTHER}),
    "linear scaling": model({"scaling": {"type": "linear", "factor": 4.0}}),
    "llama3 scaling": model(
        {"scaling": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, "base": 100.0}
    ),
    "yarn": model({"scaling": YARN, "base": 100.0}),
    "sections": model({"sections": [2, 1, 1]}),
    "a window": model(attention={"window": 5}),
    "a window, packed, dropout": {**model(attention={"window": 5}, attention_dropout=0.1), "data": PACKED},
    "windows in some layers, of another base": model(
        {"local_base": 100.0, "scaling": {"type": "linear", "factor": 4.0}},
        attention={"window": 3, "window_layers": [False, True]},
    ),
    "windows and positions in layers apart, packed": {
        **model({"layers": EVERY_OTHER, "percent": 0.5}, {"window": 6, "window_layers": [False, True]}),
        "data": PACKED,
    },
}
