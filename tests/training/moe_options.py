"""Options of mixtures of experts, for tests/training/test_moe_layouts.py."""

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "experts in every layer": {"model": {"moe": {"num_experts": 4}}},
    "experts in every other layer, shared ones with a gate": {
        "model": {
            "moe": {
                "num_experts": 4,
                "top_k": 1,
                "ffn_hidden_size": 24,
                "layers": [False, True],
                "shared_ffn_hidden_size": 16,
                "shared_expert_gate": True,
                "router": {"score_function": "sigmoid"},
            }
        }
    },
    "experts of latents, with biases": {
        "model": {"moe": {"num_experts": 4, "latent_size": 16}, "mlp_bias": True, "activation": "squared_relu"}
    },
    "an even load by losses, and jitter": {
        "model": {
            "moe": {
                "num_experts": 4,
                "router": {"sequence_balance": 0.3, "z_loss": 0.1, "jitter": 0.1, "scaling_factor": 1.5},
            }
        }
    },
    "groups and a bias that evens loads": {
        "model": {
            "moe": {
                "num_experts": 8,
                "router": {
                    "score_function": "sigmoid",
                    "expert_bias_update_rate": 0.05,
                    "num_groups": 4,
                    "group_topk": 2,
                    "group_score_topk": 2,
                },
            }
        }
    },
    "activations of experts and shared experts computed again": {
        "model": {"moe": {"num_experts": 4, "shared_ffn_hidden_size": 16, "router": {"sequence_balance": 0.3}}},
        "train": {"recompute": "selective", "recompute_modules": ["moe_act", "shared_experts"]},
    },
    "the mixture computed again": {
        "model": {"moe": {"num_experts": 4, "router": {"sequence_balance": 0.3, "jitter": 0.1}}},
        "train": {"recompute": "selective", "recompute_modules": ["moe"]},
    },
}
