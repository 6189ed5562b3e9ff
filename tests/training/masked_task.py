"""A task for BertModel on the rows of a GPT dataset: masked tokens and texts in two classes, computed by formula.

Rows are padded, row i of the global batch by i % 4 tokens; or packed, where the run resets attention masks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalith.data.gpt_dataset import GPTBatch
from megalith.models.bert_model import BertModel, BertOutput
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.training.tasks.pretrain_gpt import GPTInputs, PretrainGPT
from megalith.transformer.stage import Stage


@dataclass(frozen=True)
class MaskedBatch(GPTBatch):
    """``classes`` int64 [B, S]: the class of the text that begins at a token, -1 at other tokens."""

    classes: NDArray[np.int64]


@dataclass(frozen=True)
class MaskedInputs:
    gpt: GPTInputs
    classes: Tensor  # int64 [N]
    pooled_tokens: Tensor  # int64 [N]


class PredictMasked(PretrainGPT):
    """The mean loss of masked tokens, plus half of the mean loss of texts."""

    terms = MappingProxyType({"lm": 1.0, "text": 0.5})

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> BertModel:
        return BertModel(self.config.model, options, stage=stage)

    def collate(
        self, samples: Sequence[Any], rows: Sequence[int], counted: Sequence[bool] | None = None
    ) -> MaskedBatch:
        batch = super().collate(samples, rows, counted)
        S = batch.tokens.shape[1]
        columns, tokens = np.arange(S), batch.tokens
        is_token, documents = np.ones_like(tokens, dtype=bool), batch.documents
        if not self._packs_documents:
            is_token = columns < S - np.array(rows)[:, None] % 4
            documents = (~is_token).astype(np.int32)
        masked = is_token & ((tokens + columns) % 5 == 1)
        begins = is_token & np.diff(documents, axis=1, prepend=-1).astype(bool)
        return MaskedBatch(
            np.where(masked, 3, tokens),
            np.where(masked, tokens, -1),
            masked,
            documents,
            batch.num_tokens,
            batch.keeps_documents_apart,
            batch.row_ids,
            batch.positions,
            classes=np.where(begins, tokens % 2, -1),
        )

    def context_part(self, batch: GPTBatch, rank: int, size: int) -> GPTBatch:
        assert isinstance(batch, MaskedBatch)
        columns = zigzag_positions(batch.tokens.shape[1], size, rank).numpy()
        return replace(super().context_part(batch, rank, size), classes=batch.classes[:, columns])

    def counts(self, batch: GPTBatch) -> Mapping[str, int]:
        assert isinstance(batch, MaskedBatch)
        return {"lm": int(batch.loss_mask.sum()), "text": int((batch.classes >= 0).sum())}

    def inputs(self, batch: GPTBatch, step: int, device: torch.device) -> MaskedInputs:
        assert isinstance(batch, MaskedBatch)
        found = super().inputs(batch, step, device)
        found = replace(found, packed_seq_params=PackedSeqParams.from_documents(torch.from_numpy(batch.documents)))
        classes = torch.from_numpy(batch.classes).flatten()
        pooled = (classes >= 0).nonzero().flatten()
        return MaskedInputs(found, classes[pooled], pooled)

    def with_record(self, inputs: MaskedInputs, record: Any) -> MaskedInputs:
        return inputs

    def forward(self, model: nn.Module, inputs: MaskedInputs, hidden: Tensor | None) -> Any:
        given = inputs.gpt
        return model(
            given.tokens,
            labels=given.labels,
            token_types=(given.position_ids % 2).expand_as(given.tokens),
            position_ids=given.position_ids,
            packed_seq_params=given.packed_seq_params,
            pooled_tokens=inputs.pooled_tokens,
            dropout_key=given.dropout_key,
            hidden=hidden,
        )

    def sums(self, output: BertOutput, inputs: MaskedInputs) -> Mapping[str, Tensor]:
        texts = nn.functional.cross_entropy(output.binary_logits, inputs.classes, reduction="sum")
        return {"lm": output.predictions.sum(), "text": texts}
