"""A scorer with random weights and a byte tokenizer."""

import torch

from megalith.config import TransformerConfig
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.models.gpt_model import GPTModel
from megalith.training.tasks.text_scores import TextScorer

__all__ = ["LONGEST", "scorer"]

LONGEST = 24


def scorer() -> TextScorer:
    tokenizer = train_byte_level_bpe(["Once upon a time there were ships, and each had a name. " * 4], 280)
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, num_layers=1, hidden_size=16, num_attention_heads=2, init_method_std=0.4
    )
    return TextScorer(GPTModel(config).to(torch.float64).eval(), tokenizer, LONGEST)
