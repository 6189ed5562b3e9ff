"""What a layer's forward needs besides the hidden states, in one record."""

from dataclasses import dataclass

from torch import Tensor

from megalith.errors import ShapeError
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.attention_mask import CAUSAL, AttentionMask
from megalith.transformer.rotary import RotaryTables
from megalith.transformer.step_record import MicroBatchRecord

__all__ = ["KVCache", "LayerContext"]


class KVCache:
    """Keys and values of one layer for the tokens seen so far, in memory for ``capacity`` tokens of each row.

    It is never moved: a token costs its own bytes, and not a copy of all before it. In memory the keys of a head follow
    each other, as attention reads them; a token of all rows and heads is written once and read in every later step.

    Attributes:
        keys, values: [capacity, B, max(G/tp, 1), D] each, views of [B, max(G/tp, 1), capacity, D]; allocated at the
            first ``append``, None before.
        num_tokens: how many of a row's are there.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest ``k`` and ``v`` and returns all of them, [num_tokens, B, max(G/tp, 1), D], as views.

        Raises ShapeError where they pass ``capacity``.
        """
        start, end = self.num_tokens, self.num_tokens + k.shape[0]
        if end > self.capacity:
            raise ShapeError(f"the cache has room for {self.capacity} tokens, and these make {end}; make it larger")
        if self.keys is None or self.values is None:
            _, B, heads, D = k.shape
            self.keys, self.values = (x.new_empty(B, heads, self.capacity, D).permute(2, 0, 1, 3) for x in (k, v))
        self.keys[start:end], self.values[start:end] = k, v
        self.num_tokens = end
        return self.keys[:end], self.values[:end]


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The batch as layers see it; every part of a layer is called with (hidden states, context).

    Attributes:
        mask: which keys a query sees; a layer may narrow it to a window of its own.
        documents: where documents begin, in whole rows also where ranks of cp hold parts of them, and of the cache's
            ``capacity`` where there is one; tokens see their own document only.
        rotary: the tables of rotary positions; None where positions are learned.
        token_dropout_key: the step's dropout key for attention, with token ids [B, S]; None disables dropout.
        hidden_dropout_key: the same for the hidden states, whose token ids are [S, B], [S/tp, B] under sequence
            parallelism.
        cache: keys and values of this layer from earlier calls; the tokens follow them.
        record: of the training step, for routers; without one they count nothing.
    """

    mask: AttentionMask = CAUSAL
    documents: PackedSeqParams | None = None
    rotary: RotaryTables | None = None
    token_dropout_key: DropoutKey | None = None
    hidden_dropout_key: DropoutKey | None = None
    cache: KVCache | None = None
    record: MicroBatchRecord | None = None
