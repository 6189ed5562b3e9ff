"""Trains an encoder to embed texts for retrieval: a query is close to its passage, and far from all other passages.

Pairs are those of ``megalith data pairs``, or made from plain text by the inverse cloze task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalith.config import RunConfig, batch_size_stages
from megalith.data.blended_dataset import blended
from megalith.data.conversations import holds_pairs
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.pairs.dataset import PairBatch, PairDataset, PairSample, PairTexts, stack_pairs
from megalith.data.pairs.inverse_cloze import InverseClozeDataset
from megalith.data.samples import Samples, SizedSamples
from megalith.data.sentence_dataset import HeldOutSamples
from megalith.data.special_tokens import bert_tokens
from megalith.device_copy import to_device
from megalith.errors import ConfigError
from megalith.models.contrastive import contrastive_losses, gather_passages, places_of_positives
from megalith.models.language_model import hidden_shape
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.topology.collectives import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.tasks.bert_task import EncoderTask
from megalith.training.tasks.masked_task import HELD_OUT_SEED
from megalith.training.tasks.shown_text import bracketed
from megalith.training.tasks.task import JointTask

__all__ = ["ComparedTexts", "EmbeddingInputs", "TrainEmbedding"]

_IN_BLOCK = 0.1  # as in arXiv:1906.00300
_TOP = (1, 5, 20)  # as in DPR's evaluation, arXiv:2004.04906


@dataclass(frozen=True)
class ComparedTexts:
    """Which texts the N embeddings of a micro-batch of B rows are of; T texts per row.

    Attributes:
        slots: int64 [N], b * T + t for each of them.
        text_ids: int64 [B, T].
        row_ids: int64 [B].
        is_counted: bool [B].
        counted: int64 [n], the rows whose queries count on this rank.
    """

    slots: Tensor
    text_ids: Tensor
    row_ids: Tensor
    is_counted: Tensor
    counted: Tensor


@dataclass(frozen=True)
class EmbeddingInputs:
    """A micro-batch as ``BertModel.forward`` takes it, and the texts whose embeddings are its output.

    Attributes:
        tokens, position_ids: int64 [B, S/cp]; positions restart in every text.
        packed_seq_params: the texts of whole rows, and their padding.
        pooled_tokens: int64 [N], the index of the first token of each text that begins on this rank.
    """

    tokens: Tensor
    position_ids: Tensor
    packed_seq_params: PackedSeqParams
    pooled_tokens: Tensor
    dropout_key: DropoutKey
    texts: ComparedTexts


class TrainEmbedding(
    EncoderTask[PairSample, PairBatch, EmbeddingInputs], JointTask[PairSample, PairBatch, EmbeddingInputs]
):
    """Contrastive training: the term ``contrastive`` is the mean negative log-likelihood in nats of a query's passage.

    The candidates are all passages of the global batch, positives and hard negatives, in any layout and with any
    micro-batch size. In evaluation they are those of as many consecutive samples as the last global batch has, so that
    the loss is comparable (``Passages.outside_batches``). Evaluation also measures, among all passages of the evaluated
    samples, how often the positive is among the first k (``top_1_accuracy``, ``top_5_accuracy``, ``top_20_accuracy``),
    and the mean reciprocal rank, ``mrr``.

    Raises:
        ConfigError: as ``EncoderTask``; or ``data.masking`` is set, which this task does not use.
    """

    terms = MappingProxyType({"contrastive": 1.0})
    in_brackets = "special tokens"
    counted = "queries"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, num_texts=2 + config.data.num_negatives)
        if config.data.masking is not None:
            raise ConfigError("data.masking is for pretraining; bert.head=embedding masks nothing; leave it out")

    def train_dataset(self) -> Samples[PairSample]:
        """Returns ``data.train`` in the order of ``train.seed``: pairs, or those made from plain text.

        Raises ConfigError for settings that do not apply to any of the datasets.
        """
        data = self.config.data
        prefixes = data.train_sets.values()
        if data.query_in_block_probability is not None and all(holds_pairs(IndexedDataset(name)) for name in prefixes):
            raise ConfigError(
                f"data.query_in_block_probability is for pairs made from text; {', '.join(prefixes)} "
                f"{'holds' if len(prefixes) == 1 else 'hold'} pairs; leave it out"
            )
        return blended(data, self._dataset)

    def evaluation_dataset(self, prefix: str) -> SizedSamples[PairSample]:
        """Returns the pairs of ``prefix``, each once with its first negatives; or one of each block of plain text."""
        if not holds_pairs(IndexedDataset(prefix)):
            return HeldOutSamples(self._from_text(prefix, HELD_OUT_SEED))
        return self._pairs(prefix)

    def hidden_shape(self, batch: PairBatch, options: BuildOptions) -> tuple[int, ...]:
        """[S/tp, B, H] under sequence parallelism, else [S, B, H]."""
        B, S = batch.tokens.shape
        return hidden_shape(self.config.model, options, B, S)

    def collate(
        self, samples: Sequence[PairSample], rows: Sequence[int], counted: Sequence[bool] | None = None
    ) -> PairBatch:
        """Packs the texts of each sample into a row."""
        batch = stack_pairs(samples, rows, self.config.data.seq_length, bert_tokens(self.tokenizer).padding)
        return batch if counted is None else batch.counting(counted)

    def context_part(self, batch: PairBatch, rank: int, size: int) -> PairBatch:
        """Returns the columns that ``rank`` holds; all else still describes whole rows."""
        return batch.columns(zigzag_positions(batch.tokens.shape[1], size, rank).numpy())

    def counts(self, batch: PairBatch) -> Mapping[str, int]:
        """Returns the number of queries that begin on this rank."""
        return dict.fromkeys(["contrastive", *(f"top_{k}_accuracy" for k in _TOP), "mrr"], len(_counted(batch)))

    def inputs(self, batch: PairBatch, step: int, device: torch.device) -> EmbeddingInputs:
        """Moves ``batch`` to ``device``.

        A token's dropout depends on its row in the global batch and its position in the row.
        """
        S, columns = self.config.data.seq_length, torch.from_numpy(batch.positions)  # [S/cp]
        texts = PackedSeqParams.from_lengths([_with_padding(row, S) for row in batch.lengths.tolist()])
        # padding may be longer than the table of positions
        is_padding = torch.arange(S) >= torch.from_numpy(batch.lengths).sum(dim=1, keepdim=True)  # [B, S]
        position_ids = texts.position_ids().masked_fill(is_padding, 0)
        starts = np.cumsum(batch.lengths, axis=1) - batch.lengths  # [B, T]
        column_of = np.full(S, -1)
        column_of[batch.positions] = np.arange(len(batch.positions))
        columns_of_texts = column_of[starts]  # [B, T], -1 on other ranks
        slots = np.flatnonzero(columns_of_texts >= 0)  # [N]
        pooled = slots // starts.shape[1] * len(batch.positions) + columns_of_texts.flatten()[slots]
        rows = torch.from_numpy(batch.row_ids)
        return EmbeddingInputs(
            to_device(batch.tokens, device),
            to_device(position_ids[:, columns], device),
            texts.to(device),
            to_device(pooled, device),
            DropoutKey(self.config.train.seed, step, to_device(rows.unsqueeze(1) * S + columns, device)),
            ComparedTexts(
                to_device(slots, device),
                to_device(batch.text_ids, device),
                to_device(rows, device),
                to_device(batch.counted, device),
                to_device(_counted(batch), device),
            ),
        )

    def forward(self, model: nn.Module, inputs: EmbeddingInputs, hidden: Tensor | None) -> Tensor:
        """Returns embeddings [N, D]; without the head, hidden states [S, B, H]."""
        output: Tensor = model(
            inputs.tokens,
            position_ids=inputs.position_ids,
            packed_seq_params=inputs.packed_seq_params,
            pooled_tokens=inputs.pooled_tokens,
            dropout_key=inputs.dropout_key,
            hidden=hidden,
        )
        return output

    def compared(self, inputs: EmbeddingInputs) -> ComparedTexts:
        """Returns ``inputs.texts``: tokens need not be kept."""
        return inputs.texts

    def joint_sums(
        self, outputs: Sequence[Tensor], compared: Sequence[ComparedTexts], pg_collection: ProcessGroupCollection
    ) -> Mapping[str, Tensor]:
        """Sums the losses of this rank's queries; in evaluation also counts how often their positive is at the top."""
        in_training = outputs[0].requires_grad
        parts = [self._rows(*part) for part in zip(outputs, compared, strict=True)]
        embeddings = torch.cat(parts)  # [R, T, D]
        cp, dp = pg_collection.cp, pg_collection.dp
        embeddings = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(embeddings, cp), cp)
        text_ids = torch.cat([each.text_ids for each in compared])  # [R, T]
        rows = torch.cat([each.counted + number * len(parts[0]) for number, each in enumerate(compared)])
        places, batch_size = torch.zeros_like(text_ids[:, 0]), None
        if not in_training:
            places = _places(compared, pg_collection)
            batch_size = batch_size_stages(self.config.train, self.config.data.seq_length)[-1].global_batch_size
        passages = gather_passages(embeddings[:, 1:], text_ids, places, dp)
        queries, temperature = embeddings[rows, 0], self.bert.similarity_temperature
        found = {"contrastive": contrastive_losses(queries, rows, passages, temperature, batch_size).sum()}
        if in_training:
            return found
        ranks = places_of_positives(queries, rows, passages)
        tops = {f"top_{k}_accuracy": (ranks <= k).sum().float() for k in _TOP}
        return {**found, **tops, "mrr": (1 / ranks.double()).sum()}

    def sample_as_text(self, sample: PairSample) -> list[str]:
        """Decodes the query and its passages, one after the other."""
        names = ["query", "positive", *["negative"] * (len(sample.texts) - 2)]
        lines = []
        for name, text in zip(names, sample.texts, strict=True):
            is_special = [place in (0, len(text) - 1) for place in range(len(text))]
            lines += [f"{name}:", *bracketed(text.tolist(), is_special, self.tokenizer)]
        return lines

    def _rows(self, output: Tensor, texts: ComparedTexts) -> Tensor:
        """Embeddings [B, T, D] of a micro-batch from [N, D]; zeros for texts that begin on another rank."""
        B, T = texts.text_ids.shape
        return output.new_zeros(B * T, output.shape[1]).index_copy(0, texts.slots, output).view(B, T, -1)

    def _dataset(self, prefix: str) -> PairDataset | InverseClozeDataset:
        """The training samples of ``prefix``."""
        data, seed = self.config.data, self.config.train.seed
        if holds_pairs(IndexedDataset(prefix)):
            return PairDataset(self._pairs(prefix), seed)
        if data.num_negatives:
            raise ConfigError(
                f"data.num_negatives ({data.num_negatives}) must be 0 for {prefix}, which holds text: pairs made from "
                "text have no hard negatives; leave it out, or prepare pairs with: megalith data pairs"
            )
        return self._from_text(prefix, seed)

    def _pairs(self, prefix: str) -> PairTexts:
        data, vocab_size = self.config.data, self.config.model.vocab_size
        return PairTexts(
            prefix,
            self.tokenizer,
            data.seq_length,
            num_negatives=data.num_negatives,
            vocab_size=vocab_size,
            num_positions=self.config.model.longest_text,
        )

    def _from_text(self, prefix: str, seed: int) -> InverseClozeDataset:
        data, vocab_size, positions = self.config.data, self.config.model.vocab_size, self.config.model.longest_text
        if positions is not None and positions < data.seq_length:
            raise ConfigError(
                f"model.max_position_embeddings ({positions}) must be at least data.seq_length ({data.seq_length}) for "
                f"{prefix}, which holds text: a block of it may fill a row; use data.seq_length={positions}"
            )
        given = data.query_in_block_probability
        kept = _IN_BLOCK if given is None else given
        return InverseClozeDataset(
            prefix, self.tokenizer, data.seq_length, seed, keep_probability=kept, vocab_size=vocab_size
        )


def _places(compared: Sequence[ComparedTexts], pg_collection: ProcessGroupCollection) -> Tensor:
    """Returns int64 [R]: the place of each row among the evaluated samples, -1 for padding."""
    is_counted = torch.cat([each.is_counted for each in compared])
    row_ids = torch.cat([each.row_ids for each in compared])
    last = torch.iinfo(row_ids.dtype).max
    of_all = gather_from_sequence_parallel_region(row_ids.where(is_counted, last), pg_collection.dp)
    return torch.where(is_counted, torch.searchsorted(of_all.sort().values, row_ids), -1)


def _counted(batch: PairBatch) -> NDArray[np.int64]:
    """The rows that count and whose query, at position 0, is on this rank."""
    return np.flatnonzero(batch.counted) if batch.positions[0] == 0 else np.zeros(0, np.int64)


def _with_padding(lengths: Sequence[int], seq_length: int) -> list[int]:
    """The lengths of a row's texts, and of the padding after them if there is any."""
    rest = seq_length - sum(lengths)
    return [*lengths, rest] if rest else [*lengths]
