"""A micro-batch as the model takes it: tensors on the device, documents, positions, and the key of its dropouts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.loader import MicroBatch
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["InputMaker", "ModelInputs"]


@dataclass(frozen=True)
class ModelInputs:
    """tokens and labels int64 [B, S]; loss_mask bool [B, S]; position_ids int64 [S] or [B, S]."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    packed_seq_params: PackedSeqParams | None
    dropout_key: DropoutKey | None


class InputMaker:
    """Turns micro-batches of numpy arrays into ``ModelInputs`` on ``device``, as ``config`` asks."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.device = device
        self.seed = config.train.seed
        self.packs_documents = config.data.reset_attention_mask
        self.resets_positions = config.data.reset_position_ids
        self.drops = config.model.hidden_dropout > 0.0 or config.model.attention_dropout > 0.0

    def __call__(self, micro_batch: MicroBatch, step: int) -> ModelInputs:
        """``micro_batch`` for training step ``step``.

        A token's dropout depends on its row in the global batch and its position in the row, so that cutting the batch
        in another way changes nothing.
        """
        tokens = torch.from_numpy(micro_batch.tokens)
        S = tokens.shape[1]
        packed = None
        if self.packs_documents or self.resets_positions:
            packed = PackedSeqParams.from_documents(torch.from_numpy(micro_batch.documents))
        positions = torch.arange(S) if packed is None or not self.resets_positions else packed.position_ids()
        dropout_key = None
        if self.drops:
            rows = torch.from_numpy(micro_batch.row_ids).unsqueeze(1)  # [B, 1]
            dropout_key = DropoutKey(self.seed, step, (rows * S + torch.arange(S)).to(self.device))
        return ModelInputs(
            tokens.to(self.device),
            torch.from_numpy(micro_batch.labels).to(self.device),
            torch.from_numpy(micro_batch.loss_mask).to(self.device),
            positions.to(self.device),
            packed.to(self.device) if packed is not None and self.packs_documents else None,
            dropout_key,
        )
