"""The loss as a sum, whose count is kept apart: nothing divides until the whole step is known."""

import torch
from torch import Tensor

from megalith.models.gpt_model import GPTModel
from megalith.training.batch import ModelInputs

__all__ = ["loss_sum"]


def loss_sum(model: GPTModel, inputs: ModelInputs) -> Tensor:
    """The sum of the losses of tokens that the mask keeps: a scalar in float32 or wider."""
    losses = model(
        inputs.tokens,
        labels=inputs.labels,
        position_ids=inputs.position_ids,
        packed_seq_params=inputs.packed_seq_params,
        dropout_key=inputs.dropout_key,
    )  # [B, S]
    # where, not a product: a loss that is infinite under the mask must not become NaN
    return torch.where(inputs.loss_mask, losses, 0.0).sum()
