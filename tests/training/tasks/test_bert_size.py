"""training/tasks/bert_size: against FLOPs counted by torch in a model built from its own modules."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megalith.config import TransformerConfig
from megalith.models.bert_model import BertModel
from megalith.training.tasks.bert_size import bert_costs, bert_flops_per_row
from megalith.training.tasks.gpt_size import parameters

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "activation": "gelu",
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 24,
    "residual": {"norm_placement": "post"},
    "vocab_size": 67,
}


@pytest.mark.parametrize(
    ("bert", "num_predicted", "num_classes"),
    [
        ({"num_token_types": 2}, 5, 2),
        ({"num_token_types": 2, "binary_head": False}, 5, 0),
        ({"num_token_types": 0, "head": "classification", "num_classes": 3}, 0, 3),
        ({"num_token_types": 0, "head": "multiple_choice"}, 0, 1),
    ],
)
def test_a_row_costs_what_torch_counts(bert, num_predicted, num_classes):
    S, H, V = 24, 32, 67
    x = torch.randn(1, S, H)
    with FlopCounterMode(display=False) as forward:
        for _ in range(2):
            q, k, v = (nn.Linear(H, H)(x) for _ in range(3))
            nn.Linear(H, H)(torch.softmax(q @ k.mT, dim=-1) @ v)
            nn.Linear(4 * H, H)(nn.Linear(H, 4 * H)(x))
        if num_predicted:
            nn.Linear(H, V)(nn.Linear(H, H)(x[0, :num_predicted]))
        if num_classes:
            nn.Linear(H, num_classes)(nn.Linear(H, H)(x[0, :1]))
    config = TransformerConfig(**SHAPE, bert=bert)
    assert bert_flops_per_row(config, V, S, num_predicted) == 3 * forward.get_total_flops()


def test_the_projection_of_each_embedding_costs_what_torch_counts():
    base = {"num_token_types": 2, "head": "embedding"}
    costs = [
        bert_costs(TransformerConfig(**SHAPE, bert={**base, **more}), 67, 24, 0, num_texts=3)
        for more in ({}, {"embedding_size": 5})
    ]
    with FlopCounterMode(display=False) as forward:
        nn.Linear(32, 5)(torch.randn(3, 32))
    assert [each.head for each in costs] == [0, 3 * forward.get_total_flops()]
    assert costs[0].layers == costs[1].layers


@pytest.mark.parametrize(
    "bert",
    [
        {"num_token_types": 2},
        {"num_token_types": 2, "head": "multiple_choice"},
        {"num_token_types": 2, "head": "embedding"},
        {"num_token_types": 2, "head": "embedding", "embedding_size": 5},
    ],
)
def test_parameters_are_those_of_the_model(bert):
    config = TransformerConfig(**SHAPE, bert=bert)
    with torch.device("meta"):
        model = BertModel(config)
    assert parameters(config, 67) == sum(parameter.numel() for parameter in model.parameters())
