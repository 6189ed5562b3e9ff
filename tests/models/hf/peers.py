"""Tiny random transformers models, and what makes them and ours the same function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
)
from transformers.core_model_loading import revert_weight_conversion

from megalith.models import hf
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import Family

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
# a window of 5, which 16 tokens exceed; without a padding token, whose embedding transformers would not train
GEMMA = LLAMA | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20, "pad_token_id": None}
GPT2 = {
    "vocab_size": 61,
    "n_positions": 24,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# rope_parameters of transformers, with original lengths short enough for 16 tokens to be affected
ROPE_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, all of its fields": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    # as in DeepSeek-V3 and V2, except for the length
    "yarn of DeepSeek-V3": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn of DeepSeek-V2": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
    },
}


def llama(**fields: Any) -> PreTrainedModel:
    return randomized(LlamaForCausalLM(LlamaConfig(**LLAMA | fields)))


def scaled(name: str, base: float = 100.0) -> dict[str, Any]:
    """Fields of a model with the rotary scaling ``name``."""
    rope = ROPE_SCALINGS[name]
    longest = rope["factor"] * rope.get("original_max_position_embeddings", 64)
    return {"rope_parameters": {**rope, "rope_theta": base}, "max_position_embeddings": int(longest)}


def mistral(**fields: Any) -> PreTrainedModel:
    return randomized(MistralForCausalLM(MistralConfig(**LLAMA | {"sliding_window": 5} | fields)))


def gpt2(**fields: Any) -> PreTrainedModel:
    return randomized(GPT2LMHeadModel(GPT2Config(**GPT2 | fields)))


def roformer(**fields: Any) -> PreTrainedModel:
    given = {name: size for name, size in LLAMA.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
    return randomized(RoFormerForMaskedLM(RoFormerConfig(**given | fields, architectures=["RoFormerForMaskedLM"])))


def qwen2(**fields: Any) -> PreTrainedModel:
    return randomized(Qwen2ForCausalLM(Qwen2Config(**LLAMA | fields)))


def qwen3(**fields: Any) -> PreTrainedModel:
    return randomized(Qwen3ForCausalLM(Qwen3Config(**LLAMA | {"head_dim": 16} | fields)))


def gemma2(**fields: Any) -> PreTrainedModel:
    # only their eager attention has softcaps
    config = Gemma2Config(**GEMMA | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7} | fields)
    return randomized(Gemma2ForCausalLM._from_config(config, attn_implementation="eager"))


def gemma3(**fields: Any) -> PreTrainedModel:
    return randomized(Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 3} | fields)))


def mixtral(**fields: Any) -> PreTrainedModel:
    return with_experts(MixtralForCausalLM, MixtralConfig(**LLAMA | {"num_local_experts": 4} | fields))


def qwen2_moe(**fields: Any) -> PreTrainedModel:
    experts = {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
    return with_experts(Qwen2MoeForCausalLM, Qwen2MoeConfig(**LLAMA | experts | {"num_experts_per_tok": 2} | fields))


def qwen3_moe(**fields: Any) -> PreTrainedModel:
    experts = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16}
    return with_experts(Qwen3MoeForCausalLM, Qwen3MoeConfig(**LLAMA | experts | fields))


def gpt_oss(**fields: Any) -> PreTrainedModel:
    # a window and positions short enough for 16 tokens, and a clamp that some features reach
    shown = {"head_dim": 12, "sliding_window": 5, "swiglu_limit": 0.3, **scaled("yarn")}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return with_experts(GptOssForCausalLM, GptOssConfig(**LLAMA | shown | experts | fields))


def with_experts(model: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    # torch's grouped matmul, their default, does not accept odd sizes
    return randomized(model._from_config(config, experts_implementation="eager"))


LATENTS = {
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-3,
}
DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}


def deepseek_v3(**fields: Any) -> PreTrainedModel:
    experts = {**DEEPSEEK_EXPERTS, "n_group": 4, "topk_group": 2}
    return with_experts(DeepseekV3ForCausalLM, DeepseekV3Config(**LLAMA | LATENTS | experts | fields))


def deepseek_v2(**fields: Any) -> PreTrainedModel:
    return with_experts(DeepseekV2ForCausalLM, DeepseekV2Config(**LLAMA | LATENTS | DEEPSEEK_EXPERTS | fields))


class Peer(NamedTuple):
    """One of our families, and how transformers builds models of it."""

    family: Family
    build: Callable[..., PreTrainedModel]
    config: type[PretrainedConfig]
    model: type[PreTrainedModel]


PEERS = {
    "mistral": Peer(hf.MISTRAL, mistral, MistralConfig, MistralForCausalLM),
    "qwen2": Peer(hf.QWEN2, qwen2, Qwen2Config, Qwen2ForCausalLM),
    "qwen3": Peer(hf.QWEN3, qwen3, Qwen3Config, Qwen3ForCausalLM),
    "mixtral": Peer(hf.MIXTRAL, mixtral, MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": Peer(hf.QWEN2_MOE, qwen2_moe, Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": Peer(hf.QWEN3_MOE, qwen3_moe, Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gpt_oss": Peer(hf.GPT_OSS, gpt_oss, GptOssConfig, GptOssForCausalLM),
    "gemma2": Peer(hf.GEMMA2, gemma2, Gemma2Config, Gemma2ForCausalLM),
    "deepseek_v2": Peer(hf.DEEPSEEK_V2, deepseek_v2, DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": Peer(hf.DEEPSEEK_V3, deepseek_v3, DeepseekV3Config, DeepseekV3ForCausalLM),
    "gemma3": Peer(hf.GEMMA3, gemma3, Gemma3TextConfig, Gemma3ForCausalLM),
}


def as_in_files(theirs: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict ``tensors`` of their model, or its gradients, as ``save_pretrained`` writes them.

    transformers 5 packs experts in memory that are separate in its files.
    """
    return revert_weight_conversion(theirs, dict(tensors))


def same_as_ours(theirs: PreTrainedModel, architecture: Family) -> GPTModel:
    """Our model with their weights."""
    config = architecture.config_from_hf(theirs.config.to_dict())
    ours = GPTModel(config)
    ours.load_state_dict(architecture.from_hf(as_in_files(theirs, theirs.state_dict()), config))
    return ours


def assert_bitwise(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name


def assert_same_function(theirs: PreTrainedModel, architecture: Family) -> None:
    """Compares logits to 1e-5, and the loss and each of its gradients relative to their size. All in float32."""
    ours = same_as_ours(theirs, architecture)
    tokens, labels = torch.randint(theirs.config.vocab_size, (2, 3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    loss = ours(tokens, labels=labels).mean()
    want = theirs(tokens, labels=labels, shift_labels=labels).loss
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    loss.backward()
    want.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()} | saved_buffers(theirs)
    wanted = architecture.from_hf(as_in_files(theirs, gradients), ours.config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """Adds noise to the trainable tensors: a fresh model's norms are all ones, and its biases all zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        for tensor in (*trained, *saved_buffers(model).values()):
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that its files contain."""
    in_files = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in in_files}
