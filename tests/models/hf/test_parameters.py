"""models/hf/parameters: the table of names and shapes matches the model itself, for any mix of parts."""

import pytest
import torch

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.models.hf.parameters import buffer_shapes, parameter_shapes, state_shapes
from megalith.parallel.parameters import state_tensors

SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "positions", [{}, {"position_embedding_type": "learned_absolute", "max_position_embeddings": 9}]
)
def test_names_and_shapes_are_those_of_the_model(activation, normalization, bias, positions):
    config = TransformerConfig(
        **SMALL,
        **positions,
        vocab_size=13,
        num_query_groups=2,
        kv_channels=6,
        activation=activation,
        normalization=normalization,
        add_bias_linear=bias,
        tie_word_embeddings=bias,
    )
    with torch.device("meta"):
        state = GPTModel(config).state_dict()
    assert parameter_shapes(config) == {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "attention",
    [
        {"softmax": "learnable", "qk_norm": "RMSNorm", "output_gate": True},
        {"softmax": "off_by_one", "qk_norm": "LayerNorm", "qkv_bias": True},
        {"qk_norm": "L2", "output_gate": True, "output_bias": True},
        {"qkv_bias": False, "logit_softcap": 5.0},
    ],
)
def test_names_and_shapes_are_those_of_every_option_of_attention(attention, bias):
    config = TransformerConfig(
        **SMALL, vocab_size=13, num_query_groups=2, kv_channels=6, attention=attention, add_bias_linear=bias
    )
    with torch.device("meta"):
        state = GPTModel(config).state_dict()
    assert parameter_shapes(config) == {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize(
    "router",
    [{}, {"score_function": "sigmoid", "expert_bias_update_rate": 0.0, "bias": True}, {"selection": "quantile"}],
    ids=str,
)
def test_names_and_shapes_are_those_of_experts_with_the_buffers_of_their_routers(router):
    moe = {"num_experts": 4, "layers": [False, True, True], "router": router}
    config = TransformerConfig(**SMALL, vocab_size=13, moe=moe, mtp={"num_modules": 1})
    with torch.device("meta"):
        model = GPTModel(config)
    assert state_shapes(config) == {name: tuple(tensor.shape) for name, tensor in state_tensors(model).items()}
    assert parameter_shapes(config) == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert len(buffer_shapes(config)) == (2 if router else 0)  # in layer 1 and in the module


def test_a_vocabulary_of_unknown_size_is_refused():
    with pytest.raises(ConfigError, match=r"vocab_size must be set"):
        parameter_shapes(TransformerConfig(**SMALL))
