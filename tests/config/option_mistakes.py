"""Mistakes in the options of a model, and in recomputation."""

from tests.config.mistake import Mistake

__all__ = ["OPTION_MISTAKES"]

YARN = {
    "model.rope.scaling.type": "yarn",
    "model.rope.scaling.factor": 4.0,
    "model.rope.scaling.original_max_position_embeddings": 4096,
}

LATENT = {"model.mla.kv_lora_rank": 64, "model.num_query_groups": None}

OPTION_MISTAKES = [
    # multi-latent attention
    Mistake(
        LATENT | {"model.num_query_groups": 4},
        r"model.num_query_groups \(4\) must be 12 with model.mla; use model.num_query_groups=null",
    ),
    Mistake(
        LATENT | {"model.kv_channels": 64},
        r"model.kv_channels \(64\) must be 192 with model.mla; use model.kv_channels=null",
    ),
    Mistake(
        LATENT | {"model.preset": "llama-4m", "model.num_query_groups": 1},
        r"model.num_query_groups \(1\) must be 12 with model.mla; use model.num_query_groups=null",
    ),
    Mistake(
        LATENT | {"model.position_embedding_type": "learned_absolute"},
        r"position_embedding_type \(learned_absolute\) must be rope with model.mla; use .*position_embedding_type=null",
    ),
    Mistake(
        LATENT | {"model.mup.base_hidden_size": 32, "model.mup.base_kv_channels": 8},
        r"model.mup.base_kv_channels \(8\) must be null with model.mla; use model.mup.base_kv_channels=null",
    ),
    Mistake(
        {"model.mup.base_hidden_size": 32, "optim.name": "sgd"},
        r"model.mup needs optim.name=adamw, whose learning rates it scales with the width; got sgd; "
        r"use optim.name=adamw",
    ),
    Mistake(
        {"model.mup.base_hidden_size": 32, "model.mup.base_kv_channels": 8, "model.attention.scale": 0.3},
        r"attention.scale \(0.3\) cannot be combined with model.mup.base_kv_channels, .*; use .*scale=null",
    ),
    Mistake(
        LATENT | {"model.rope.percent": 0.5}, r"rope.percent \(0.5\) must be 1.0 with model.mla; use .*percent=null"
    ),
    Mistake(
        LATENT | {"model.attention.softmax": "learnable"},
        r"softmax \(learnable\) must be vanilla with model.mla; use model.attention.softmax=null",
    ),
    Mistake(
        LATENT | {"model.attention.qk_norm": "L2"},
        r"qk_norm \(L2\) must be null with model.mla; use model.attention.qk_norm=null",
    ),
    Mistake(
        LATENT | {"model.attention.output_gate": True},
        r"output_gate \(True\) must be False with model.mla; use model.attention.output_gate=null",
    ),
    Mistake(
        LATENT | {"model.mla.qk_rope_head_dim": 63},
        r"qk_rope_head_dim \(63\), the number of features that rope rotates .*, must be even; use .*head_dim=64",
    ),
    Mistake(
        LATENT | {"model.rope.sections": [1, 2, 3]},
        r"sections .* must add up to 32, .*; they add up to 6; use model.rope.sections=\[8, 12, 12\]",
    ),
    Mistake({"model.mla.q_lora_rank": 64}, r"model.mla.kv_lora_rank is missing; use model.mla.kv_lora_rank=512"),
    Mistake(
        LATENT | {"model.mla.qk_pos_emb_head_dim": 32},
        r"there is no setting model.mla.qk_pos_emb_head_dim; did you mean model.mla.qk_rope_head_dim\? use .*_dim=32",
    ),
    Mistake(
        LATENT | {"model.mla.q_lora_rank": 30, "parallel.shard": 4},
        r"model.mla.q_lora_rank \(30\) must be divisible by the 4 ranks of parallel.shard; use ",
        world_size=4,
    ),
    # recomputation
    Mistake(
        {"train.recompute": "selective", "train.recompute_modules": ["mlp", "core_attention"]},
        r"train.recompute_modules\[1\] must be 'core_attn', .*; got 'core_attention'; "
        r"use train.recompute_modules=\[mlp, core_attn\]",
    ),
    Mistake(
        {"train.recompute": "selective", "train.recompute_modules": []},
        r"train.recompute_modules must have at least 1 entry; .*use train.recompute_modules=\[core_attn\]",
    ),
    Mistake(
        {"train.recompute_modules": ["mlp"]},
        r"train.recompute_modules .* has no effect with train.recompute=none, only",
    ),
    Mistake(
        {"train.recompute": "selective", "train.recompute_modules": ["mlp", "mlp_act", "layernorm"]},
        r"lists mlp_act, which is part of mlp: .*; use train.recompute_modules=\[mlp, layernorm\]",
    ),
    Mistake(
        {"train.recompute": "selective", "train.recompute_modules": ["layernorm", "layernorm"]},
        r"lists layernorm twice: .*; use train.recompute_modules=\[layernorm\]",
    ),
    Mistake(
        {
            "train.recompute": "selective",
            "train.recompute_modules": ["layernorm", "core_attn"],
            "train.compile": True,
            "experimental": ["compile"],
        },
        r"cannot contain layernorm with train.compile=true: .*; use train.recompute_modules=\[core_attn\]",
    ),
    Mistake(
        {
            "train.recompute": "selective",
            "train.recompute_modules": ["mlp_act"],
            "train.compile": True,
            "experimental": ["compile"],
        },
        r"cannot contain mlp_act with train.compile=true: .*; use .*train.recompute=none",
    ),
    # positions and windows
    Mistake(
        {"model.rope.percent": 0.1, "model.kv_channels": 12},
        r"model.rope.percent \(0.1\) of model.kv_channels \(12\) must be an even number of features, at least 2; "
        r"got 1; use model.rope.percent=0.16666666666666666",
    ),
    Mistake(
        {"model.rope.sections": [1, 2, 3]},
        r"model.rope.sections \(1, 2, 3\) must add up to 4, .*; they add up to 6; use model.rope.sections=\[2, 1, 1\]",
    ),
    Mistake({"model.rope.layers": []}, r"model.rope.layers must have at least 1 entry; got \[\]; use"),
    Mistake(
        {"model.rope.layers": [True, 1]}, r"layers\[1\] must be true or false; got 1; use model.rope.layers=\[true\]"
    ),
    Mistake(
        {"model.rope.local_base": 1e4},
        r"local_base \(10000.0\) needs model.attention.window: .*; use .*local_base=null",
    ),
    Mistake({"model.attention.window": 0}, r"window must be at least 1; got 0; use model.attention.window=1"),
    Mistake({"model.sliding_window": 9}, r"did you mean model.attention.window\? use model.attention.window=9"),
    Mistake(
        {"model.attention.window_layers": [True]}, r"window_layers .* has no effect without model.attention.window"
    ),
    Mistake(
        {"model.rope.scaling.type": "llama3", "model.rope.scaling.factor": 8.0},
        r"scaling.original_max_position_embeddings is missing: .*; use .*original_max_position_embeddings=8192",
    ),
    Mistake(
        {"model.rope.scaling.type": "linear", "model.rope.scaling.factor": 8.0, "model.rope.scaling.beta_fast": 3.0},
        r"beta_fast \(3.0\) has no effect with model.rope.scaling.type=linear, only .*; use .*beta_fast=null",
    ),
    Mistake(
        {**YARN, "model.rope.scaling.beta_fast": 0.5},
        r"beta_fast \(0.5\) must be above model.rope.scaling.beta_slow \(1.0\); use model.rope.scaling.beta_fast=null",
    ),
    Mistake(
        {**YARN, "model.rope.scaling.mscale": 0.5},
        r"set .*attention_factor alone, or mscale together with mscale_all_dim; got .*; use .*mscale=null",
    ),
]
