"""models/hf/deepseek: defaults, published configs, multi-token prediction modules, and refusals.

test_parity compares the numbers of the models.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import DEEPSEEK_V2, DEEPSEEK_V3, LLAMA, open_folder, read_folder
from tests.models.hf import peers
from tests.models.hf.modules import of_modules, write_with_modules

PEER = peers.PEERS["deepseek_v3"]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_absent_fields_have_the_defaults_of_transformers(name):
    peer = peers.PEERS[name]
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 5}
    # their V2 has no default for num_experts_per_tok, and their V3 defaults to 128 key heads
    required = {**sizes, "num_attention_heads": 4, "num_experts_per_tok": 8}
    theirs = peer.config(**required, num_key_value_heads=4).to_dict()
    found = peer.family.config_from_hf({"model_type": name, **required})
    assert found == peer.family.config_from_hf(theirs)
    assert [found.moe.has_experts(layer) for layer in range(5)] == (
        [False] * 3 + [True] * 2 if name == "deepseek_v3" else [True] * 5
    )


# deepseek-ai/DeepSeek-V3, without the quantization of its files, and deepseek-ai/DeepSeek-V2
PUBLISHED_V3 = """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
    "v_head_dim": 128, "vocab_size": 129280}"""
PUBLISHED_V2 = """{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.003, "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": false,
    "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 16.0,
    "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 3,
    "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16", "transformers_version": "4.39.3",
    "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}"""
IN_GROUPS = "group_limited_greedy"
ROUTER_V3 = {
    "score_function": "sigmoid",
    "num_groups": 8,
    "group_topk": 4,
    "group_score_topk": 2,
    "scaling_factor": 2.5,
    "expert_bias_update_rate": 0.0,
}
ROUTER_V2 = {"pre_softmax": True, "num_groups": 8, "group_topk": 3, "group_score_topk": 1, "scaling_factor": 16.0}


@pytest.mark.parametrize(
    ("family", "published", "num_layers", "num_dense", "moe", "mscale"),
    [
        (DEEPSEEK_V3, PUBLISHED_V3, 61, 3, {"num_experts": 256, "top_k": 8, "router": ROUTER_V3}, 1.0),
        (DEEPSEEK_V2, PUBLISHED_V2, 60, 1, {"num_experts": 160, "top_k": 6, "router": ROUTER_V2}, 0.707),
    ],
    ids=["V3", "V2"],
)
def test_the_published_config_is_the_published_model(family, published, num_layers, num_dense, moe, mscale):
    config = family.config_from_hf(json.loads(published))
    F = 2048 if family is DEEPSEEK_V3 else 1536
    layers = [False] * num_dense + [True] * (num_layers - num_dense)
    shared = 2048 if family is DEEPSEEK_V3 else 3072
    sizes = {"ffn_hidden_size": F, "shared_ffn_hidden_size": shared, "layers": layers}
    assert config.moe == TransformerConfig(**SHAPE, moe=moe | sizes).moe
    assert (config.rope.scaling.mscale, config.rope.scaling.mscale_all_dim) == (mscale, mscale)
    assert config.mtp is None  # the config alone
    if family is DEEPSEEK_V3:
        found = family.config_from_hf(json.loads(published), ["model.layers.61.eh_proj.weight"])
        assert found.mtp.num_modules == 1
        assert found.moe.has_experts(61)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 4}),
        ("deepseek_v2", {"n_group": 4, "topk_group": 4, "topk_method": IN_GROUPS}),
        ("deepseek_v2", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 1, "topk_method": IN_GROUPS}),
    ],
)
def test_groups_that_limit_no_choice_are_not_read_as_they_are_refused_in_a_run(name, groups):
    peer = peers.PEERS[name]
    theirs = peer.build(**groups).config
    moe = peer.family.config_from_hf(theirs.to_dict()).moe
    assert (moe.router.num_groups, moe.router.group_topk, moe.router.group_score_topk) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads must equal num_attention_heads \(4\); got 2"),
        ("deepseek_v3", {"n_routed_experts": "many"}, "n_routed_experts must be an integer; got 'many'"),
        ("deepseek_v3", {"quantization_config": {"bits": 8}}, "quantization_config .* is a field that Megalith does"),
        (
            "deepseek_v3",
            {"rope_parameters": None, "rope_scaling": {**peers.ROPE_SCALINGS["yarn"], "mscale_all_dim": 1.0}},
            "mscale_all_dim of rope_scaling requires mscale",
        ),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob must be true if .* above 1, .*; got False with 4"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "topk_group": 1}, "and false if it is 1; got True with 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', .*; got 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc', .*; got 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, the only supported value; got 2"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts must be 1 or more, .*; got 0"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace must be 0 or more; got -1"),
        ("deepseek_v3", {"n_group": 3}, r"num_groups \(3\) and .*num_groups must divide model.moe.num_experts \(8\)"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be False, the only supported value"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be 'greedy' or 'group_limited_greedy'; got"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias must be False"),
        ("deepseek_v2", {"rope_interleave": False}, "rope_interleave .* is a field that Megalith does not know"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(name, fields, message):
    peer = peers.PEERS[name]
    with pytest.raises(ConfigError, match=message):
        peer.family.config_from_hf(peer.build().config.to_dict() | fields)


SHAPE = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
LATENT = {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "norm_epsilon": 1e-6}
EXPERTS = {"num_experts": 4, "ffn_hidden_size": 8, "shared_ffn_hidden_size": 8}
SIGMOID = {"score_function": "sigmoid", "expert_bias_update_rate": 1e-3}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (LLAMA, {"mla": LATENT}, r"mla must be None; got MLAConfig\(kv_lora_rank=4"),
        (DEEPSEEK_V3, {}, "mla.kv_lora_rank must be 'a positive integer'; got None"),
        (DEEPSEEK_V3, {"mla": LATENT | {"norm_epsilon": None}}, "mla.norm_epsilon must be 1e-06; got None"),
        (DEEPSEEK_V3, {"mla": LATENT | {"norm_epsilon": 1e-4}}, "mla.norm_epsilon must be 1e-06; got 0.0001"),
        (DEEPSEEK_V3, {"mla": LATENT, "attention": {"scale": 0.5}}, "attention.scale must be None; got 0.5"),
        (DEEPSEEK_V3, {"mla": LATENT, "attention": {"qkv_bias": True}}, "output_bias must be True; got False"),
        (DEEPSEEK_V3, {"moe": EXPERTS}, "score_function must be 'sigmoid'; got 'softmax'"),
        (
            DEEPSEEK_V3,
            {"moe": EXPERTS | {"router": {"score_function": "sigmoid"}}},
            "expert_bias_update_rate must be 'a number'; got None",
        ),
        (
            DEEPSEEK_V3,
            {"moe": EXPERTS | {"router": SIGMOID, "shared_ffn_hidden_size": 9}},
            "shared_ffn_hidden_size must be 16; got 9",
        ),
        (
            DEEPSEEK_V3,
            {"num_layers": 3, "moe": EXPERTS | {"router": SIGMOID, "layers": [True, False]}},
            r"moe.layers must be None; got \(True, False\)",
        ),
        (
            DEEPSEEK_V3,
            {"moe": EXPERTS | {"router": SIGMOID | {"num_groups": 2, "group_topk": 2}}},
            "group_score_topk must be 2; got None",
        ),
        (DEEPSEEK_V2, {"moe": EXPERTS}, "pre_softmax must be True; got False"),
        (DEEPSEEK_V2, {"mtp": {"num_modules": 1}}, "mtp must be None"),
    ],
)
def test_what_a_family_lacks_is_not_written_as_one(family, settings, message):
    settings = settings if "mla" in settings or "moe" not in settings else {"mla": LATENT, **settings}
    with pytest.raises(ConfigError, match=message):
        family.require(TransformerConfig(**SHAPE | settings))


