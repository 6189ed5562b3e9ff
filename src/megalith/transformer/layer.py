"""One transformer layer: norm, attention, residual; norm, feed-forward, residual.

h = x + dropout(attention(norm(x)));   y = h + dropout(mlp(norm(h)))
"""

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import recompute
from megalith.config import TransformerConfig
from megalith.fusions import bias_dropout_add_fused_train
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.attention import KVCache, SelfAttention
from megalith.transformer.build_options import BuildOptions
from megalith.transformer.embeddings import sequence_parallel_key
from megalith.transformer.mlp import MLP
from megalith.transformer.normalization import Normalization
from megalith.transformer.rotary import RotaryTable

__all__ = ["TransformerLayer"]

_SITES_PER_LAYER = 3  # dropouts of a layer: attention probabilities, attention output, feed-forward output


class TransformerLayer(nn.Module):
    """Layer ``index`` (from 0) of a decoder; it knows its index because dropout masks depend on it."""

    def __init__(self, config: TransformerConfig, options: BuildOptions, index: int) -> None:
        super().__init__()
        self.first_site = 1 + index * _SITES_PER_LAYER  # site 0 is the embedding's
        self.hidden_dropout = config.hidden_dropout
        self.sequence_group = options.pg_collection.tp if options.sequence_parallel else None
        self.recompute_all = options.recompute == "full"
        self.input_layernorm = Normalization(config, options)
        self.self_attn = SelfAttention(config, options)
        self.post_attention_layernorm = Normalization(config, options)
        self.mlp = MLP(config, options)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        packed_seq_params: PackedSeqParams | None,
        dropout_key: DropoutKey | None,
        cache: KVCache | None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H], of [S/tp, B, H] each under sequence parallelism; the rest as in SelfAttention."""
        if self.recompute_all and torch.is_grad_enabled():
            return recompute(self._forward, x, rotary, packed_seq_params, dropout_key, cache)
        return self._forward(x, rotary, packed_seq_params, dropout_key, cache)

    def _forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        packed_seq_params: PackedSeqParams | None,
        dropout_key: DropoutKey | None,
        cache: KVCache | None,
    ) -> Tensor:
        attention_key = None if dropout_key is None else dropout_key.at(self.first_site)
        attended = self.self_attn(self.input_layernorm(x), rotary, packed_seq_params, attention_key, cache)
        normed, x = self.post_attention_layernorm.after_residual(
            attended, x, self.hidden_dropout, self._key(dropout_key, 1)
        )
        return self._add(self.mlp(normed), x, self._key(dropout_key, 2))

    def _key(self, key: DropoutKey | None, place: int) -> DropoutKey | None:
        """What decides the mask of the dropout at ``place``; None where nothing is dropped."""
        if key is None or self.hidden_dropout == 0.0:
            return None
        return sequence_parallel_key(key, self.sequence_group).at(self.first_site + place)

    def _add(self, x: Tensor, residual: Tensor, key: DropoutKey | None) -> Tensor:
        p = 0.0 if key is None else self.hidden_dropout
        return bias_dropout_add_fused_train((x, None), residual, p, key=key)
