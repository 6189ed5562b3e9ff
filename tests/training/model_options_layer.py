"""Options of layers, the residual stream, embedding and head, for tests/training/test_model_options.py."""

from typing import Any

from tests.tiny_run import GPT2

PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
DROPS = {"hidden_dropout": 0.1}
LAYER_NORM = {"normalization": "LayerNorm"}
# initial weights large enough for clamps and caps to have an effect
WIDE = {"init_method_std": 0.3}
OTHER = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}
GEMMA = {
    "activation": "geglu_tanh",
    "tie_word_embeddings": True,
    "residual": {"norm_placement": "sandwich", "zero_centered_norm": True},
    "multipliers": {"embedding": 5.0, "logit_softcap": 2.0},
}
ALL_FACTORS = {"embedding": 3.0, "residual": 0.4, "logits": 2.0, "logit_softcap": 1.5}


def model(**settings: Any) -> dict[str, Any]:
    return {"model": settings}


def selective(*names: str) -> dict[str, Any]:
    return {"train": {"recompute": "selective", "recompute_modules": [*names]}}


OPTIONS: dict[str, dict[str, Any]] = {
    "norms after sums": model(residual={"norm_placement": "post"}),
    "norms after sums, gpt2 with dropout": model(**OTHER, residual={"norm_placement": "post"}),
    "norms after sums, norms computed again": {
        **model(**LAYER_NORM, **DROPS, residual={"norm_placement": "post"}),
        **selective("layernorm", "mlp_act"),
    },
    "norms around": model(**LAYER_NORM, residual={"norm_placement": "sandwich"}),
    "norms around, dropout, all computed again": {
        **model(**DROPS, residual={"norm_placement": "sandwich"}),
        "train": {"recompute": "full"},
    },
    "norms around, norms computed again": {
        **model(residual={"norm_placement": "sandwich"}),
        **selective("layernorm", "mlp"),
    },
    "zero-centred LayerNorm": model(**LAYER_NORM, residual={"zero_centered_norm": True}),
    "zero-centred RMSNorm": model(residual={"zero_centered_norm": True}),
    "residual stream in float32": model(residual={"fp32": True}),
    "another dropout of the embedding": model(**DROPS, residual={"embedding_dropout": 0.3}),
    "dropout of the embedding alone": model(residual={"embedding_dropout": 0.3}),
    "geglu": model(activation="geglu"),
    "geglu by tanh": model(activation="geglu_tanh"),
    "clamped quick geglu": model(activation="quick_geglu", glu={"clamp": 0.5, "offset": 1.0}, mlp_bias=True, **WIDE),
    "clamped swiglu, activation computed again": {
        **model(activation="swiglu", glu={"clamp": 0.5}, **WIDE),
        **selective("mlp_act"),
    },
    "relu": model(activation="relu"),
    "squared relu": model(activation="squared_relu"),
    "biases of the mlp alone": model(mlp_bias=True),
    "biases of attention alone": model(add_bias_linear=True, mlp_bias=False),
    "factors and softcap": model(multipliers=ALL_FACTORS, **WIDE),
    "factors and softcap, fused loss, tied": {
        **model(multipliers=ALL_FACTORS, tie_word_embeddings=True, **WIDE),
        "train": {"fused_linear_cross_entropy": True},
    },
    "muP, heads that grow": model(mup={"base_hidden_size": 8, "base_kv_channels": 2}, **WIDE),
    "muP, tied, fused loss, multi-token prediction": {
        **model(mup={"base_hidden_size": 8}, mtp={}, tie_word_embeddings=True, **WIDE),
        "train": {"fused_linear_cross_entropy": True},
    },
    "all that Gemma 2 asks of layers, packed": {**model(**GEMMA, **WIDE), "data": PACKED},
}
