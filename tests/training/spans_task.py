"""A task for T5Model on the rows of a GPT's dataset: the encoder reads a row, and the decoder every second token of it.

Rows are padded, row i of the global batch by i % 4 tokens in the encoder and by i % 3 in the decoder; or packed, where
the run resets attention masks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalith.data.gpt_dataset import GPTBatch
from megalith.models.language_model import hidden_shape
from megalith.models.t5_model import T5Model
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.transformer.encoder_output import PairedDocuments
from megalith.transformer.stage import Stage


@dataclass(frozen=True)
class SpansBatch(GPTBatch):
    """``labels`` and ``loss_mask`` belong to the decoder's rows [B, Sd]; ``documents`` to both, unsharded."""

    decoder_tokens: NDArray[np.int64]
    decoder_positions: NDArray[np.int64]
    decoder_documents: NDArray[np.int32]


@dataclass(frozen=True)
class SpansInputs:
    tokens: Tensor
    decoder_tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    decoder_position_ids: Tensor
    documents: PairedDocuments
    dropout_key: DropoutKey


class PredictSpans(PretrainGPT):
    """The decoder reads every second token; the loss is the mean over the tokens in between."""

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> T5Model:
        return T5Model(self.config.model, options, stage=stage)

    def costs(self) -> ModelCosts:
        return ModelCosts((2,) * self.config.model.total_num_layers, 1, 3)

    def hidden_shape(self, batch: GPTBatch, options: BuildOptions) -> tuple[int, ...]:
        assert isinstance(batch, SpansBatch)
        B, Se = batch.tokens.shape
        return hidden_shape(self.config.model, options, B, Se + batch.decoder_tokens.shape[1])

    def collate(self, samples: Sequence[Any], rows: Sequence[int], counted: Sequence[bool] | None = None) -> SpansBatch:
        batch = super().collate(samples, rows, counted)
        documents, decoder_documents = batch.documents, batch.documents[:, ::2]
        decoder_tokens, labels = batch.tokens[:, ::2], batch.tokens[:, 1::2]
        mask = documents[:, ::2] == documents[:, 1::2]
        if not self._packs_documents:
            Se, Sd, number = documents.shape[1], decoder_documents.shape[1], np.array(rows)[:, None]
            documents = (np.arange(Se) >= Se - number % 4).astype(np.int32)
            decoder_documents = (np.arange(Sd) >= Sd - number % 3).astype(np.int32)
            mask = decoder_documents == 0
        return SpansBatch(
            batch.tokens,
            labels,
            mask,
            documents,
            batch.num_tokens,
            batch.keeps_documents_apart,
            batch.row_ids,
            batch.positions,
            decoder_tokens=decoder_tokens,
            decoder_positions=np.arange(decoder_tokens.shape[1]),
            decoder_documents=decoder_documents,
        )

    def context_part(self, batch: GPTBatch, rank: int, size: int) -> GPTBatch:
        assert isinstance(batch, SpansBatch)
        columns = zigzag_positions(batch.tokens.shape[1], size, rank).numpy()
        decoder_columns = zigzag_positions(batch.decoder_tokens.shape[1], size, rank).numpy()
        of_decoder = {
            name: getattr(batch, name)[:, decoder_columns] for name in ("decoder_tokens", "labels", "loss_mask")
        }
        tokens = batch.tokens[:, columns]
        return replace(batch, tokens=tokens, positions=columns, decoder_positions=decoder_columns, **of_decoder)

    def counts(self, batch: GPTBatch) -> Mapping[str, int]:
        return {"lm": int(batch.loss_mask.sum())}

    def inputs(self, batch: GPTBatch, step: int, device: torch.device) -> SpansInputs:
        assert isinstance(batch, SpansBatch)
        of_encoder, of_decoder = (torch.from_numpy(each) for each in (batch.documents, batch.decoder_documents))
        if self._packs_documents:
            packed = (PackedSeqParams.from_documents(each) for each in (of_encoder, of_decoder))
            documents = PairedDocuments.from_packed(*packed)
        else:
            documents = PairedDocuments.from_padding(of_encoder == 0, of_decoder == 0)
        Se, Sd = of_encoder.shape[1], of_decoder.shape[1]
        rows, decoder_columns = torch.from_numpy(batch.row_ids).unsqueeze(1), torch.from_numpy(batch.decoder_positions)
        columns = torch.cat((torch.from_numpy(batch.positions), Se + decoder_columns))
        return SpansInputs(
            torch.from_numpy(batch.tokens),
            torch.from_numpy(batch.decoder_tokens),
            torch.from_numpy(batch.labels),
            torch.from_numpy(batch.loss_mask),
            decoder_columns,
            documents,
            DropoutKey(self.config.train.seed, step, rows * (Se + Sd) + columns),
        )

    def with_record(self, inputs: SpansInputs, record: Any) -> SpansInputs:
        return inputs

    def forward(self, model: nn.Module, inputs: SpansInputs, hidden: Tensor | None) -> Tensor:
        output: Tensor = model(
            inputs.tokens,
            inputs.decoder_tokens,
            labels=inputs.labels,
            documents=inputs.documents,
            decoder_position_ids=inputs.decoder_position_ids,
            dropout_key=inputs.dropout_key,
            hidden=hidden,
        )
        return output

    def sums(self, output: Tensor, inputs: SpansInputs) -> Mapping[str, Tensor]:
        return {"lm": torch.where(inputs.loss_mask, output, 0.0).sum()}
