"""Fine-tunes a pretrained encoder to classify texts, from a pooled hidden state."""

import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith.config import RunConfig
from megalith.data.bert_dataset import BertBatch
from megalith.data.class_names import listed
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.labelled import Labels
from megalith.data.labelled_dataset import LabelledDataset, LabelledText, LabelledTexts, stack_labelled_texts
from megalith.data.samples import SizedSamples
from megalith.data.special_tokens import bert_tokens
from megalith.errors import ConfigError, DataError
from megalith.training.tasks.bert_task import BertInputs, BertTask
from megalith.training.tasks.shown_text import bracketed

__all__ = ["FinetuneClassification"]

log = logging.getLogger(__name__)

_MOST_IN_A_TABLE = 50  # classes; a measure for each pair of 1,000 would take seconds per micro-batch


class FinetuneClassification(BertTask[LabelledText]):
    """Text classification: the term ``classification`` is the mean negative log-likelihood in nats of a text's class.

    Evaluation also measures ``accuracy``, and the share of the texts of each class that are predicted as each class:
    ``confusion/TRUE/TAKEN``, by class numbers, if there are at most 50 classes.

    Raises:
        ConfigError: as ``BertTask``; or ``data.masking`` is set, which classification does not use.
    """

    terms = MappingProxyType({"classification": 1.0})
    class_heads = frozenset({"classifier"})
    in_brackets = "special tokens"
    counted = "texts"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        assert self.bert.num_classes is not None, "a config rule requires it"
        self.num_classes = self.bert.num_classes
        if config.data.masking is not None:
            raise ConfigError("data.masking is for pretraining; bert.head=classification masks nothing; leave it out")
        self._learned: tuple[str, ...] = ()
        self._learned_from, self._label_alike = _training_prefix(config), "TRAINING_FILE --valid FILE"
        both = range(self.num_classes if self.num_classes <= _MOST_IN_A_TABLE else 0)
        self._confusion = [f"confusion/{label}/{taken}" for label in both for taken in both]

    def train_dataset(self) -> LabelledDataset:
        """Returns ``data.train`` in the order of ``train.seed``."""
        prefix = _training_prefix(self.config)
        assert prefix is not None, "preflight refuses a run without data"
        return LabelledDataset(self.evaluation_dataset(prefix), self.config.train.seed)

    def evaluation_dataset(self, prefix: str) -> LabelledTexts:
        """Returns the texts of ``prefix``, each once.

        Raises ConfigError if their classes differ from those of ``use_classes``, or else of the training data, or are
        not as many as the model's.
        """
        S, vocab_size = self.config.data.seq_length, self.config.model.vocab_size
        found = LabelledTexts(prefix, self.tokenizer, S, vocab_size=vocab_size)
        learned = self._learned or _learned_classes(self.config)
        if not learned:
            log.warning("the classes of %s cannot be compared with the model's, which have no names", prefix)
        elif found.classes != learned:
            raise ConfigError(
                f"the classes of {prefix} must be those of {self._learned_from}, in the same order: {listed(learned)}; "
                f"got {listed(found.classes)}, which differ from class {_first_difference(found.classes, learned)} on; "
                f"label the texts again: megalith data label {self._label_alike} --out PREFIX --tokenizer PATH"
            )
        if len(found.classes) != self.num_classes:
            raise ConfigError(
                f"model.bert.num_classes ({self.num_classes}) must be the number of classes in {prefix}, "
                f"{len(found.classes)}: {listed(found.classes)}; use {len(found.classes)}"
            )
        return found

    def use_classes(self, names: tuple[str, ...], source: str) -> None:
        """Makes ``names`` the classes that ``evaluation_dataset`` requires, because ``source`` was trained on them.

        If they are empty, those of the training data remain.
        """
        if names:
            self._learned, self._learned_from = names, source
            self._label_alike = f"FILE --classes-of {source}"

    def class_names(self, dataset: SizedSamples[LabelledText]) -> Sequence[str]:
        """Returns the class names of the labels."""
        assert isinstance(dataset, LabelledTexts), "returned by evaluation_dataset"
        return dataset.classes

    def stack(self, samples: Sequence[LabelledText], rows: Sequence[int]) -> BertBatch:
        """Stacks the samples, one per row."""
        padding = bert_tokens(self.tokenizer).padding
        return stack_labelled_texts(samples, rows, self.config.data.seq_length, padding)

    def counts(self, batch: BertBatch) -> Mapping[str, int]:
        """Returns the number of texts, in total and per class."""
        num_texts = int((batch.classes >= 0).sum())
        of_class = np.bincount(batch.classes[batch.classes >= 0], minlength=self.num_classes).tolist()
        confusion = {name: of_class[pair // self.num_classes] for pair, name in enumerate(self._confusion)}
        return {"classification": num_texts, "accuracy": num_texts, **confusion}

    def sums(self, output: Tensor, inputs: BertInputs) -> Mapping[str, Tensor]:
        """Sums the losses of texts; in evaluation also counts hits and the confusion table."""
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        found = {"classification": cross_entropy(wide, inputs.classes, reduction="sum")}
        if output.requires_grad:
            return found
        taken = output.argmax(-1)
        found["accuracy"] = (taken == inputs.classes).sum().float()
        if self._confusion:
            pairs = torch.bincount(inputs.classes * self.num_classes + taken, minlength=self.num_classes**2).float()
            found |= dict(zip(self._confusion, pairs.unbind(), strict=True))
        return found

    def sample_as_text(self, sample: LabelledText) -> list[str]:
        """Decodes the text and adds its class."""
        tokens = sample.tokens.tolist()
        is_special = [place in (0, len(tokens) - 1) for place in range(len(tokens))]
        return [*bracketed(tokens, is_special, self.tokenizer), f"  of class {sample.label}"]


def _training_prefix(config: RunConfig) -> str | None:
    """Returns the prefix of the training data; None if the model was imported."""
    train = config.data.train
    assert train is None or isinstance(train, str), "a config rule refuses a blend"
    return train


def _first_difference(names: Sequence[str], others: Sequence[str]) -> int:
    """Returns the first index at which the names differ."""
    return next(index for index, pair in enumerate(zip_longest(names, others)) if pair[0] != pair[1])


def _learned_classes(config: RunConfig) -> tuple[str, ...]:
    """Returns the class names of a run's training data; empty if the data are no longer available."""
    train = _training_prefix(config)
    try:
        return () if train is None else Labels.read(train, IndexedDataset(train).num_documents).classes
    except DataError:
        return ()
