"""What all tasks of an encoder share: the model, and the conversion of padded rows to its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megalith.config import RunConfig
from megalith.config.layout import Layout
from megalith.data.bert_dataset import BertBatch
from megalith.device_copy import to_device
from megalith.errors import ConfigError
from megalith.models.bert_model import BertModel
from megalith.models.language_model import hidden_shape
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.training.tasks.bert_size import bert_costs
from megalith.training.tasks.bert_traffic import bert_traffic
from megalith.training.tasks.masked_task import MaskedTask
from megalith.training.tasks.task import StageTraffic
from megalith.transformer.stage import Stage

__all__ = ["BertInputs", "BertTask", "EncoderTask"]

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class BertInputs:
    """A micro-batch as ``BertModel.forward`` takes it, and the classes of its rows.

    Attributes:
        tokens: int64 [B, S/cp].
        labels: int64 [B, S/cp], -1 where no token is to be predicted; None for a classifier.
        token_types: int64 [B, S/cp]; None if the model has no token types.
        position_ids: int64 [S/cp].
        packed_seq_params: tokens and padding of whole rows.
        pooled_tokens: int64 [N], the index of the first token of each row with a class on this rank.
        classes: int64 [N].
    """

    tokens: Tensor
    labels: Tensor | None
    token_types: Tensor | None
    position_ids: Tensor
    packed_seq_params: PackedSeqParams
    pooled_tokens: Tensor
    classes: Tensor
    dropout_key: DropoutKey


class EncoderTask(MaskedTask[Sample, Batch, Inputs]):
    """A task of the model that ``model.bert`` describes.

    Args:
        predicted: the average share of a row's tokens that are predicted.
        num_texts: texts in a row that the head reads.

    Raises:
        ConfigError: as ``MaskedTask``; or ``data.decoder_seq_length`` is set.
    """

    def __init__(self, config: RunConfig, *, predicted: float = 0.0, num_texts: int = 1) -> None:
        assert config.model.bert is not None, "the model is a BERT"
        assert config.model.vocab_size is not None, "set by preflight"
        if config.data.decoder_seq_length is not None:
            raise ConfigError("data.decoder_seq_length is for model.t5; model.bert has no decoder; leave it out")
        S = config.data.seq_length
        costs = bert_costs(config.model, config.model.vocab_size, S, predicted * S, num_texts)
        super().__init__(config, costs, S)
        self.bert = config.model.bert
        if predicted:
            self.usual_labels = round(predicted * S * config.train.micro_batch_size / config.parallel.context)

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> BertModel:
        """Builds the model that the ``model`` settings describe, or a stage of it."""
        return BertModel(self.config.model, options, stage=stage)

    def traffic(self, layout: Layout, stage: Stage | None = None) -> StageTraffic:
        """Counts traffic in closed form."""
        return bert_traffic(self.config, layout, stage or Stage.whole(self.config.model.num_layers))


class BertTask(EncoderTask[Sample, BertBatch, BertInputs]):
    """A task whose rows hold one text or a pair of segments; errors as ``EncoderTask``."""

    def hidden_shape(self, batch: BertBatch, options: BuildOptions) -> tuple[int, ...]:
        """[S/tp, B, H] under sequence parallelism, else [S, B, H]."""
        B, S = batch.tokens.shape
        return hidden_shape(self.config.model, options, B, S)

    def collate(
        self, samples: Sequence[Sample], rows: Sequence[int], counted: Sequence[bool] | None = None
    ) -> BertBatch:
        """Stacks the samples, one per row."""
        batch = self.stack(samples, rows)
        return batch if counted is None else batch.counting(counted)

    def stack(self, samples: Sequence[Sample], rows: Sequence[int]) -> BertBatch:
        """``collate`` for rows that all count."""
        raise NotImplementedError

    def context_part(self, batch: BertBatch, rank: int, size: int) -> BertBatch:
        """Returns the columns that ``rank`` holds; token counts still describe whole rows."""
        return batch.columns(zigzag_positions(batch.tokens.shape[1], size, rank).numpy())

    def inputs(self, batch: BertBatch, step: int, device: torch.device) -> BertInputs:
        """Moves ``batch`` to ``device``.

        A token's dropout depends on its row in the global batch and its position in the row.
        """
        S, columns = self.config.data.seq_length, torch.from_numpy(batch.positions)  # [S/cp]
        is_token = torch.arange(S) < torch.from_numpy(batch.num_tokens).unsqueeze(1)  # [B, S]
        classes = torch.from_numpy(batch.classes)
        with_class = (classes >= 0).nonzero().flatten()  # [N]
        rows = torch.from_numpy(batch.row_ids).unsqueeze(1)  # [B, 1]
        return BertInputs(
            to_device(batch.tokens, device),
            to_device(batch.labels, device) if self.bert.head == "pretraining" else None,
            to_device(batch.token_types, device) if self.bert.num_token_types > 1 else None,
            to_device(columns, device),
            PackedSeqParams.from_padding(is_token).to(device),
            to_device(with_class * len(columns), device),
            to_device(classes[with_class], device),
            DropoutKey(self.config.train.seed, step, to_device(rows * S + columns, device)),
        )

    def forward(self, model: nn.Module, inputs: BertInputs, hidden: Tensor | None) -> Any:
        """Returns ``BertOutput``, or logits [N, classes]; without the head, hidden states [S, B, H]."""
        return model(
            inputs.tokens,
            labels=inputs.labels,
            token_types=inputs.token_types,
            position_ids=inputs.position_ids,
            packed_seq_params=inputs.packed_seq_params,
            pooled_tokens=inputs.pooled_tokens,
            dropout_key=inputs.dropout_key,
            hidden=hidden,
        )
