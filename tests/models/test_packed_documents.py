"""Whole models on packed documents: outputs and gradients as for each document alone, whatever its neighbours."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.models.gpt_model import GPTModel
from megalith.packed_seq_params import PackedSeqParams
from tests.transformer.shapes import config, options

V, S = 31, 12
LENGTHS = [[1, 5, 1, 2, 3], [7, 5], [S]]
EXACT = 1e-11
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"shape": "gpt2"},
    "latents": {"shape": "latents"},
    "a window in one layer, learned sinks, a gate": {
        "attention": {"softmax": "learnable", "window": 3, "window_layers": [True, False], "output_gate": True}
    },
    "softmax off by one, capped scores, norms of heads": {
        "attention": {"softmax": "off_by_one", "logit_softcap": 1.5, "qk_norm": "LayerNorm"}
    },
    "yarn, no positions in one layer": {
        "rope": {
            "layers": [True, False],
            "scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        }
    },
    "Gemma 3": {
        "rope": {"base": 500.0, "local_base": 10.0, "scaling": {"type": "linear", "factor": 8.0}},
        "attention": {"window": 3, "window_layers": [True, False], "qk_norm": "RMSNorm"},
        "residual": {"norm_placement": "sandwich", "zero_centered_norm": True},
    },
    "experts": {"moe": {"num_experts": 4, "top_k": 2}},
}


def built(shape: str = "llama", **settings: Any) -> GPTModel:
    model, generator = GPTModel(config(shape, **settings), options(), seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # initial ones and zeros would hide mistakes
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def backward(logits: Tensor, weights: Tensor) -> Tensor:
    """The gradients of a weighted sum of all logits, with a different weight for each token."""
    (logits.sin() * weights.unsqueeze(-1)).sum().backward()
    return logits.detach()


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_packed_documents_give_outputs_and_gradients_of_the_documents_one_by_one(settings):
    packed, model, generator = PackedSeqParams.from_lengths(LENGTHS), built(**settings), torch.Generator()
    tokens = torch.randint(V, (len(LENGTHS), S), generator=generator.manual_seed(1))
    weights = torch.rand(len(LENGTHS), S, generator=generator, dtype=torch.float64)
    got = backward(model(tokens, position_ids=packed.position_ids(), packed_seq_params=packed), weights)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = row, slice(start, start + length)
            alone = backward(model(tokens[document].unsqueeze(0)), weights[document].unsqueeze(0))[0]
            torch.testing.assert_close(got[document], alone, rtol=EXACT, atol=EXACT)
            start += length
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=EXACT, atol=EXACT, msg=name)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_changing_a_document_leaves_the_logits_of_its_neighbours_bitwise(settings):
    packed, model = PackedSeqParams.from_lengths([[7, 5]]), built(**settings)
    tokens = torch.randint(V, (1, S), generator=torch.Generator().manual_seed(1))
    before = model(tokens, position_ids=packed.position_ids(), packed_seq_params=packed)
    for changed, kept in ((slice(0, 7), slice(7, S)), (slice(7, S), slice(0, 7))):
        others = tokens.clone()
        others[0, changed] = (others[0, changed] + 1) % V
        after = model(others, position_ids=packed.position_ids(), packed_seq_params=packed)
        assert torch.equal(after[0, kept], before[0, kept])
        assert not torch.equal(after[0, changed], before[0, changed])
