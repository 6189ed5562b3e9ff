"""T5 pretraining: predicts the missing spans of a text (Raffel et al. 2019, arXiv:1910.10683)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megalith.config import MaskingConfig, RunConfig
from megalith.config.draft import round_up
from megalith.config.layout import Layout
from megalith.data.blended_dataset import blended
from megalith.data.samples import Samples
from megalith.data.sentence_dataset import HeldOutSamples
from megalith.data.special_tokens import t5_tokens
from megalith.data.t5_dataset import T5Batch, T5Dataset, T5Sample, decoder_length, fill_spans, stack_t5_samples
from megalith.device_copy import to_device
from megalith.errors import ConfigError
from megalith.models.language_model import hidden_shape
from megalith.models.t5_model import T5Model
from megalith.numerics.dropout import DropoutKey
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.training.tasks.masked_task import HELD_OUT_SEED, MaskedTask
from megalith.training.tasks.shown_text import bracketed
from megalith.training.tasks.t5_size import t5_costs
from megalith.training.tasks.t5_traffic import t5_traffic
from megalith.training.tasks.task import StageTraffic
from megalith.training.tasks.text_samples import T5TextWriter
from megalith.transformer.encoder_output import PairedDocuments
from megalith.transformer.stage import Stage

__all__ = ["PretrainT5", "T5Inputs"]

_MULTIPLE = 16  # the decoder's default length is a multiple of it, so that the usual degrees divide the length


@dataclass(frozen=True)
class T5Inputs:
    """A micro-batch as ``T5Model.forward`` takes it.

    Attributes:
        tokens: int64 [B, Se/cp].
        decoder_tokens, labels: int64 [B, Sd/cp]; labels are -1 after the end of the decoder's row.
        is_text: bool [B, Sd/cp], True for labels that belong to the text: neither sentinels nor the end token.
        decoder_position_ids: int64 [Sd/cp].
        documents: tokens and padding of whole rows.
    """

    tokens: Tensor
    decoder_tokens: Tensor
    labels: Tensor
    is_text: Tensor
    decoder_position_ids: Tensor
    documents: PairedDocuments
    dropout_key: DropoutKey


class PretrainT5(MaskedTask[T5Sample, T5Batch, T5Inputs]):
    """T5 pretraining: the term ``lm`` is the mean negative log-likelihood in nats of the decoder's tokens.

    Evaluation also measures ``span_accuracy``: the share of tokens in missing spans for which the model's most likely
    token is correct.

    Raises:
        ConfigError: as ``MaskedTask``; or the decoder's length cannot be split over the ranks of a row.
    """

    terms = MappingProxyType({"lm": 1.0})
    in_brackets = "spans hidden from the encoder"

    def __init__(self, config: RunConfig) -> None:
        assert config.model.vocab_size is not None, "set by preflight"
        self.masking = config.data.masking or MaskingConfig()
        S, given = config.data.seq_length, config.data.decoder_seq_length
        self.decoder_seq_length = given or round_up(decoder_length(S, self.masking.probability), _MULTIPLE)
        self._check_split(config)
        costs = t5_costs(config.model, config.model.vocab_size, S, self.decoder_seq_length)
        super().__init__(config, costs, S + self.decoder_seq_length)

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> T5Model:
        """Builds the model that the ``model`` settings describe, or a stage of it."""
        return T5Model(self.config.model, options, stage=stage)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The lengths of the encoder's and the decoder's row."""
        return self.config.data.seq_length, self.decoder_seq_length

    def traffic(self, layout: Layout, stage: Stage | None = None) -> StageTraffic:
        """Counts traffic in closed form."""
        stage = stage or Stage.whole(self.config.model.total_num_layers)
        return t5_traffic(self.config, layout, stage, self.decoder_seq_length)

    def hidden_shape(self, batch: T5Batch, options: BuildOptions) -> tuple[int, ...]:
        """[(Se + Sd)/tp, B, H] under sequence parallelism, else [Se + Sd, B, H]."""
        B, Se = batch.tokens.shape
        return hidden_shape(self.config.model, options, B, Se + batch.decoder_tokens.shape[1])

    def train_dataset(self) -> Samples[T5Sample]:
        """Returns ``data.train`` in the order of ``train.seed``."""
        return blended(self.config.data, partial(self._dataset, seed=self.config.train.seed))

    def evaluation_dataset(self, prefix: str) -> HeldOutSamples[T5Sample]:
        """Returns the samples of one epoch of ``prefix``, with fixed missing spans."""
        return HeldOutSamples(self._dataset(prefix, HELD_OUT_SEED))

    def collate(
        self, samples: Sequence[T5Sample], rows: Sequence[int], counted: Sequence[bool] | None = None
    ) -> T5Batch:
        """Stacks the samples, one per row."""
        batch = stack_t5_samples(samples, rows)
        if counted is not None:
            batch.loss_mask[~np.array(counted)] = False
        return batch

    def context_part(self, batch: T5Batch, rank: int, size: int) -> T5Batch:
        """Returns the columns that ``rank`` holds of both rows; token counts still describe whole rows."""
        Se, Sd = batch.tokens.shape[1], batch.decoder_tokens.shape[1]
        return batch.columns(*(zigzag_positions(S, size, rank).numpy() for S in (Se, Sd)))

    def counts(self, batch: T5Batch) -> Mapping[str, int]:
        """Returns the number of tokens that the decoder learns, and how many of them belong to the text."""
        return {"lm": int(batch.loss_mask.sum()), "span_accuracy": int(self._is_text(batch).sum())}

    def inputs(self, batch: T5Batch, step: int, device: torch.device) -> T5Inputs:
        """Moves ``batch`` to ``device``.

        A token's dropout depends on its row in the global batch and its position in the encoder's or the decoder's row.
        """
        Se, Sd = self.config.data.seq_length, self.decoder_seq_length
        is_token, is_decoder_token = (
            torch.arange(S) < torch.from_numpy(number).unsqueeze(1)
            for S, number in ((Se, batch.num_tokens), (Sd, batch.num_decoder_tokens))
        )
        columns, decoder_columns = torch.from_numpy(batch.positions), torch.from_numpy(batch.decoder_positions)
        rows = torch.from_numpy(batch.row_ids).unsqueeze(1)  # [B, 1]
        token_ids = rows * (Se + Sd) + torch.cat((columns, Se + decoder_columns))  # [B, (Se + Sd)/cp]
        return T5Inputs(
            to_device(batch.tokens, device),
            to_device(batch.decoder_tokens, device),
            to_device(np.where(batch.loss_mask, batch.labels, -1), device),
            to_device(self._is_text(batch), device),
            to_device(decoder_columns, device),
            PairedDocuments.from_padding(is_token, is_decoder_token).to(device),
            DropoutKey(self.config.train.seed, step, to_device(token_ids, device)),
        )

    def forward(self, model: nn.Module, inputs: T5Inputs, hidden: Tensor | None) -> Tensor:
        """Returns the loss of each label, [B, Sd]; in evaluation logits [B, Sd, V]; without the head, hidden states."""
        output: Tensor = model(
            inputs.tokens,
            inputs.decoder_tokens,
            labels=inputs.labels.clamp(min=0) if model.training else None,
            documents=inputs.documents,
            decoder_position_ids=inputs.decoder_position_ids,
            dropout_key=inputs.dropout_key,
            hidden=hidden,
        )
        return output

    def sums(self, output: Tensor, inputs: T5Inputs) -> Mapping[str, Tensor]:
        """Sums the decoder's losses; in evaluation also the number of text tokens that are predicted correctly."""
        learned = inputs.labels >= 0
        if output.dim() == learned.dim():
            return {"lm": torch.where(learned, output, 0.0).sum()}
        logits, labels = output[learned], inputs.labels[learned]  # [N, V], [N]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        hits = (logits.argmax(-1) == labels) & inputs.is_text[learned]
        return {"lm": cross_entropy(wide, labels, reduction="sum"), "span_accuracy": hits.sum().float()}

    def sample_as_text(self, sample: T5Sample) -> list[str]:
        """Decodes the text, with the missing spans restored in brackets."""
        text, is_missing = fill_spans(sample, t5_tokens(self.tokenizer))
        return bracketed(text.tolist(), is_missing.tolist(), self.tokenizer)

    def text_writer(self) -> T5TextWriter:
        """Returns a writer that fills the gaps in the prompts of ``train.generation``."""
        return T5TextWriter(self.config, self.tokenizer)

    def _is_text(self, batch: T5Batch) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Returns bool [B, Sd]: True for labels that belong to the text."""
        special = t5_tokens(self.tokenizer)
        not_text = np.append(special.sentinels, special.end)
        return batch.loss_mask & ~np.isin(batch.labels, not_text)

    def _dataset(self, prefix: str, seed: int) -> T5Dataset:
        return T5Dataset(
            prefix,
            self.tokenizer,
            self.config.data.seq_length,
            self.decoder_seq_length,
            seed,
            self.masking,
            vocab_size=self.config.model.vocab_size,
        )

    def _check_split(self, config: RunConfig) -> None:
        parallel, T = config.parallel, self.decoder_seq_length
        pieces = (2 * parallel.context if parallel.context > 1 else 1) * (parallel.tensor if parallel.sequence else 1)
        if T % pieces:
            raise ConfigError(
                f"data.decoder_seq_length ({T}) must be divisible by {pieces}, the number of pieces that "
                f"parallel.context and parallel.sequence split it into; use {round_up(T, pieces)}"
            )
