"""Embeds texts with a trained encoder of ``model.bert.head=embedding``."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.prepare.documents import text_pieces
from megalith.data.row_packing import pack_rows
from megalith.data.special_tokens import bert_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.device_copy import to_device
from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.preference import without_compiling
from megalith.models.bert_model import BertModel
from megalith.packed_seq_params import PackedSeqParams
from megalith.storage import Store, open_store, read_manifest
from megalith.training.inference import load_model
from megalith.training.run_folder import find_tokenizer, open_run
from megalith.training.tasks.weights import described_at
from megalith.wording import counted

__all__ = ["EmbeddingSource", "EncodedText", "TextEmbedder"]

log = logging.getLogger(__name__)

_TOKENS_AT_ONCE = 4096  # by default, or one row
_NUM_AROUND = 2  # special tokens around a text
# settings of the model that change nothing once it is trained, or that ``identity`` names one by one
_NOT_IN_DIGEST: Any = MappingProxyType(
    {
        **dict.fromkeys(("preset", "init_method_std", "hidden_dropout", "attention_dropout"), True),
        "residual": {"embedding_dropout"},
        "bert": {"similarity_temperature", "embedding_pooling", "normalize_embeddings"},
    }
)


class EncodedText(NamedTuple):
    """``tokens``: of a text, special tokens included. ``was_cut``: whether the text has more than fit."""

    tokens: Sequence[int]
    was_cut: bool


@dataclass(frozen=True)
class EmbeddingSource:
    """An embedding model on disk, without its weights."""

    checkpoint: Store
    config: RunConfig
    tokenizer: Tokenizer

    @classmethod
    def open(cls, source: str | Path) -> "EmbeddingSource":
        """Opens ``source``, a run or a checkpoint.

        Raises as ``open_run`` and ``find_tokenizer`` do; ConfigError for a model that does not embed texts; DataError
        if the tokenizer lacks one of BERT's special tokens, or produces ids for which the model has no row.
        """
        store = open_store(source)
        way_out = f"train one: megalith train embedding-tiny --from {source} data.train=PAIRS run=RUN"
        if (foreign := described_at(store)) is not None:
            embeds = foreign.bert is not None and foreign.bert.head == "embedding"
            raise ConfigError(
                f"{source} must be a run or a checkpoint of an embedding model; it is a model of Hugging Face or "
                f"Megatron; {f'import it: megalith convert import {source} --out RUN' if embeds else way_out}"
            )
        checkpoint, folder, config = open_run(store)
        model = config.model
        if model.bert is None or model.bert.head != "embedding":
            given = f"model.{model.kind}" if model.bert is None else f"model.bert.head={model.bert.head}"
            raise ConfigError(
                f"{source} must be an embedding model, model.bert.head=embedding; it has {given}; "
                + (way_out if model.kind == "bert" else "give the run of one")
            )
        tokenizer = find_tokenizer(folder, config)
        bert_tokens(tokenizer)
        assert model.vocab_size is not None, "set in the config.yaml of a run"
        tokenizer.check_fits(str(source), model.vocab_size)
        return cls(checkpoint, config, tokenizer)

    def identity(self) -> dict[str, str | int | bool]:
        """What the embeddings of a text depend on; it is the same for a copy of the model."""
        files = {name: record.sha256 for name, record in read_manifest(self.checkpoint).items()}
        model = self.config.model
        bert = model.bert
        assert bert is not None, "checked by open"
        # without defaults, so that a setting that a later version adds does not change it
        settings = model.model_dump(mode="json", exclude_defaults=True, exclude=dict(_NOT_IN_DIGEST))
        return {
            "checkpoint_sha256": _digest(files),
            "model_settings_sha256": _digest(settings),
            "tokenizer_sha256": self.tokenizer.sha256,
            "seq_length": self.config.data.seq_length,
            "pooling": bert.embedding_pooling,
            "normalized": bert.normalize_embeddings,
        }

    @property
    def longest(self) -> int:
        """The number of tokens that the model reads at once: of a row, or as many as it has positions."""
        row, text = self.config.data.seq_length, self.config.model.longest_text
        return row if text is None else min(row, text)

    def load(self) -> "TextEmbedder":
        """Loads the weights. Raises CheckpointError if they are damaged."""
        model = load_model(self.checkpoint).model
        assert isinstance(model, BertModel), "checked by open"
        return TextEmbedder(model, self.tokenizer, self.longest)


def _digest(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class TextEmbedder:
    """Embeds texts with ``model``; ``longest``: the number of tokens that it reads at once, special ones included."""

    model: BertModel
    tokenizer: Tokenizer
    longest: int

    @classmethod
    def load(cls, source: str | Path) -> "TextEmbedder":
        """Loads ``source``; it reads rows of ``data.seq_length`` tokens, or as many as the model has positions.

        Raises as ``EmbeddingSource`` does.
        """
        return EmbeddingSource.open(source).load()

    def embed(
        self,
        texts: Sequence[str],
        *,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """Returns the embeddings of ``texts``, [N, D] in float32 (float64 from a model in float64), on the CPU.

        Those of queries and of passages are computed alike. Logs how many texts were truncated.

        Args:
            batch_size: as in ``embed_tokens``.
            progress: as in ``embed_tokens``.

        Raises:
            ConfigError: ``batch_size`` is below 1.
        """
        encoded = self.encode(texts)
        if num_cut := sum(text.was_cut for text in encoded):
            log.warning(
                "truncated %s of %s to the %d tokens that fit into a row",
                f"{num_cut:,}",
                counted(len(texts), "text"),
                self.longest,
            )
        return self.embed_tokens([text.tokens for text in encoded], batch_size=batch_size, progress=progress)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes each text as in training, ``[CLS] text [SEP]``, truncated at the end to what fits into a row."""
        special, most = bert_tokens(self.tokenizer), self.longest - _NUM_AROUND
        pieces = [text_pieces(text) for text in texts]
        ids: list[list[int]] = [[] for _ in texts]
        unfinished = list(range(len(texts)))
        while unfinished:  # usually once: a piece is longer than most rows
            taken = [next(pieces[number]) for number in unfinished]
            of_pieces = self.tokenizer.encode_batch([piece for piece, _ in taken])
            for number, more in zip(unfinished, of_pieces, strict=True):
                ids[number] += more
            unfinished = [
                number
                for number, (_, is_last) in zip(unfinished, taken, strict=True)
                if not is_last and len(ids[number]) <= most
            ]
        return [EncodedText([special.classifier, *each[:most], special.separator], len(each) > most) for each in ids]

    def embed_tokens(
        self,
        texts: Sequence[Sequence[int]],
        *,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Tensor:
        """Returns the embeddings [N, D] of ``texts`` of token ids with their special tokens, as ``embed`` does.

        As in training, several texts share a row of ``longest`` tokens, and each is a document of its own, so that its
        embedding does not depend on the others. The longest texts come first.

        Args:
            batch_size: rows per forward; by default as many as have 4,096 tokens.
            progress: called with the number of texts done and the total, at the start and after each forward.

        Raises:
            ConfigError: ``batch_size`` is below 1.
            ShapeError: a text is empty or longer than a row.
        """
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"the batch size must be 1 or more rows of {self.longest} tokens; got {batch_size}")
        lengths = [len(text) for text in texts]
        if not all(0 < length <= self.longest for length in lengths):
            raise ShapeError(f"texts must have 1 to {self.longest} tokens; got {min(lengths)} to {max(lengths)}")
        size, done = batch_size or max(1, _TOKENS_AT_ONCE // self.longest), 0
        order, starts = pack_rows(np.array(lengths, np.int64), self.longest, np.arange(len(texts)))
        rows = [order[first:end].tolist() for first, end in pairwise(starts.tolist())]
        progress(0, len(texts))
        found: list[Tensor] = []
        with without_compiling(), torch.no_grad():
            for start in range(0, len(rows), size):
                found.append(self._forward([[texts[n] for n in row] for row in rows[start : start + size]]))
                done += len(found[-1])
                progress(done, len(texts))
        if not found:
            return torch.empty(0, self.embedding_size)
        packed = torch.cat(found)
        return torch.empty_like(packed).index_copy_(0, torch.from_numpy(order), packed)

    @property
    def embedding_size(self) -> int:
        """D."""
        bert, H = self.model.config.bert, self.model.config.hidden_size
        assert bert is not None, "an embedding model"
        return bert.embedding_size or H

    def _forward(self, rows: Sequence[Sequence[Sequence[int]]]) -> Tensor:
        """Embeds the texts in ``rows``, in order: [N, D] on the CPU."""
        S, padding = self.longest, bert_tokens(self.tokenizer).padding
        device = next(self.model.parameters()).device
        tokens = torch.full((len(rows), S), padding)  # [B, S]
        lengths, firsts = list[list[int]](), list[int]()
        for number, row in enumerate(rows):
            packed = [token for text in row for token in text]
            tokens[number, : len(packed)] = torch.tensor(packed)
            own = [len(text) for text in row]
            firsts += [number * S + sum(own[:place]) for place in range(len(own))]
            lengths.append([*own, S - len(packed)] if len(packed) < S else own)
        documents = PackedSeqParams.from_lengths(lengths)
        embeddings = self.model(
            to_device(tokens, device),
            position_ids=to_device(documents.position_ids(), device),
            packed_seq_params=documents.to(device),
            pooled_tokens=to_device(torch.tensor(firsts), device),
        )
        assert isinstance(embeddings, Tensor), "a model with the head of embeddings"
        return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)).cpu()
