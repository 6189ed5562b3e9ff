"""Document boundaries in packed rows: describes a batch without padding ("thd"), validated at construction.

The tokens of a batch [B, S] are numbered b * S + s, row by row. Documents tile them: document i holds the tokens from
``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``, and none crosses a row boundary. The names are those of the
variable-length attention kernels (FlashAttention, Transformer Engine).
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Literal

import torch
from torch import Tensor

from megalith.device_copy import to_device
from megalith.errors import ShapeError

__all__ = ["PackedSeqParams"]


@dataclass(frozen=True, eq=False)
class PackedSeqParams:
    """The documents of a batch of packed rows, for self-attention: queries and keys are from the same documents.

    Attributes:
        cu_seqlens_q, cu_seqlens_kv: int32 [N+1], document boundaries as b * S + s; equal.
        max_seqlen_q, max_seqlen_kv: tokens in the longest document.
        batch_size: B, rows.
        seq_length: S, tokens per row.
        qkv_format: always "thd".
        document_bounds: int32 [B, S, 2], for each token the start (inclusive) and end (exclusive) of its document as
            positions in the row, in the form that attention kernels read.

    Raises:
        ShapeError: the boundaries are not an int32 vector, do not tile the rows, or cross one; or a maximum is wrong.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    batch_size: int
    seq_length: int
    qkv_format: Literal["thd"] = "thd"
    document_bounds: Tensor = field(init=False, repr=False)
    _rows: list[list[tuple[int, int]]] = field(init=False, repr=False)
    _parts: dict[tuple[int, int], "PackedSeqParams"] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.qkv_format != "thd":
            raise ShapeError(f"qkv_format must be 'thd', rows without padding; got {self.qkv_format!r}")
        borders = _checked_borders("cu_seqlens_q", self.cu_seqlens_q, self.batch_size, self.seq_length)
        if _checked_borders("cu_seqlens_kv", self.cu_seqlens_kv, self.batch_size, self.seq_length) != borders:
            raise ShapeError(
                "cu_seqlens_kv must equal cu_seqlens_q: in self-attention, both describe the same documents"
            )
        longest = max(end - start for start, end in pairwise(borders))
        if (self.max_seqlen_q, self.max_seqlen_kv) != (longest, longest):
            raise ShapeError(
                f"max_seqlen_q and max_seqlen_kv must be {longest}, the length of the longest document; "
                f"got {self.max_seqlen_q} and {self.max_seqlen_kv}"
            )
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.batch_size)]
        for start, end in pairwise(borders):
            row, first = divmod(start, self.seq_length)
            rows[row].append((first, first + end - start))
        object.__setattr__(self, "_rows", rows)
        # once per batch: computed in every layer, it would cost a dozen small kernels in each
        bounds = self._of_each_token(torch.stack((self.cu_seqlens_q[:-1], self.cu_seqlens_q[1:]), dim=-1))  # [B*S, 2]
        row_starts = torch.arange(0, borders[-1], self.seq_length, dtype=torch.int32, device=bounds.device)  # [B]
        bounds = bounds.view(self.batch_size, self.seq_length, 2) - row_starts.view(-1, 1, 1)
        object.__setattr__(self, "document_bounds", bounds)

    @classmethod
    def from_lengths(cls, lengths: Sequence[Sequence[int]]) -> "PackedSeqParams":
        """Builds from document lengths in tokens, one list per row; every list must have the same sum, S."""
        sums = {sum(row) for row in lengths}
        if len(sums) != 1:
            raise ShapeError(f"the lengths of all rows must have the same sum; got sums {sorted(sums)}")
        borders = list(accumulate(chain.from_iterable(lengths), initial=0))
        return cls._from_borders(borders, len(lengths), sums.pop())

    @classmethod
    def from_documents(cls, documents: Tensor) -> "PackedSeqParams":
        """Builds from each token's document number: int32 or int64 [B, S], non-decreasing along a row."""
        if documents.dtype not in (torch.int32, torch.int64) or documents.dim() != 2 or documents.numel() == 0:
            raise ShapeError(f"documents must be int32 or int64 [B, S]; got {documents.dtype} {list(documents.shape)}")
        steps = documents[:, 1:] - documents[:, :-1]
        if (steps < 0).any():
            raise ShapeError(
                "documents must not decrease along a row, because a document's tokens are contiguous; in at least one "
                "row they decrease"
            )
        begins = torch.ones_like(documents, dtype=torch.bool)  # each row starts a new document
        begins[:, 1:] = steps > 0
        borders = [*begins.flatten().nonzero().flatten().tolist(), documents.numel()]
        return cls._from_borders(borders, *documents.shape)

    @classmethod
    def from_padding(cls, is_token: Tensor) -> "PackedSeqParams":
        """Builds from a mask of the tokens in padded rows, bool [B, S]: the tokens of a row are one document.

        Padding before and after it forms separate documents, so that no token attends to padding, and none of a row's
        tokens is lost. Raises ShapeError for tokens with padding between them.
        """
        if is_token.dtype != torch.bool or is_token.dim() != 2 or is_token.numel() == 0:
            raise ShapeError(f"is_token must be bool [B, S]; got {is_token.dtype} {list(is_token.shape)}")
        changes = (is_token[:, 1:] != is_token[:, :-1]).cumsum(dim=1)
        documents = torch.nn.functional.pad(changes, (1, 0))
        begins = is_token & ~torch.nn.functional.pad(is_token[:, :-1], (1, 0))
        if (begins.sum(dim=1) > 1).any():
            row = int((begins.sum(dim=1) > 1).nonzero()[0])
            raise ShapeError(f"the tokens of a row must be contiguous; row {row} has padding between them")
        return cls.from_documents(documents)

    @classmethod
    def _from_borders(cls, borders: list[int], batch_size: int, seq_length: int) -> "PackedSeqParams":
        cu_seqlens = torch.tensor(borders, dtype=torch.int32)
        longest = max((end - start for start, end in pairwise(borders)), default=0)
        return cls(cu_seqlens, cu_seqlens, longest, longest, batch_size, seq_length)

    def rows(self) -> list[list[tuple[int, int]]]:
        """Returns the documents of each row as (start, end) within the row, without a device synchronization."""
        return self._rows

    def position_ids(self) -> Tensor:
        """Returns int64 [B, S]: the position of each token in its document."""
        starts = self._of_each_token(self.cu_seqlens_q[:-1])
        return (torch.arange(len(starts), device=starts.device) - starts).view(self.batch_size, self.seq_length)

    def document_ids(self) -> Tensor:
        """Returns int64 [B, S]: the index of each token's document in its row, from 0."""
        ordinals = self._of_each_token(torch.arange(len(self.cu_seqlens_q) - 1, device=self.cu_seqlens_q.device))
        ids = ordinals.view(self.batch_size, self.seq_length)
        return ids - ids[:, :1]

    def within(self, start: int, stop: int) -> "PackedSeqParams":
        """Returns the documents in columns [start, stop) of every row, truncated there; cached for all layers."""
        if (start, stop) == (0, self.seq_length):
            return self
        if (start, stop) not in self._parts:
            lengths = [
                [min(end, stop) - max(first, start) for first, end in row if first < stop and end > start]
                for row in self._rows
            ]
            self._parts[start, stop] = PackedSeqParams.from_lengths(lengths).to(self.cu_seqlens_q.device)
        return self._parts[start, stop]

    def to(self, device: torch.device | str) -> "PackedSeqParams":
        """Returns the same documents with the boundaries on ``device``; nothing is validated or computed again."""
        moved = copy(self)
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "document_bounds"):
            object.__setattr__(moved, name, to_device(getattr(self, name), device))
        object.__setattr__(moved, "_parts", {})
        return moved

    def _of_each_token(self, values: Tensor) -> Tensor:
        """Expands ``values`` [N, ...] to one per token, [B*S, ...]; output_size avoids a device synchronization."""
        return values.repeat_interleave(self.cu_seqlens_q.diff(), dim=0, output_size=self.batch_size * self.seq_length)


def _checked_borders(name: str, cu_seqlens: Tensor, batch_size: int, seq_length: int) -> list[int]:
    if batch_size < 1 or seq_length < 1:
        raise ShapeError(f"batch_size and seq_length must be positive; got {batch_size} and {seq_length}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ShapeError(f"{name} must be int32 [N+1]; got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    borders: list[int] = cu_seqlens.tolist()
    total = batch_size * seq_length
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != total:
        raise ShapeError(f"{name} must begin at 0 and end at B*S = {total}; got {borders}")
    if any(end <= start for start, end in pairwise(borders)):
        raise ShapeError(f"{name} must be strictly increasing, because no document is empty; got {borders}")
    if missing := sorted(set(range(0, total, seq_length)) - set(borders)):
        raise ShapeError(
            f"{name} must have a boundary at every row, {seq_length} tokens apart, because no document spans rows; "
            f"got {borders} without {missing}"
        )
    return borders
