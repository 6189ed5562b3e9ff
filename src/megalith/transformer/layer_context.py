"""What a layer's forward needs besides the hidden states, in one record."""

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

__all__ = ["KVCache", "LayerContext"]


class KVCache:
    """What one layer keeps of the tokens seen so far, in memory for ``capacity`` tokens of each row.

    Keys and values, [S, B, max(G/tp, 1), D] each; of latent attention, the latents that they are made from.

    Only ``grow`` and ``repeat_rows_`` move it: a token costs its own bytes, and not a copy of all before it. In memory
    the keys of a head follow each other, as attention reads them; a token of all rows and heads is written once and
    read in every later step.

    Attributes:
        held: tensors [capacity, B, heads, D], views of [B, heads, capacity, D]; allocated at the first ``append``, none
            before.
        num_tokens: how many of a row's are there.
        cross: keys and values of an encoder's output, made by the first call of cross attention.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self.held: tuple[Tensor, ...] = ()
        self.cross: tuple[Tensor, Tensor] | None = None

    @called_whole  # it counts tokens
    def append(self, *newest: Tensor) -> tuple[Tensor, ...]:
        """Adds ``newest``, [S, B, heads, D] each, and returns all tokens, [num_tokens, B, heads, D], as views.

        Raises ShapeError where they pass ``capacity``.
        """
        start, end = self.num_tokens, self.num_tokens + newest[0].shape[0]
        if end > self.capacity:
            raise ShapeError(f"the cache has room for {self.capacity} tokens, and these make {end}; make it larger")
        if not self.held:
            self.held = tuple(map(self._room_for, newest))
        for whole, x in zip(self.held, newest, strict=True):
            whole[start:end] = x
        self.num_tokens = end
        return tuple(whole[:end] for whole in self.held)

    def grow(self, capacity: int) -> None:
        """Makes room for ``capacity`` tokens, no fewer than before; those that are there are copied."""
        self.capacity = capacity
        before, self.held = self.held, tuple(map(self._room_for, self.held))
        for whole, old in zip(self.held, before, strict=True):
            whole[: self.num_tokens] = old[: self.num_tokens]

    def take_rows_(self, rows: Tensor) -> None:
        """Row i goes on from what row ``rows[i]`` has held, int64 [B]; both have read the same output of an encoder."""
        for whole in self.held:
            whole[: self.num_tokens] = whole[: self.num_tokens].index_select(1, rows)

    def repeat_rows_(self, times: int) -> None:
        """Makes ``times`` rows of each, one after the other, which go on apart."""
        # what is held are views of [B, heads, capacity, D]
        self.held = tuple(
            whole.permute(1, 2, 0, 3).repeat_interleave(times, dim=0).permute(2, 0, 1, 3) for whole in self.held
        )
        if self.cross is not None:
            k, v = (x.repeat_interleave(times, dim=1) for x in self.cross)
            self.cross = k, v

    def _room_for(self, like: Tensor) -> Tensor:
        """[S, B, heads, D] -> an empty [capacity, B, heads, D]."""
        _, B, heads, D = like.shape
        return like.new_empty(B, heads, self.capacity, D).permute(2, 0, 1, 3)


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The batch as layers see it; every part of a layer is called with (hidden states, context).

    Attributes:
        mask: which keys a query sees; a layer may narrow it to a window of its own.
        documents: where documents begin, in whole rows also where ranks of cp hold parts of them, and of the cache's
            ``capacity`` where there is one; tokens see their own document only.
        rotary: the tables of rotary positions; None where positions are learned.
        position_bias: what relative positions add to the scores of self-attention; None where there are none.
        token_dropout_key: the step's dropout key for attention, with token ids [B, S]; None disables dropout.
        hidden_dropout_key: the same for the hidden states, whose token ids are [S, B], [S/tp, B] under sequence
            parallelism.
        cache: what this layer has kept of earlier calls; the tokens follow them.
        encoder: what cross attention reads; None in a model of one stack.
        record: of the training step, for routers; without one they count nothing.
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
