"""Mistakes in settings of FP8 training."""

from tests.config.mistake import Mistake

__all__ = ["FP8_MISTAKES"]

FP8 = {
    "model.hidden_size": 256,
    "model.num_attention_heads": 4,
    "model.ffn_hidden_size": 512,
    "data.seq_length": 256,
    "precision.fp8.recipe": "blockwise",
    "experimental": ["fp8"],
}
LATENT = {
    "model.num_query_groups": None,
    "model.mla.kv_lora_rank": 64,
    "model.mla.qk_nope_head_dim": 32,
    "model.mla.qk_rope_head_dim": 32,
    "model.mla.v_head_dim": 64,
}
TENSOR = {"parallel.tensor": 2}
T5 = {
    "model.position_embedding_type": "relative",
    "model.t5.num_decoder_layers": 2,
    "model.num_query_groups": None,
}

FP8_MISTAKES = [
    Mistake({**FP8, "experimental": None}, r"fp8.recipe=blockwise is experimental .* use experimental=\[fp8\]"),
    Mistake({"experimental": ["fp8"]}, r"'fp8' has no effect without precision.fp8.recipe=blockwise; use"),
    Mistake({"precision.fp8.wgrad": False}, r"precision.fp8.recipe is missing; use precision.fp8.recipe=blockwise"),
    Mistake(
        {**FP8, "model.ffn_hidden_size": 500},
        r"model.ffn_hidden_size \(500\) must be a multiple of 16 with precision.fp8.recipe=blockwise; "
        r"use model.ffn_hidden_size=512$",
    ),
    Mistake(
        {**FP8, **LATENT, "model.mla.qk_rope_head_dim": 24},
        r"kv_lora_rank \+ model.mla.qk_rope_head_dim \(88\) must be a multiple of 16",
    ),
    Mistake(
        {**FP8, **TENSOR, "model.ffn_hidden_size": 384},
        r"model.ffn_hidden_size \(384\) must be divisible by 128 x 2 with precision.fp8.recipe=blockwise and "
        r"parallel.tensor=2: numbers that share a scale must be on one rank; use model.ffn_hidden_size=512",
        4,
    ),
    Mistake(
        {**FP8, "model.num_query_groups": 2, **TENSOR},
        r"num_query_groups x model.kv_channels \(128\) must be divisible by 128 x 2",
        4,
    ),
    Mistake(
        {**FP8, "model.num_query_groups": 2, "parallel.tensor": 4},
        r"num_query_groups \(2\) must be divisible by parallel.tensor \(4\) with precision.fp8.recipe=blockwise: ranks "
        r"that share a group would each round their part of its gradients; use parallel.tensor=1",
        4,
    ),
    Mistake(
        {**FP8, **LATENT, "model.mla.v_head_dim": 32, "parallel.tensor": 2},
        r"num_attention_heads x model.mla.v_head_dim \(128\) must be divisible by 128 x 2",
        4,
    ),
    Mistake(
        {**FP8, "data.seq_length": 192},
        r"seq_length \(192\) must be a multiple of 128 with precision.fp8.recipe=blockwise: for the gradients of "
        r"weights, 128 tokens of a sequence share a scale; use data.seq_length=256$",
    ),
    Mistake(
        {**FP8, "parallel.context": 2},
        r"seq_length \(256\) must be a multiple of 512 .* of a sequence share a scale in each of its 4 parts",
        4,
    ),
    Mistake(
        {**FP8, **LATENT, "model.mla.qk_nope_head_dim": 64, "model.mla.qk_rope_head_dim": 64}
        | {"data.seq_length": 128, **TENSOR, "parallel.sequence": True},
        r"seq_length \(128\) must be a multiple of 256 .* share a scale in each of its 2 parts",
        4,
    ),
    # a rank has one chunk of 128 tokens, then less
    Mistake(
        {**FP8, **LATENT, "model.mla.qk_nope_head_dim": 64, "model.mla.qk_rope_head_dim": 64}
        | {"data.seq_length": 256, **TENSOR, "parallel.sequence": True, "parallel.context": 2},
        r"seq_length \(256\) must be a multiple of 512 .* share a scale in each of its 4 parts",
        4,
    ),
    Mistake(
        {**FP8, **T5, "data.decoder_seq_length": 64},
        r"decoder_seq_length \(64\) must be a multiple of 128 .* share a scale; use data.decoder_seq_length=128",
    ),
    Mistake(
        {**FP8, **T5}, r"decoder_seq_length \(unset\) must be a multiple of 128 .*; use data.decoder_seq_length=256"
    ),
    Mistake(
        {**FP8, "precision.dtype": "float16"},
        r"precision.fp8.recipe=blockwise cannot be combined with precision.dtype=float16: FP8 saturates, so that the "
        r"loss scale would not see an overflow; use precision.dtype=bfloat16",
    ),
    Mistake(
        {**FP8, "precision.fp8.num_layers_at_start_in_bf16": 3, "precision.fp8.num_layers_at_end_in_bf16": 1},
        r"at_start_in_bf16 \(3\) \+ .*at_end_in_bf16 \(1\) must be below the number of layers \(4\)",
    ),
    Mistake(
        {**FP8, "parallel.pipeline": 2, "parallel.schedule": "zero_bubble"},
        r"precision.fp8.recipe=blockwise cannot be combined with parallel.schedule=zero_bubble: an FP8 linear layer",
        4,
    ),
]
