"""Attention masks as values: which keys a query sees.

    causal         key j <= query i
    bidirectional  every key
    window w       additionally |i - j| < w
    prefix p       the first p tokens see each other, the rest is causal (Raffel et al. 2019, arXiv:1910.10683)

In packed rows, tokens of other documents are never seen; document boundaries are in the batch's ``PackedSeqParams``. A
padded row is two documents: its tokens, and its padding (``PackedSeqParams.from_padding``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.device_copy import to_device
from megalith.errors import ConfigError
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["BIDIRECTIONAL", "CAUSAL", "AttentionMask", "Prefix"]


@dataclass(frozen=True, eq=False)
class Prefix:
    """The prefix of each row, whose tokens attend to each other in both directions.

    Attributes:
        documents: each row as two documents, the prefix and the rest.
        covers: bool [B, S], True within the prefix.
    """

    documents: PackedSeqParams
    covers: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], seq_length: int) -> "Prefix":
        """Creates prefixes of ``lengths`` tokens, one per row. Raises ConfigError for a length outside [0, S]."""
        if any(not 0 <= length <= seq_length for length in lengths):
            raise ConfigError(f"a prefix must have 0 to {seq_length} tokens, at most a whole row; got {list(lengths)}")
        rows = [[part for part in (length, seq_length - length) if part] for length in lengths]
        covers = torch.arange(seq_length) < torch.tensor(lengths).unsqueeze(1)
        return cls(PackedSeqParams.from_lengths(rows), covers)

    def to(self, device: torch.device | str) -> "Prefix":
        """Returns the same prefixes on ``device``."""
        return Prefix(self.documents.to(device), to_device(self.covers, device))


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The keys that a query sees. ``window`` includes the query's own key: with 1 a token attends only to itself.

    Raises:
        ConfigError: ``window`` below 1; a prefix combined with a window or with ``causal=False``.
    """

    causal: bool = True
    window: int | None = None
    prefix: Prefix | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"a window must include at least the query's own key; got window={self.window}; use 1 or more"
            )
        if self.prefix is not None and (self.window is not None or not self.causal):
            raise ConfigError(
                "a prefix is bidirectional and the rest of its row causal, so it cannot be combined with a window or "
                "causal=False; leave one of them out"
            )

    def within(self, window: int | None) -> "AttentionMask":
        """Returns this mask for a layer with ``window`` (None: no limit); the smaller of two windows applies."""
        if window is None:
            return self
        return replace(self, window=window if self.window is None else min(window, self.window))

    @property
    def sides(self) -> tuple[int, int] | None:
        """The window as (keys before, keys after) the query's own, as in ``fused_attention``; None: no window."""
        if self.window is None:
            return None
        return self.window - 1, 0 if self.causal else self.window - 1

    def visible(
        self, S: int, device: torch.device, documents: PackedSeqParams | None = None, num_queries: int | None = None
    ) -> Tensor:
        """Returns bool [1 or B, 1, Sq, S]: whether each of the last ``num_queries`` of S tokens (None: all) sees a key.

        Rows of ``documents`` may be longer than S, as with a cache.
        """
        new = slice(0 if num_queries is None else S - num_queries, S)
        distance = torch.arange(S, device=device)[new].unsqueeze(1) - torch.arange(S, device=device)  # [Sq, S]
        seen = (distance >= 0) if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        seen = seen.expand(1, 1, *distance.shape)
        if self.prefix is not None:
            covers = self.prefix.covers.to(device)
            seen = seen | (covers[:, new].unsqueeze(2) & covers.unsqueeze(1)).unsqueeze(1)  # [B, 1, Sq, S]
        if documents is not None:
            ids = documents.document_ids().to(device)[:, :S]
            seen = seen & (ids[:, new].unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1)  # [B, 1, Sq, S]
        return seen


CAUSAL = AttentionMask()
BIDIRECTIONAL = AttentionMask(causal=False)
