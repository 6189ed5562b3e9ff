"""What a layer's forward needs besides the hidden states, in one record."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.attention_mask import CAUSAL, AttentionMask
from megalith.transformer.rotary import RotaryTables

__all__ = ["KVCache", "LayerContext"]


@dataclass
class KVCache:
    """Keys and values of one layer for the tokens seen so far, [S, B, max(G/tp, 1), D] each; empty at first."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[0] if self.keys else 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the newest ``k`` and ``v`` and returns all of them."""
        self.keys = [torch.cat((*self.keys, k))]
        self.values = [torch.cat((*self.values, v))]
        return self.keys[0], self.values[0]


@dataclass(frozen=True, eq=False)
class LayerContext:
    """The batch as layers see it; every part of a layer is called with (hidden states, context).

    Attributes:
        mask: which keys a query sees; a layer may narrow it to a window of its own.
        documents: where documents begin, in whole rows also where ranks of cp hold parts of them; tokens see their own
            document only.
        rotary: the tables of rotary positions; None where positions are learned.
        token_dropout_key: the step's dropout key for attention, with token ids [B, S]; None disables dropout.
        hidden_dropout_key: the same for the hidden states, whose token ids are [S, B], [S/tp, B] under sequence
            parallelism.
        cache: keys and values of this layer from earlier calls; the tokens follow them.
    """

    mask: AttentionMask = CAUSAL
    documents: PackedSeqParams | None = None
    rotary: RotaryTables | None = None
    token_dropout_key: DropoutKey | None = None
    hidden_dropout_key: DropoutKey | None = None
    cache: KVCache | None = None
