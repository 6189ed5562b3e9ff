"""Self-attention with its heads split over tp; grouped queries, rotary positions, packed documents, a key-value cache.

Ainslie et al. 2023, "GQA", arXiv:2305.13245. q, k and v read one gathered input; o sums over tp.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import recompute
from megalith.config import TransformerConfig
from megalith.errors import ShapeError
from megalith.fusions import fused_rope
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.transformer.build_options import BuildOptions
from megalith.transformer.dot_product_attention import dot_product_attention, dot_product_attention_with_dropout
from megalith.transformer.initialization import output_std
from megalith.transformer.rotary import RotaryTable

__all__ = ["KVCache", "SelfAttention"]


@dataclass
class KVCache:
    """Keys and values of one layer for the tokens seen so far, [S, B, G/tp, D] each; empty at first."""

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


class SelfAttention(nn.Module):
    """Causal self-attention: A query heads in G groups of D, A/tp and G/tp of them here.

    Raises:
        ShapeError: tp does not divide the heads or the groups.
    """

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        A, G, D, H = config.num_attention_heads, config.num_query_groups, config.kv_channels, config.hidden_size
        groups = options.pg_collection
        tp = groups.tp_size
        if A % tp or G % tp:
            raise ShapeError(
                f"num_attention_heads ({A}) and num_query_groups ({G}) must be divisible by parallel.tensor ({tp})"
            )
        self.head_size = D
        self.head_offset = groups.tp_rank * (A // tp)
        self.dropout = config.attention_dropout
        self.tp_group = groups.tp
        self.sequence_parallel = options.sequence_parallel
        self.recompute_core = options.recompute == "selective"

        def column(heads: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                H,
                heads * D,
                bias=config.add_bias_linear,
                std=config.init_method_std,
                dtype=options.dtype,
                pg_collection=groups,
                input_is_gathered=True,
            )

        self.q_proj, self.k_proj, self.v_proj = column(A), column(G), column(G)
        self.o_proj = RowParallelLinear(
            A * D,
            H,
            bias=config.add_bias_linear,
            std=output_std(config),
            dtype=options.dtype,
            pg_collection=groups,
            sequence_parallel=options.sequence_parallel,
        )

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        packed_seq_params: PackedSeqParams | None,
        dropout_key: DropoutKey | None,
        cache: KVCache | None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H], of [S/tp, B, H] each under sequence parallelism.

        ``dropout_key.tokens`` is int64 [B, S], all tokens of the rows; None: no dropout.
        """
        x = enter_tensor_parallel(x, self.tp_group, self.sequence_parallel)  # [S, B, H]
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if rotary is not None:
            q, k = fused_rope(q, k, rotary.cos, rotary.sin)
        if cache is not None:
            k, v = cache.append(k, v)
        if self.recompute_core:
            out = recompute(self._core, q, k, v, packed_seq_params, dropout_key)
        else:
            out = self._core(q, k, v, packed_seq_params, dropout_key)
        y: Tensor = self.o_proj(out.flatten(2))  # [S, B, A/tp * D] -> [S, B, H]
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size)  # [S, B, A/tp, D]

    def _core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed_seq_params: PackedSeqParams | None,
        dropout_key: DropoutKey | None,
    ) -> Tensor:
        if dropout_key is None or self.dropout == 0.0:
            return dot_product_attention(q, k, v, packed_seq_params)
        return dot_product_attention_with_dropout(
            q, k, v, packed_seq_params, self.dropout, dropout_key, self.head_offset
        )
