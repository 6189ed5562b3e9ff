"""Options of multi-token prediction, for tests/training/test_model_options.py."""

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "one module": {"model": {"mtp": {"num_modules": 1, "loss_weight": 0.3}}},
    "two modules, tied": {"model": {"mtp": {"num_modules": 2, "loss_weight": 0.3}, "tie_word_embeddings": True}},
    "one module, after layers that end in a norm": {
        "model": {"mtp": {"num_modules": 1}, "residual": {"norm_placement": "post"}, "normalization": "LayerNorm"}
    },
    "two modules, residual in float32, windows, factors": {
        "model": {
            "mtp": {"num_modules": 2},
            "residual": {"norm_placement": "sandwich", "fp32": True},
            "attention": {"window": 5, "window_layers": [False, False, True]},
            "multipliers": {"embedding": 3.0, "logits": 0.5, "logit_softcap": 10.0},
        }
    },
}