def test_norms_of_latents_may_follow_the_others_where_those_have_their_epsilon():
    DEEPSEEK_V3.require(TransformerConfig(**SHAPE, layernorm_epsilon=1e-6, mla=LATENT | {"norm_epsilon": None}))


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "first_k_dense_replace": 0}], ids=str)
def test_modules_of_multi_token_prediction_are_read_and_predict_what_those_of_transformers_do(fields, tmp_path):
    theirs, modules = write_with_modules(tmp_path, 2, **fields)
    config, state = read_folder(tmp_path)
    assert config.mtp.num_modules == 2
    ours = GPTModel(config)
    ours.load_state_dict(state)
    S = 12
    tokens = torch.randint(61, (2, S + 3), generator=torch.Generator().manual_seed(1))
    labels = torch.stack([tokens[:, 1 + ahead : 1 + ahead + S] for ahead in range(3)])
    losses = ours(tokens[:, :S], labels=labels)

    states = theirs.model(tokens[:, :S]).last_hidden_state
    wanted = []
    for depth in range(2):
        positions = torch.arange(S)[None]
        states = modules.forward_layer(depth, states, positions, None, input_ids=labels[depth])
        logits = theirs.lm_head(states).flatten(0, 1)
        wanted.append(cross_entropy(logits, labels[depth + 1].flatten(), reduction="none").view(2, S))
    torch.testing.assert_close(losses[1:], torch.stack(wanted), rtol=0, atol=1e-5)

    losses[1:].mean().backward()
    torch.stack(wanted).mean().backward()
    gradients = {name: parameter.grad for name, parameter in modules.layers.named_parameters()}
    gradients |= peers.saved_buffers(modules.layers)
    gradients = of_modules(theirs, gradients)
    of_model = {name: parameter.grad for name, parameter in theirs.named_parameters()} | peers.saved_buffers(theirs)
    wanted = DEEPSEEK_V3.from_hf(gradients | peers.as_in_files(theirs, of_model), config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_modules_with_an_embedding_of_their_own_and_others_than_the_config_names_are_refused(tmp_path):
    write_with_modules(tmp_path, 1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.2.shared_head.head.weight"
    save_file(tensors | {key: tensors[key] + 1.0}, file)
    with pytest.raises(CheckpointError, match=rf"{key} must equal lm_head.weight, which Megalith's multi-token"):
        open_folder(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    assert open_folder(tmp_path).config.mtp.num_modules == 1
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.2.eh_proj.weight"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described | {"num_nextn_predict_layers": 2}))
    with pytest.raises(CheckpointError, match=r"missing: model.layers.3.input_layernorm.weight"):
        open_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described | {"num_nextn_predict_layers": 10**12}))
    with pytest.raises(ConfigError, match=r"mtp.num_modules: Input should be less than or equal to 64"):
        open_folder(tmp_path)
