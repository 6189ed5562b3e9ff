"""Published architectures expressed by our settings match tiny random models of transformers.

Logits, the loss and every gradient. Each model is reduced to what is tested here: positions, windows and scores that
our model has no setting for, or that have tests of their own, are as ours.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from megalith.models.gpt_model import GPTModel
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.mlp import MLP
from tests.transformer.shapes import config, options

V, H, A, G, D, F, L = 31, 16, 4, 2, 4, 24, 2
EXACT = 1e-10
# transformers computes norms and rotary tables in float32 even in a float64 model
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": A,
    "num_key_value_heads": G,
    "head_dim": D,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def randomized(model: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def gemma2() -> tuple[PreTrainedModel, dict[str, Any]]:
    theirs = Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES,
            query_pre_attn_scalar=D,
            sliding_window=16,
            attn_logit_softcapping=None,
            final_logit_softcapping=3.0,
            rms_norm_eps=1e-5,
        )
    )
    ours = {
        "activation": "geglu_tanh",
        "tie_word_embeddings": True,
        "residual": {"norm_placement": "sandwich", "zero_centered_norm": True},
        "multipliers": {"embedding": H**0.5, "logit_softcap": 3.0},
    }
    return theirs, ours


def granite() -> tuple[PreTrainedModel, dict[str, Any]]:
    theirs = GraniteForCausalLM(
        GraniteConfig(
            **SIZES,
            tie_word_embeddings=True,
            attention_multiplier=D**-0.5,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            rms_norm_eps=1e-5,
        )
    )
    return theirs, {
        "tie_word_embeddings": True,
        "multipliers": {"embedding": 12.0, "residual": 0.22, "logits": 1 / 8.0},
    }


def nemotron() -> tuple[PreTrainedModel, dict[str, Any]]:
    theirs = NemotronForCausalLM(NemotronConfig(**SIZES, mlp_bias=True, partial_rotary_factor=1.0, norm_eps=1e-5))
    return theirs, {
        "normalization": "LayerNorm",
        "activation": "squared_relu",
        "mlp_bias": True,
        "residual": {"zero_centered_norm": True},
    }


def gpt1() -> tuple[PreTrainedModel, dict[str, Any]]:
    theirs = OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(
            vocab_size=V, n_positions=16, n_embd=H, n_layer=L, n_head=A, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    )
    return theirs, {
        "num_query_groups": A,
        "ffn_hidden_size": 4 * H,
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "tie_word_embeddings": True,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 16,
        "residual": {"norm_placement": "post"},
    }


OF_GEMMA2 = {  # ours -> theirs
    "self_attn_output_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_layernorm": "post_feedforward_layernorm",
}
OF_GPT1 = {
    "model.embed_tokens.weight": "transformer.tokens_embed.weight",
    "model.embed_positions.weight": "transformer.positions_embed.weight",
}
OF_A_LAYER_OF_GPT1 = {
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_1",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "post_mlp_layernorm": "ln_2",
}


def of_gemma2(name: str, theirs: dict[str, Tensor]) -> Tensor:
    *path, module, part = name.split(".")
    return theirs[".".join([*path, OF_GEMMA2.get(module, module), part])]


def of_gpt1(name: str, theirs: dict[str, Tensor]) -> Tensor:
    if name in OF_GPT1:
        return theirs[OF_GPT1[name]]
    _, _, layer, *path, part = name.split(".")
    module = ".".join(path)
    if module in OF_A_LAYER_OF_GPT1:
        found = theirs[f"transformer.h.{layer}.{OF_A_LAYER_OF_GPT1[module]}.{part}"]
        return found.t() if found.dim() == 2 else found
    third = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].index(module)
    return theirs[f"transformer.h.{layer}.attn.c_attn.{part}"].chunk(3, dim=-1)[third].t()


def same_name(name: str, theirs: dict[str, Tensor]) -> Tensor:
    return theirs[name]


@pytest.mark.parametrize(
    ("pair", "place"), [(gemma2, of_gemma2), (granite, same_name), (nemotron, same_name), (gpt1, of_gpt1)]
)
def test_it_computes_what_theirs_does(
    pair: Callable[[], tuple[PreTrainedModel, dict[str, Any]]], place: Callable[[str, dict[str, Tensor]], Tensor]
):
    torch.manual_seed(0)  # transformers initializes from torch's global generator, which other tests use too
    theirs, settings = pair()
    randomized(theirs)
    ours = GPTModel(config(**{"vocab_size": V, "num_query_groups": G} | settings), options())
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(place(name, named))
    assert ours.num_parameters() == sum(parameter.numel() for parameter in theirs.parameters())
    tokens, labels = torch.randint(V, (2, 2, 12), generator=torch.Generator().manual_seed(1))
    logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, **CLOSE)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    got = ours(tokens, labels=labels).mean()
    torch.testing.assert_close(got, loss, **CLOSE)
    loss.backward()
    got.backward()
    gradients = {name: parameter.grad for name, parameter in named.items()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, place(name, gradients), **CLOSE)


def test_the_clamped_feed_forward_is_that_of_an_expert_of_gpt_oss():
    shape = GptOssConfig(hidden_size=H, intermediate_size=F, num_local_experts=1, num_experts_per_tok=1)
    shape.swiglu_limit = 0.7  # the features here are smaller
    theirs = randomized(GptOssExperts(shape))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    ours = MLP(
        config(activation="quick_geglu", mlp_bias=True, glu={"clamp": shape.swiglu_limit, "offset": 1.0}), options()
    )
    gate_up, bias = theirs.gate_up_proj[0], theirs.gate_up_proj_bias[0]  # [H, 2F] and [2F], gate and up interleaved
    state = {
        "gate_proj.weight": gate_up[:, ::2].t(),
        "up_proj.weight": gate_up[:, 1::2].t(),
        "down_proj.weight": theirs.down_proj[0].t(),
        "gate_proj.bias": bias[::2],
        "up_proj.bias": bias[1::2],
        "down_proj.bias": theirs.down_proj_bias[0],
    }
    ours.load_state_dict(state)
    x = torch.randn(10, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        want = theirs(x, torch.zeros(10, 1, dtype=torch.long), torch.ones(10, 1, dtype=torch.float64))
        torch.testing.assert_close(ours(x.unsqueeze(1), LayerContext()).squeeze(1), want, rtol=EXACT, atol=EXACT)
