"""Padding takes up no capacity of experts: a padded text has the logits that it has alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.models.generation import generate
from megalith.models.gpt_model import GPTModel
from megalith.models.sampling import Sampling
from megalith.models.scoring import score
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection

V, S, PAD = 61, 20, 23
TEXT = torch.randint(0, V, (1, S), generator=torch.Generator().manual_seed(1))


def model_of(**capacity: Any) -> GPTModel:
    """Experts that many tokens compete for."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=V,
        init_method_std=0.5,
        moe={"num_experts": 4, "top_k": 2, "capacity": {"factor": 0.75, **capacity}},
    )
    options = BuildOptions(ProcessGroupCollection.single(), torch.float64)
    return GPTModel(config, options, seed=1).eval()


@pytest.mark.parametrize("capacity", [{}, {"drop": "position"}, {"pad": True}], ids=str)
def test_a_padded_text_has_the_logits_of_the_text_alone(capacity):
    model = model_of(**capacity)
    padding = torch.zeros(1, PAD, dtype=torch.int64)
    with torch.no_grad():
        alone = model(TEXT)
        mask = torch.arange(S + PAD).view(1, -1) < S
        on_the_right = torch.cat((TEXT, padding), dim=1)
        assert torch.allclose(model(on_the_right, padding_mask=mask)[:, :S], alone, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(model(on_the_right)[:, :S], alone, atol=1e-3)  # padding competes
        documents = PackedSeqParams.from_lengths([[PAD, S]])
        positions = (torch.arange(S + PAD) - PAD).clamp_min(0).view(1, -1)
        on_the_left = model(
            torch.cat((padding, TEXT), dim=1),
            position_ids=positions,
            packed_seq_params=documents,
            padding_mask=mask.flip(1),
        )
        assert torch.allclose(on_the_left[:, PAD:], alone, rtol=1e-12, atol=1e-12)


@pytest.fixture
def masks(monkeypatch) -> list[Tensor | None]:
    """The masks with which the model is called."""
    found: list[Tensor | None] = []
    forward = GPTModel.forward

    def noting(self: GPTModel, *args: Any, **kwargs: Any) -> Tensor:
        found.append(kwargs.get("padding_mask"))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPTModel, "forward", noting)
    return found


def test_scoring_and_generation_say_what_is_padding(masks):
    score(model_of(), [([1, 2, 3], [4, 5]), ([6], [7, 8])], longest=S)
    [mask] = masks
    assert mask.tolist() == [[True] * 4, [True, True, False, False]]
    masks.clear()
    generate(model_of(), [[1, 2, 3], [4]], max_new_tokens=2, sampling=Sampling(temperature=0.0))
    whole, newest = masks
    assert whole.tolist() == [[True] * 3, [False, False, True]]
    assert newest is None
