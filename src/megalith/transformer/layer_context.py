"""The context: everything that a layer's forward needs besides the hidden states, in one record."""

from dataclasses import dataclass

from torch import Tensor

from megalith.acceleration.replay import called_whole
from megalith.errors import ShapeError
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.attention_mask import CAUSAL, AttentionMask
from megalith.transformer.encoder_output import EncoderOutput
from megalith.transformer.relative_position_bias import PositionBias
from megalith.transformer.rotary import RotaryTables
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["FIRST_ROOM", "KVCache", "LayerContext"]

FIRST_ROOM = 1024  # new tokens for which a cache has memory at first; it doubles when it is full


class KVCache:
    """The key-value cache of one layer, with memory for ``capacity`` tokens per row.

    It holds keys and values, [S, B, max(G/tp, 1), D] each, or, for latent attention, the latents that they are computed
    from. Only ``grow`` and ``repeat_rows_`` reallocate it, so appending a token does not copy earlier ones. The keys of
    a head are contiguous in memory, as attention reads them: each is written once and read in every later step.

    Attributes:
        held: tensors [capacity, B, heads, D], views of [B, heads, capacity, D]; empty until the first ``append``.
        num_tokens: the number of cached tokens per row.
        cross: keys and values of an encoder's output, computed by the first call of cross attention.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self.held: tuple[Tensor, ...] = ()
        self.cross: tuple[Tensor, Tensor] | None = None

    @called_whole  # it has state, the number of tokens
    def append(self, *newest: Tensor) -> tuple[Tensor, ...]:
        """Appends ``newest``, [S, B, heads, D] each, and returns views of all tokens, [num_tokens, B, heads, D].

        Raises ShapeError if they exceed ``capacity``.
        """
        start, end = self.num_tokens, self.num_tokens + newest[0].shape[0]
        if end > self.capacity:
            raise ShapeError(f"the cache has room for {self.capacity} tokens; got {end}; increase its capacity")
        if not self.held:
            self.held = tuple(map(self._room_for, newest))
        for whole, x in zip(self.held, newest, strict=True):
            whole[start:end] = x
        self.num_tokens = end
        return tuple(whole[:end] for whole in self.held)

    def grow(self, capacity: int) -> None:
        """Increases the capacity to ``capacity`` tokens, and copies those already cached."""
        self.capacity = capacity
        before, self.held = self.held, tuple(map(self._room_for, self.held))
        for whole, old in zip(self.held, before, strict=True):
            whole[: self.num_tokens] = old[: self.num_tokens]

    def take_rows_(self, rows: Tensor) -> None:
        """Makes row i continue from row ``rows[i]``, int64 [B]; both must have the same encoder output."""
        for whole in self.held:
            whole[: self.num_tokens] = whole[: self.num_tokens].index_select(1, rows)

    def repeat_rows_(self, times: int) -> None:
        """Repeats each row ``times`` times, next to each other; the copies continue independently."""
        # ``held`` are views of [B, heads, capacity, D]
        self.held = tuple(
            whole.permute(1, 2, 0, 3).repeat_interleave(times, dim=0).permute(2, 0, 1, 3) for whole in self.held
        )
        if self.cross is not None:
            k, v = (x.repeat_interleave(times, dim=1) for x in self.cross)
            self.cross = k, v

    def _room_for(self, like: Tensor) -> Tensor:
        """Allocates [capacity, B, heads, D] for tensors like [S, B, heads, D]."""
        _, B, heads, D = like.shape
        return like.new_empty(B, heads, self.capacity, D).permute(2, 0, 1, 3)


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The batch as layers see it; every part of a layer is called with (hidden states, context).

    Attributes:
        mask: which keys a query sees; a layer may narrow it to its own window.
        documents: where documents begin in whole rows, even if ranks of cp hold parts of them; with a cache, in rows of
            its ``capacity``. Tokens see only their own document.
        rotary: the tables of rotary positions; None without rotary positions.
        position_bias: the relative position bias of self-attention scores, or None.
        token_dropout_key: the step's dropout key for attention, with token ids [B, S]; None disables dropout.
        hidden_dropout_key: the same for hidden states, with token ids [S, B], or [S/tp, B] under sequence parallelism.
        cache: this layer's key-value cache of the preceding tokens.
        encoder: the input of cross attention; None in a model with a single stack.
        record: of the training step, for routers; without it their counts are not kept.
        padding_mask: for routers, bool [S, B], or [S/tp, B] under sequence parallelism: True for real tokens; None if
            all are.
    """

    mask: AttentionMask = CAUSAL
    documents: PackedSeqParams | None = None
    rotary: RotaryTables | None = None
    position_bias: PositionBias | None = None
    token_dropout_key: DropoutKey | None = None
    hidden_dropout_key: DropoutKey | None = None
    cache: KVCache | None = None
    encoder: EncoderOutput | None = None
    record: MicroBatchRecord | None = None
    padding_mask: Tensor | None = None
