"""Next-token prediction: a causal language model learns each token from the preceding ones.

Of texts, it learns every token (pretraining); of conversations, those of the assistant (supervised fine-tuning).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megalith.config import RunConfig
from megalith.config.layout import Layout
from megalith.data.blended_dataset import blended
from megalith.data.chat.dataset import ChatDataset, HeldOutChats
from megalith.data.conversations import holds_conversations
from megalith.data.fill_in_the_middle import FillInTheMiddle
from megalith.data.gpt_dataset import (
    EvaluationDataset,
    GPTBatch,
    GPTDataset,
    GPTSample,
    stack_samples,
    with_labels_ahead,
)
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.samples import Samples
from megalith.device_copy import to_device
from megalith.errors import ConfigError, DataError
from megalith.models.gpt_model import GPTModel
from megalith.models.language_model import hidden_dtype, hidden_shape
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.storage import open_store, record_of
from megalith.training.run_tokenizer import load_tokenizer
from megalith.training.tasks.conversation_settings import check_settings_of_conversations
from megalith.training.tasks.gpt_size import expert_parameters, flops_per_token, parameters, stage_costs
from megalith.training.tasks.gpt_traffic import gpt_traffic
from megalith.training.tasks.shown_text import bracketed
from megalith.training.tasks.task import StageTraffic, Task
from megalith.training.tasks.text_samples import GPTTextWriter
from megalith.transformer.stage import Stage
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["GPTInputs", "PretrainGPT"]


@dataclass(frozen=True)
class GPTInputs:
    """Tokens and labels int64 [B, S/cp]; loss_mask bool [B, S/cp]; position_ids int64 [S/cp] or [B, S/cp].

    With multi-token prediction, labels and loss_mask are [1+M, B, S/cp]. padding_mask is bool [B, S/cp], True for real
    tokens; None if no row of the micro-batch is padded.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    padding_mask: Tensor | None
    packed_seq_params: PackedSeqParams | None
    dropout_key: DropoutKey
    record: MicroBatchRecord | None = None


