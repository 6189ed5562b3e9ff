"""Families with windows per layer: names, numbers and configs against transformers' models."""

import pytest
import torch

from megalith.models.generation import generate
from megalith.models.hf import detect, fitting
from megalith.models.sampling import Sampling
from tests.models.hf import peers
from tests.models.hf.peers import PEERS

LOCAL, WHOLE = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
FIELDS = {
    "mistral": {
        "a window, untied": {},
        "tied, one key and value for all heads": {"tie_word_embeddings": True, "num_key_value_heads": 1},
        "odd sizes, a window of one token": {
            "hidden_size": 30,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "sliding_window": 1,
        },
        "rope scaling": peers.scaled("yarn"),
    },
    "qwen2": {
        "grouped-query": {},
        "tied, one key and value for all heads": {"tie_word_embeddings": True, "num_key_value_heads": 1},
        "odd sizes": {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3},
        "a window from layer 1 on": {**WINDOW, "max_window_layers": 1},
        "a window by layer_types": {**WINDOW, "layer_types": [LOCAL, WHOLE]},
        "a window in no layer": {**WINDOW, "max_window_layers": 2},
    },
    "qwen3": {
        "heads wider than hidden / heads": {},
        "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
        "odd sizes": {"hidden_size": 35, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6},
        "a window in every layer": {**WINDOW, "max_window_layers": 0},
        "a window by layer_types": {**WINDOW, "num_hidden_layers": 3, "layer_types": [WHOLE, LOCAL, LOCAL]},
    },
    "mixtral": {
        "all key and value heads, one expert more": {"num_key_value_heads": 4, "num_local_experts": 5},
        "tied, a window": {"tie_word_embeddings": True, "sliding_window": 5, "num_experts_per_tok": 4},
        "odd sizes, rope scaling": {
            "hidden_size": 30,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 10,  # their yarn does not accept null
            "intermediate_size": 17,
            **peers.scaled("yarn"),
        },
    },
    "qwen2_moe": {
        "weights of the chosen as they are": {},
        "weights of the chosen divided, tied, no biases": {
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "qkv_bias": False,
        },
        "an MLP in layer 0, a window in layers 0 and 2": {
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "max_window_layers": 3,
            **WINDOW,
        },
    },
    "qwen3_moe": {
        "weights of the chosen as they are": {},
        "weights of the chosen divided, tied, biases": {
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
        "experts in every second layer, a window": {"num_hidden_layers": 4, "decoder_sparse_step": 2, **WINDOW},
        "an MLP in layer 1": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    },
    "gpt_oss": {
        "windows in every other layer": {},
        "a window by layer_types, untied, no biases": {"layer_types": [WHOLE, LOCAL], "attention_bias": False},
        "no window, tied, usual positions": {
            "layer_types": [WHOLE, WHOLE],
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "odd sizes, a usual clamp": {
            "hidden_size": 33,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "intermediate_size": 17,
            "num_local_experts": 5,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
        },
    },
    "gemma2": {
        "tied": {},
        "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
        "odd sizes, a window of one token": {
            "hidden_size": 33,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "sliding_window": 1,
        },
        "no softcap": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "no window": {"layer_types": [WHOLE, WHOLE]},
        "rope scaling": peers.scaled("linear"),
    },
    "deepseek_v2": {
        "the best of all experts": {},
        "the best of groups, yarn as V2 has it, tied": {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 3,
            "num_experts_per_tok": 5,
            "routed_scaling_factor": 16.0,
            "tie_word_embeddings": True,
            **peers.scaled("yarn of DeepSeek-V2"),
        },
        "as many groups by their best as experts": {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 3,
            "num_experts_per_tok": 3,
        },
        "no latent of queries, biases, experts in every layer, one expert": {
            "q_lora_rank": None,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
        },
    },
    "deepseek_v3": {
        "an MLP, then experts": {},
        "no latent of queries, tied, experts in every layer": {
            "q_lora_rank": None,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
        },
        "biases, yarn as V3 has it, two MLPs": {
            "attention_bias": True,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 2,
            **peers.scaled("yarn of DeepSeek-V3"),
        },
        "one group, yarn of mscales that differ": {
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            **peers.scaled("yarn, all of its fields"),
        },
        "all of several groups": {"n_group": 4, "topk_group": 4},
        "no latent of queries, yarn, one expert": {
            "q_lora_rank": None,
            "num_experts_per_tok": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            **peers.scaled("yarn"),
        },
        "dense, halves rotated, odd sizes": {
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "hidden_size": 33,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "qk_nope_head_dim": 3,
            "v_head_dim": 9,
        },
    },
    "gemma3": {
        "a window in every layer": {},
        "a window by pattern, untied": {"sliding_window_pattern": 2, "tie_word_embeddings": False},
        "a window by layer_types, biases": {"layer_types": [WHOLE, LOCAL, LOCAL], "attention_bias": True},
        "no window": {"layer_types": [WHOLE] * 3},
        "odd sizes, softcap": {
            "hidden_size": 33,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 6,
            "final_logit_softcapping": 0.7,
        },
        "whole layers with rope scaling, bases by type of layer": {
            "layer_types": [LOCAL, WHOLE, LOCAL],
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 20.0},
                WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
            },
        },
    },
}
CASES = {f"{name}, {case}": (PEERS[name], fields) for name in PEERS for case, fields in FIELDS[name].items()}
of_cases = pytest.mark.parametrize(("peer", "fields"), CASES.values(), ids=CASES)


@of_cases
def test_tensors_come_back_bitwise(peer, fields):
    theirs = peer.build(**fields)
    state = peers.as_in_files(theirs, theirs.bfloat16().state_dict())
    config = peer.family.config_from_hf(theirs.config.to_dict())
    peers.assert_bitwise(peer.family.to_hf(peer.family.from_hf(state, config), config), state)


@of_cases
def test_logits_and_gradients_are_theirs(peer, fields):
    peers.assert_same_function(peer.build(**fields), peer.family)


@of_cases
def test_config_comes_back_and_builds_their_model(peer, fields):
    theirs, family = peer.build(**fields), peer.family
    config = family.config_from_hf(theirs.config.to_dict())
    exported = family.config_to_hf(config, max_position_embeddings=2048, dtype="float32", eos_token_id=7)
    assert detect(exported) == fitting(config) == family
    assert family.config_from_hf(exported) == config
    state = family.to_hf(family.from_hf(peers.as_in_files(theirs, theirs.state_dict()), config), config)
    how = {f"{part}_implementation": getattr(theirs.config, f"_{part}_implementation") for part in ("attn", "experts")}
    again = peer.model.from_pretrained(None, config=peer.config(**exported), state_dict=state, **how)
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("name", PEERS)
def test_greedy_decoding_with_and_without_a_cache_is_theirs_token_for_token(name):
    peer = PEERS[name]
    theirs = peer.build(**(WINDOW | {"max_window_layers": 1} if name == "qwen2" else {})).eval()
    ours = peers.same_as_ours(theirs, peer.family).eval()
    prompt = [3, 1, 4, 1, 5]
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    [cached] = generate(ours, [prompt], 12, sampling=Sampling(temperature=0.0))
    assert [*prompt, *cached] == want
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat((tokens, ours(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    assert tokens[0].tolist() == want
