"""What the tasks of models other than GPT share: tokenizer, size, held-out seed, and the settings that they reject."""

from typing import TypeVar

import torch

from megalith.config import RunConfig
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.models.language_model import hidden_dtype
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.storage import Store
from megalith.training.kept import kept_tokenizer
from megalith.training.run_tokenizer import load_tokenizer
from megalith.training.tasks.gpt_size import parameters
from megalith.training.tasks.task import Task

__all__ = ["HELD_OUT_SEED", "MaskedTask"]

HELD_OUT_SEED = 0  # for lengths and masks, independent of the run's seed, so that losses of runs are comparable

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
Inputs = TypeVar("Inputs")


class MaskedTask(Task[Sample, Batch, Inputs]):
    """A task whose rows each hold one text and its padding.

    Args:
        costs: of a row, by part of the model.
        tokens_per_sample: as in ``Task``.

    Raises:
        ConfigError: settings of ``data`` that are for the rows of a GPT.
    """

    def __init__(self, config: RunConfig, costs: ModelCosts, tokens_per_sample: int) -> None:
        assert config.model.vocab_size is not None, "set by preflight"
        for name in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss", "long_conversations"):
            if getattr(config.data, name):
                raise ConfigError(
                    f"data.{name} is for the rows of a GPT, which hold several documents; a row of model."
                    f"{config.model.kind} holds one text and its padding; leave it out"
                )
        if config.data.fill_in_the_middle is not None:
            raise ConfigError(
                f"data.fill_in_the_middle is for a GPT, which reads from left to right; model.{config.model.kind} sees "
                "both sides of a gap; leave it out"
            )
        self.config = config
        self.tokens_per_sample = tokens_per_sample
        self.num_parameters = parameters(config.model, config.model.vocab_size)
        self.flops_per_sample = sum(costs.layers) + costs.embedding + costs.head
        self._costs = costs
        self._tokenizer: Tokenizer | None = None
        self._folder: Store | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, loaded once.

        Raises:
            DataError: as ``load_tokenizer`` and ``kept_tokenizer``.
            ConfigError: the model has no row for one of its special tokens.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        kept = None if self._folder is None else kept_tokenizer(self._folder)
        tokenizer, given = load_tokenizer(self.config) if kept is None else kept, self.config.model.vocab_size
        assert given is not None, "set by preflight"
        if tokenizer.vocab_size > given:
            raise ConfigError(
                f"model.vocab_size ({given}) must be at least the {tokenizer.vocab_size} entries of {tokenizer.name}, "
                f"because model.{self.config.model.kind} reads special tokens; use {tokenizer.vocab_size}"
            )
        self._tokenizer = tokenizer
        return tokenizer

    def use_tokenizer_of(self, folder: Store) -> None:
        """Makes ``tokenizer`` the one kept in the run's folder, if there is one: the training data may be gone."""
        self._folder = folder

    def costs(self) -> ModelCosts:
        """Returns the FLOPs per row."""
        return self._costs

    def hidden_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Returns float32 or wider if ``model.residual.fp32`` is set."""
        return hidden_dtype(self.config.model, compute_dtype)