class PretrainGPT(Task[GPTSample, GPTBatch, GPTInputs]):
    """Training of a GPT: the term ``lm`` is the mean negative log-likelihood in nats of the tokens that the mask keeps.

    With multi-token prediction, ``mtp_1`` ... ``mtp_M`` are the terms of the tokens 1 ... M further ahead, each a mean
    over its own unmasked tokens, with the weight ``loss_weight`` / M (arXiv:2412.19437, equation 25).

    Raises:
        ConfigError: settings of ``data`` that are for another kind of model.
    """

    terms = MappingProxyType({"lm": 1.0})

    def __init__(self, config: RunConfig) -> None:
        vocab_size = config.model.vocab_size
        assert vocab_size is not None, "set by preflight"
        for name in ("masking", "decoder_seq_length"):
            if getattr(config.data, name) is not None:
                raise ConfigError(
                    f"data.{name} is for models that predict masked tokens, such as model.t5; leave it out"
                )
        self.config = config
        self.tokens_per_sample = config.data.seq_length
        S = config.data.seq_length
        self.flops_per_sample = flops_per_token(config.model, vocab_size, S) * S
        self.num_parameters = parameters(config.model, vocab_size)
        self.num_expert_parameters = expert_parameters(config.model, vocab_size)
        mtp = config.model.mtp
        # the loss term of each depth of labels
        self._depths = ["lm"] if mtp is None else ["lm", *(f"mtp_{depth + 1}" for depth in range(mtp.num_modules))]
        if mtp is not None:
            weights = dict.fromkeys(self._depths[1:], mtp.loss_weight / mtp.num_modules)
            self.terms = MappingProxyType({**self.terms, **weights})
        num_layers = config.model.num_layers + (0 if mtp is None else mtp.num_modules)
        if (moe := config.model.moe) is not None:
            with_experts = (layer for layer in range(num_layers) if moe.has_experts(layer))
            self.routed_layers = MappingProxyType(dict.fromkeys(with_experts, moe))
        self._packs_documents = config.data.reset_attention_mask
        self._resets_positions = config.data.reset_position_ids

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> GPTModel:
        """Builds the model that the ``model`` settings describe, or a stage of it."""
        return GPTModel(self.config.model, options, stage=stage)

    def costs(self) -> ModelCosts:
        """Returns the FLOPs per token."""
        assert self.config.model.vocab_size is not None, "set by preflight"
        return stage_costs(self.config.model, self.config.model.vocab_size, self.config.data.seq_length)

    def traffic(self, layout: Layout, stage: Stage | None = None) -> StageTraffic:
        """Counts traffic in closed form."""
        return gpt_traffic(self.config, layout, stage or Stage.whole(self.config.model.num_layers))

    def hidden_shape(self, batch: GPTBatch, options: BuildOptions) -> tuple[int, ...]:
        """[S/tp, B, H] under sequence parallelism, else [S, B, H]."""
        B, S = batch.tokens.shape
        return hidden_shape(self.config.model, options, B, S)

    def hidden_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Returns float32 or wider if ``model.residual.fp32`` is set."""
        return hidden_dtype(self.config.model, compute_dtype)

    def train_dataset(self) -> Samples[GPTSample]:
        """Returns ``data.train`` in the order of ``train.seed``, with ``data.fill_in_the_middle`` applied to documents.

        Raises:
            DataError: the data or the tokenizer cannot be read, or it does not support fill-in-the-middle.
            ConfigError: the model has no row for one of the three tokens of fill-in-the-middle, or a setting has no
                effect on these data.
        """
        check_settings_of_conversations(self.config.data)
        return blended(self.config.data, partial(self._train_dataset, fill_in_the_middle=self._fill_in_the_middle()))

    def _train_dataset(self, prefix: str, fill_in_the_middle: FillInTheMiddle | None) -> GPTDataset | ChatDataset:
        dataset, seed = IndexedDataset(prefix), self.config.train.seed
        if holds_conversations(dataset):
            return self._chats(dataset, seed)
        return GPTDataset(
            dataset,
            self.config.data.seq_length,
            seed,
            mask_eod=self.config.data.eod_mask_loss,
            vocab_size=self.config.model.vocab_size,
            fill_in_the_middle=fill_in_the_middle,
        )

    def data_identity(self, dataset: Samples[GPTSample]) -> Mapping[str, Any]:
        """Returns the dataset's identity; if its files do not name their tokenizer, ``data.tokenizer`` is used."""
        identity, path = super().data_identity(dataset), self.config.data.tokenizer
        if path is None or identity.get("tokenizer") is not None:
            return identity
        folder, name = open_store(path).split()
        return {**identity, "tokenizer": record_of(folder.parts(name)).sha256}

    def evaluation_dataset(self, prefix: str) -> EvaluationDataset | HeldOutChats:
        """Returns samples with every token of ``prefix`` except the first as a label, once.

        Of conversations, the labels with a loss are those of the assistant.
        """
        data, dataset = self.config.data, IndexedDataset(prefix)
        if holds_conversations(dataset):
            return HeldOutChats(self._chats(dataset, seed=0))
        return EvaluationDataset(
            dataset, data.seq_length, mask_eod=data.eod_mask_loss, vocab_size=self.config.model.vocab_size
        )

    def collate(
        self, samples: Sequence[GPTSample], rows: Sequence[int], counted: Sequence[bool] | None = None
    ) -> GPTBatch:
        """Stacks the samples, one per row."""
        batch = stack_samples(samples, rows)
        if counted is not None:
            batch.loss_mask[~np.array(counted)] = False
        mtp = self.config.model.mtp
        return batch if mtp is None else with_labels_ahead(batch, mtp.num_modules)

    def context_part(self, batch: GPTBatch, rank: int, size: int) -> GPTBatch:
        """Returns the columns that ``rank`` holds; document boundaries still describe whole rows."""
        columns = zigzag_positions(batch.tokens.shape[1], size, rank).numpy()
        own = {name: getattr(batch, name)[..., columns] for name in ("tokens", "labels", "loss_mask")}
        return replace(batch, positions=columns, **own)

    def counts(self, batch: GPTBatch) -> Mapping[str, int]:
        """Returns the number of tokens with a loss, for each term."""
        B, S = batch.tokens.shape
        masks = batch.loss_mask.reshape(-1, B, S)  # [1+M, B, S]
        return {term: int(mask.sum()) for term, mask in zip(self._depths, masks, strict=True)}

    def inputs(self, batch: GPTBatch, step: int, device: torch.device) -> GPTInputs:
        """Moves ``batch`` to ``device``.

        A token's dropout depends on its row in the global batch and its position in the row, not on how the batch is
        split.
        """
        S, columns = batch.documents.shape[1], torch.from_numpy(batch.positions)  # [S/cp]
        packed = _documents_apart(batch, self._packs_documents)
        with_own_positions = packed
        if self._resets_positions != self._packs_documents:
            with_own_positions = _documents_apart(batch, self._resets_positions)
        positions = columns
        if with_own_positions is not None:
            positions = with_own_positions.position_ids()[:, columns]  # [B, S/cp]
        rows = torch.from_numpy(batch.row_ids).unsqueeze(1)  # [B, 1]
        token_ids = to_device(rows * S + columns, device)  # [B, S/cp]
        is_padded, is_token = (batch.num_tokens < S).any(), batch.positions < batch.num_tokens[:, None]  # [B, S/cp]
        return GPTInputs(
            to_device(batch.tokens, device),
            to_device(batch.labels, device),
            to_device(batch.loss_mask, device),
            to_device(positions, device),
            to_device(is_token, device) if is_padded else None,
            None if packed is None else packed.to(device),
            DropoutKey(self.config.train.seed, step, token_ids),
        )

    def with_record(self, inputs: GPTInputs, record: MicroBatchRecord) -> GPTInputs:
        """Returns ``inputs`` with ``record``."""
        return replace(inputs, record=record)

    def forward(self, model: nn.Module, inputs: GPTInputs, hidden: Tensor | None) -> Tensor:
        """Returns the loss of each label, [B, S] or [1+M, B, S]; without the head, hidden states [S, B, H]."""
        output: Tensor = model(
            inputs.tokens,
            labels=inputs.labels,
            position_ids=inputs.position_ids,
            padding_mask=inputs.padding_mask,
            packed_seq_params=inputs.packed_seq_params,
            dropout_key=inputs.dropout_key,
            hidden=hidden,
            record=inputs.record,
        )
        return output

    def sums(self, output: Tensor, inputs: GPTInputs) -> Mapping[str, Tensor]:
        """Sums the losses of the tokens that the mask keeps, for each term."""
        # torch.where and not a product, because inf * 0 at a masked token would be NaN
        kept = torch.where(inputs.loss_mask, output, 0.0).reshape(-1, *inputs.tokens.shape)  # [1+M, B, S]
        return {term: losses.sum() for term, losses in zip(self._depths, kept, strict=True)}

    def sample_as_text(self, sample: GPTSample) -> list[str]:
        """Decodes the labels, with those without a loss in brackets; shows token ids if the tokenizer is unknown."""
        try:
            tokenizer = load_tokenizer(self.config)
        except DataError:
            tokenizer = None
        return bracketed(sample.labels.tolist(), (~sample.loss_mask).tolist(), tokenizer)

    def _chats(self, dataset: IndexedDataset, seed: int) -> ChatDataset:
        data = self.config.data
        return ChatDataset(
            dataset,
            data.seq_length,
            seed,
            long_conversations=data.long_conversations or "refuse",
            vocab_size=self.config.model.vocab_size,
        )

    def _fill_in_the_middle(self) -> FillInTheMiddle | None:
        settings, vocab_size = self.config.data.fill_in_the_middle, self.config.model.vocab_size
        if settings is None:
            return None
        found = FillInTheMiddle.of(load_tokenizer(self.config), settings)
        needed = 1 + max(found.prefix, found.middle, found.suffix)
        assert vocab_size is not None, "set by preflight"
        if needed > vocab_size:
            raise ConfigError(
                f"model.vocab_size ({vocab_size}) must be at least {needed}, because data.fill_in_the_middle uses "
                f"special tokens of {found.tokenizer.name}; use {found.tokenizer.vocab_size}"
            )
        return found

    def text_writer(self) -> GPTTextWriter:
        """Returns a writer that continues the prompts of ``train.generation`` with the run's tokenizer."""
        return GPTTextWriter(self.config, load_tokenizer(self.config))


def _documents_apart(batch: GPTBatch, of_all_rows: bool) -> PackedSeqParams | None:
    """The documents of the rows that keep them apart, or ``of_all_rows``; another row is one document.

    None if there is no such row.
    """
    is_apart = batch.keeps_documents_apart | of_all_rows  # [B]
    if not is_apart.any():
        return None
    return PackedSeqParams.from_documents(torch.from_numpy(np.where(is_apart[:, None], batch.documents, 0)))
