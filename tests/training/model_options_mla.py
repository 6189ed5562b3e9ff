"""Options of latent attention, for tests/training/test_model_options.py."""

from typing import Any

from tests.training.model_options_rope import YARN

PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


def latent(query_latent: int | None = None, **model: Any) -> dict[str, Any]:
    """Multi-latent attention, with initial weights large enough for scores to differ."""
    mla = {**SIZES, "q_lora_rank": query_latent}
    return {"model": {"num_query_groups": None, "init_method_std": 0.2, "mla": mla, **model}}


OPTIONS: dict[str, dict[str, Any]] = {
    "latent keys and values": latent(),
    "latent queries too, yarn, packed": {
        **latent(
            8, rope={"interleaved": True, "base": 100.0, "scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}
        ),
        "data": PACKED,
    },
    "latents, dropout, a window, biases": latent(
        8,
        attention_dropout=0.1,
        normalization="LayerNorm",
        attention={"window": 5, "qkv_bias": True, "output_bias": True, "logit_softcap": 2.0},
    ),
    "latents, attention computed again": {
        **latent(8, attention_dropout=0.1),
        "train": {"recompute": "selective", "recompute_modules": ["self_attn", "mlp_act"]},
    },
    "latents, norms and scores computed again": {
        **latent(8),
        "train": {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm"]},
    },
}
