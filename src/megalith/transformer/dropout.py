"""Dropout sites of a model: each draws its own mask, identified by its canonical name."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalith.errors import ConfigError
from megalith.numerics.dropout import Dropout, DropoutKey, name_number

__all__ = ["DropoutSite", "name_dropout_sites_", "of_sequence_parallel_rank", "sequence_parallel_key"]


class DropoutSite(nn.Module):
    """A place in the model where a fraction ``p`` of elements is dropped in training; it has no tensors.

    Its masks depend on its name in the model (``model.layers.3.self_attn_dropout``), so that a pipeline stage drops the
    same elements as the whole model would, and two stacks never share a mask.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.number: int | None = None

    def of(self, key: DropoutKey | None) -> Dropout | None:
        """Returns the dropout to apply with the step's ``key``; None in evaluation, without a ``key``, or if p is 0.

        Raises:
            ConfigError: the site has no name yet; call ``name_dropout_sites_``.
        """
        if key is None or self.p == 0.0 or not self.training:
            return None
        if self.number is None:
            raise ConfigError("a dropout site needs a name to derive masks from; call name_dropout_sites_(model) first")
        return Dropout(self.p, key.named(self.number))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def name_dropout_sites_(model: nn.Module) -> None:
    """Assigns every dropout site of ``model`` its canonical name; whole models call it at construction."""
    sites = {name: module for name, module in model.named_modules() if isinstance(module, DropoutSite)}
    numbers = {name: name_number(name) for name in sites}
    assert len(set(numbers.values())) == len(numbers), "two dropout sites have the same 63-bit hash of their names"
    for name, site in sites.items():
        site.number = numbers[name]


def sequence_parallel_key(key: DropoutKey, tp_group: ProcessGroup | None) -> DropoutKey:
    """Maps a key for all tokens [B, S] to one for this rank's tokens, [S/tp, B], or [S, B] without ``tp_group``."""
    return replace(key, tokens=of_sequence_parallel_rank(key.tokens, tp_group))


def of_sequence_parallel_rank(of_tokens: Tensor, tp_group: ProcessGroup | None) -> Tensor:
    """[B, S] for all tokens -> [S/tp, B] for those of this rank; [S, B] without ``tp_group``."""
    of_tokens = of_tokens.t()  # [S, B]
    return of_tokens if tp_group is None else torch.chunk(of_tokens, tp_group.size())[tp_group.rank()]  # [S/tp, B]
