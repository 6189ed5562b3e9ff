"""Options of multi-token prediction, for tests/training/test_model_options.py."""

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "one module": {"model": {"mtp": {"num_layers": 1, "loss_weight": 0.3}}},
    "two modules, tied": {"model": {"mtp": {"num_layers": 2, "loss_weight": 0.3}, "tie_word_embeddings": True}},
}
