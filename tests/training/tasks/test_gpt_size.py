"""Closed forms of parameters and FLOPs against published models, Hugging Face's, and torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalith.config import TransformerConfig
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import parameter_shapes
from megalith.training.tasks.gpt_size import flops_per_token, parameters, stage_costs

GPT2 = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "tie_word_embeddings": True,
}
PUBLISHED = {
    "GPT-2": (
        {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 1024, **GPT2},
        50257,
        124_439_808,
    ),
    "Llama 2 7B": (
        {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 11008},
        32000,
        6_738_415_616,
    ),
    "Llama 3 8B": (
        {
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "ffn_hidden_size": 14336,
        },
        128256,
        8_030_261_248,
    ),
    "Llama 3.2 1B": (
        {
            "num_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "ffn_hidden_size": 8192,
            "tie_word_embeddings": True,
        },
        128256,
        1_235_814_400,
    ),
}


@pytest.mark.parametrize(("shape", "vocab_size", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(shape, vocab_size, count):
    assert parameters(TransformerConfig(**shape), vocab_size) == count


def small_llama(biases=False):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, attn_implementation="eager",
        attention_bias=biases, mlp_bias=biases,
    )  # fmt: skip
    ours = TransformerConfig(
        num_layers=3, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2, kv_channels=16,
        add_bias_linear=biases,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape), ours


def small_llama_with_biases():
    return small_llama(biases=True)


def small_qwen3():
    transformers = pytest.importorskip("transformers")
    shape = transformers.Qwen3Config(
        vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, attn_implementation="eager", attention_bias=True,
    )  # fmt: skip
    ours = TransformerConfig(
        num_layers=3, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, num_query_groups=2, kv_channels=16,
        attention={"qk_norm": "RMSNorm", "qkv_bias": True, "output_bias": True},
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(shape), ours


def small_deepseek(query_latent=24):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "q_lora_rank": query_latent, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9
    }  # fmt: skip
    shape = transformers.DeepseekV3Config(
        vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=6, first_k_dense_replace=3, attn_implementation="eager", attention_bias=True, **sizes,
    )  # fmt: skip
    ours = TransformerConfig(
        num_layers=3, hidden_size=48, ffn_hidden_size=80, num_attention_heads=6, mla=sizes,
        attention={"qkv_bias": True, "output_bias": True},
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(shape), ours


def small_deepseek_without_a_latent_of_queries():
    return small_deepseek(None)


def small_gpt2():
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(
        vocab_size=131, n_embd=48, n_inner=100, n_layer=2, n_head=4, n_positions=40, attn_implementation="eager"
    )
    ours = TransformerConfig(
        num_layers=2, hidden_size=48, ffn_hidden_size=100, num_attention_heads=4, max_position_embeddings=40, **GPT2
    )
    return transformers.GPT2LMHeadModel(shape), ours


@pytest.mark.parametrize(
    "pair",
    [
        small_llama,
        small_llama_with_biases,
        small_qwen3,
        small_deepseek,
        small_deepseek_without_a_latent_of_queries,
        small_gpt2,
    ],
)
def test_hugging_face_builds_as_many_parameters_and_torch_counts_as_many_flops(pair):
    model, config = pair()
    assert parameters(config, 131) == sum(parameter.numel() for parameter in model.parameters())

    B, S = 2, 32
    tokens = torch.randint(131, (B, S))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    # eager attention computes the masked half too
    value_size = config.kv_channels if config.mla is None else config.mla.v_head_dim
    masked_half = 3 * config.num_attention_heads * (config.kv_channels + value_size) * S * config.num_layers
    assert counter.get_total_flops() == B * S * (flops_per_token(config, 131, S) + masked_half)


def test_flops_are_near_six_per_parameter_where_matrices_dominate():
    shape, vocab_size, count = PUBLISHED["Llama 2 7B"]
    ratio = flops_per_token(TransformerConfig(**shape), vocab_size, 2048) / (6 * count)
    # Kaplan et al. 2020 (arXiv:2001.08361): 6 N; attention adds half of S / (12 H) = 4 %, the embedding takes 2 % away
    assert 1.0 < ratio < 1.06


@pytest.mark.parametrize("norm_placement", ["post", "sandwich"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize(
    ("activation", "add_bias_linear", "mlp_bias"),
    [("geglu", True, False), ("quick_geglu", False, True), ("squared_relu", False, True)],
)
def test_the_parameters_of_norms_and_biases_wherever_they_are_are_those_of_the_model(
    norm_placement, normalization, activation, add_bias_linear, mlp_bias
):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=67, activation=activation,
        normalization=normalization, add_bias_linear=add_bias_linear, mlp_bias=mlp_bias,
        residual={"norm_placement": norm_placement},
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(config)
    assert parameters(config, 67) == sum(parameter.numel() for parameter in model.parameters())
    assert parameter_shapes(config) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


OPTIONS_OF_ATTENTION = {
    "sinks": {"softmax": "learnable"},
    "off by one": {"softmax": "off_by_one"},
    "norms": {"qk_norm": "RMSNorm"},
    "norms with biases": {"qk_norm": "LayerNorm"},
    "norms without weights": {"qk_norm": "L2"},
    "gate": {"output_gate": True},
    "gate, biases but for the output": {"output_gate": True, "qkv_bias": True},
    "bias of the output": {"output_bias": True},
    "softcap and scale": {"logit_softcap": 30.0, "scale": 0.1},
}


@pytest.mark.parametrize("add_bias_linear", [False, True])
@pytest.mark.parametrize("attention", OPTIONS_OF_ATTENTION.values(), ids=OPTIONS_OF_ATTENTION)
def test_our_model_has_exactly_as_many_parameters_with_every_option_of_attention(attention, add_bias_linear):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=16, vocab_size=67,
        add_bias_linear=add_bias_linear, attention=attention,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(config)
    assert parameters(config, 67) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("add_bias_linear", [False, True])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_our_model_has_exactly_as_many_parameters_with_latent_attention(normalization, add_bias_linear, q_lora_rank):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=67, normalization=normalization,
        add_bias_linear=add_bias_linear, mla={"kv_lora_rank": 10, "q_lora_rank": q_lora_rank, "v_head_dim": 7},
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(config)
    assert parameters(config, 67) == sum(parameter.numel() for parameter in model.parameters())
    assert parameter_shapes(config) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_attention_of_deepseek_v3_has_the_parameters_of_its_published_checkpoint():
    # DeepSeek-V3, arXiv:2412.19437, section 4.2: 61 layers of 7168, 128 heads, latents of 1536 and 512
    shape = {"num_layers": 1, "hidden_size": 7168, "num_attention_heads": 128, "ffn_hidden_size": 1}
    mla = {"kv_lora_rank": 512, "q_lora_rank": 1536}
    attention = parameters(TransformerConfig(**shape, mla=mla), 1) - 2 * 7168 - 3 * 7168 - 3 * 7168
    # q_b, kv_a, kv_b and o next to q_a, from the shapes of its tensors
    weights = 1536 * 7168 + 24576 * 1536 + 576 * 7168 + 32768 * 512 + 7168 * 16384
    assert attention == weights + 1536 + 512


def test_an_output_gate_costs_a_token_as_much_as_the_output_projection():
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 16}
    gated, plain = (TransformerConfig(**shape, attention={"output_gate": gate}) for gate in (True, False))
    more = flops_per_token(gated, 67, 8) - flops_per_token(plain, 67, 8)
    assert more == 6 * 2 * (4 * 16) * 32  # a multiply and an add for each weight, three times, in two layers


def test_torch_counts_a_module_as_a_layer_a_projection_and_a_head():
    H, V, B, S, M = 32, 67, 2, 16, 2
    counted, ours = [], []
    for layers, mtp in ((2, None), (3, None), (2, {"num_modules": M})):
        config = TransformerConfig(num_layers=layers, hidden_size=H, num_attention_heads=4, vocab_size=V, mtp=mtp)
        model, labels = GPTModel(config), torch.randint(V, (1 + M if mtp else 1, B, S))
        with FlopCounterMode(display=False) as counter:
            model(torch.randint(V, (B, S)), labels=labels).sum().backward()
        counted.append(counter.get_total_flops())
        ours.append(B * S * flops_per_token(config, V, S))
    joined = B * S * 3 * 2 * (2 * H * H + V * H)
    for plain, one_layer_more, with_modules in (counted, ours):
        assert with_modules - plain == M * (one_layer_more - plain + joined)


@pytest.mark.parametrize("position_embedding_type", ["rope", "learned_absolute"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("add_bias_linear", [False, True])
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
@pytest.mark.parametrize("mtp", [None, {"num_modules": 3}], ids=["", "mtp"])
def test_our_model_has_exactly_as_many_parameters_in_every_mix_of_parts(
    position_embedding_type, normalization, activation, add_bias_linear, tie_word_embeddings, mtp
):
    positions = {"max_position_embeddings": 20} if position_embedding_type == "learned_absolute" else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=16, vocab_size=67,
        position_embedding_type=position_embedding_type, normalization=normalization, activation=activation,
        add_bias_linear=add_bias_linear, tie_word_embeddings=tie_word_embeddings, mtp=mtp, **positions,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(config)
    assert parameters(config, 67) == sum(parameter.numel() for parameter in model.parameters())


MIXTURES = {
    "routed alone": {"num_experts": 4},
    "of a size of their own, every other layer": {"num_experts": 4, "ffn_hidden_size": 24, "layers": [False, True]},
    "shared with a gate": {"num_experts": 4, "shared_ffn_hidden_size": 40, "shared_expert_gate": True},
    "latents, a biased router": {"num_experts": 4, "latent_size": 16, "router": {"bias": True}},
}


@pytest.mark.parametrize("add_bias_linear", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
@pytest.mark.parametrize("mtp", [None, {"num_modules": 1}], ids=["", "mtp"])
@pytest.mark.parametrize("moe", MIXTURES.values(), ids=MIXTURES)
def test_the_parameters_of_experts_are_those_of_the_model(moe, activation, add_bias_linear, mtp):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=67, moe=moe, activation=activation,
        add_bias_linear=add_bias_linear, mtp=mtp,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(config)
    assert parameters(config, 67) == sum(parameter.numel() for parameter in model.parameters())
    assert parameter_shapes(config) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_a_token_costs_the_weights_of_the_experts_that_it_is_sent_to():
    moe = {"num_experts": 8, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 40, "shared_expert_gate": True}
    shape = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 100}
    dense, sparse = TransformerConfig(**shape), TransformerConfig(**shape, moe={**moe, "layers": [False, True]})
    more = flops_per_token(sparse, 67, 8) - flops_per_token(dense, 67, 8)
    # the one layer of three with experts: router, two experts, shared ones and their gate, and no MLP
    assert more == 6 * (8 * 32 + 2 * 3 * 32 * 24 + 3 * 32 * 40 + 32 - 3 * 32 * 100)


def test_a_layer_with_a_window_pays_for_the_keys_within_it():
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    S, window, queries = 100, 30, 64
    windowed = TransformerConfig(**shape, attention={"window": window, "window_layers": [True, False]})
    spared = stage_costs(TransformerConfig(**shape), 131, S).layers[0] - stage_costs(windowed, 131, S).layers[0]
    # the query-key pairs that the window excludes
    pairs = sum(max(query + 0.5 - window, 0) for query in range(S)) / S
    assert spared == pytest.approx(3 * 4 * queries * pairs, rel=1e-3)
    assert stage_costs(windowed, 131, S).layers[1] == stage_costs(TransformerConfig(**shape), 131, S).layers[1]
