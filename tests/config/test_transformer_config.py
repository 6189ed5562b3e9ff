"""A model's settings by themselves, as passed to layers."""

import pytest

from megalith.config import TransformerConfig

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_sizes_are_worked_out_as_llamas():
    model = TransformerConfig(**SHAPE)
    assert (model.num_query_groups, model.kv_channels, model.ffn_hidden_size) == (4, 16, 192)
    assert TransformerConfig(**SHAPE | {"hidden_size": 4096}).ffn_hidden_size == 10944  # 8/3 up to a multiple of 64
    assert TransformerConfig(**SHAPE, activation="gelu").ffn_hidden_size == 256
    assert (model.normalization, model.position_embedding_type, model.activation) == ("RMSNorm", "rope", "swiglu")


def test_fields_override_their_preset():
    model = TransformerConfig(preset="gpt2-124m", num_layers=2, position_embedding_type="rope")
    assert (model.num_layers, model.hidden_size, model.max_position_embeddings) == (2, 768, None)
    # a derived size follows the override, not the preset
    assert TransformerConfig(preset="gpt2-124m", hidden_size=96).ffn_hidden_size == 384


def test_biases_of_attention_follow_add_bias_linear_unless_they_are_set():
    for bias in (False, True):
        model = TransformerConfig(**SHAPE, add_bias_linear=bias)
        assert (model.qkv_bias, model.output_bias) == (bias, bias)
        apart = TransformerConfig(**SHAPE, add_bias_linear=bias, attention={"qkv_bias": True, "output_bias": False})
        assert (apart.qkv_bias, apart.output_bias) == (True, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": {"softmax": "sink"}}, r"(?s)attention.softmax.*'vanilla', 'off_by_one' or 'learnable'"),
        ({"attention": {"qk_norm": "rms"}}, r"(?s)attention.qk_norm.*'RMSNorm', 'LayerNorm' or 'L2'"),
        ({"attention": {"logit_softcap": 0.0}}, r"(?s)attention.logit_softcap.*greater than 0"),
        ({"attention": {"scale": -1.0}}, r"(?s)attention.scale.*greater than 0"),
        ({"num_attention_heads": 5}, r"model.hidden_size \(64\) must be divisible by model.num_attention_heads \(5\)"),
        ({"num_query_groups": 3}, r"must be divisible by model.num_query_groups \(3\)"),
        ({"kv_channels": 3}, r"kv_channels \(3\), .* must be even"),
        ({"position_embedding_type": "learned_absolute"}, r"max_position_embeddings is missing"),
        ({"max_position_embeddings": 64}, r"has no effect with model.position_embedding_type=rope"),
        ({"preset": "llama-5m"}, r"must be one of bert"),
        ({"num_layers": 0}, r"greater than or equal to 1"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SHAPE | fields)
