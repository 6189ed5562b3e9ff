"""Self-attention with heads split over tp: grouped queries, rotary positions, any mask, a key-value cache.

Ainslie et al. 2023, "GQA", arXiv:2305.13245. q, k and v share one gathered input; o sums over tp. With fewer groups
than ranks, the tp/G ranks whose query heads share a group each compute its keys and values.

Options of ``config.attention``: norms of q and k before their rotation; a sink, an additional score in every softmax of
a head, which is 0 (Miller 2023, "Attention Is Off By One") or learned (Agarwal et al. 2025, "gpt-oss",
arXiv:2508.10925); a gate, o = W_o (attention * sigmoid(W_g x)) (Qiu et al. 2025, "Gated Attention", arXiv:2505.06708).
"""

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.config.draft import divisors
from megalith.errors import ShapeError
from megalith.fusions import Layout, fused_rope
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.parallel.tensor.layers import BlockReplicatedLinear, ColumnParallelLinear, RowParallelLinear
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.head_norm import HeadNorm
from megalith.transformer.initialization import output_std
from megalith.transformer.layer_context import LayerContext

__all__ = ["SelfAttention"]


class SelfAttention(DeclaringModule):
    """Self-attention with A query heads in G groups, of size D; this rank has A/tp heads and max(G/tp, 1) groups.

    Args:
        window: how many keys a query sees, including its own; None: the layer does not limit them.
        rotates: whether rotary positions, if the model has them, are applied to queries and keys; if not, the layer
            knows the order of tokens from the mask only.

    Raises:
        ShapeError: tp does not divide the heads, or neither divides the groups nor is a multiple of them.
    """

    sinks: nn.Parameter  # with a learnable softmax only

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, *, window: int | None = None, rotates: bool = True
    ) -> None:
        super().__init__()
        A, G, D, H = config.num_attention_heads, config.num_query_groups, config.kv_channels, config.hidden_size
        groups = options.pg_collection
        tp = groups.size("tp")
        if A % tp or (G % tp and tp % G):
            fitting = [degree for degree in divisors(A) if G % degree == 0 or degree % G == 0]
            raise ShapeError(
                f"parallel.tensor ({tp}) must divide num_attention_heads ({A}), and divide num_query_groups ({G}) or "
                f"be a multiple of it; use {', '.join(map(str, fitting))}"
            )
        self.head_size = D
        self.rotates = rotates
        self.layout: Layout = "interleaved" if config.rope is not None and config.rope.interleaved else "neox"
        self.options = options
        self.core_attention = DotProductAttention(
            config.attention_dropout,
            groups.rank("tp") * (A // tp),
            window,
            groups.cp,
            options.context_method,
            scale=config.attention_scale,
            softcap=config.attention.logit_softcap,
        )
        bias, std = config.qkv_bias, config.init_method_std

        def column(heads: int) -> ColumnParallelLinear | BlockReplicatedLinear:
            if heads % tp:
                return BlockReplicatedLinear(H, D, heads, options, bias=bias, std=std)
            return ColumnParallelLinear(H, heads * D, options, bias=bias, std=std, input_is_gathered=True)

        self.entered = DiscardableOutput("layernorm")
        self.q_proj, self.k_proj, self.v_proj = column(A), column(G), column(G)
        self.gate_proj = column(A) if config.attention.output_gate else None
        has_norms = config.attention.qk_norm is not None
        self.q_norm, self.k_norm = (HeadNorm(config, options) if has_norms else None for _ in range(2))
        self.softmax = config.attention.softmax
        if self.softmax == "learnable":
            self.declare("sinks", ParameterSpec((A,), "normal", std, split={"tp": 0}), groups, options.dtype)
        self.o_proj = RowParallelLinear(A * D, H, options, bias=config.output_bias, std=output_std(config))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]."""
        groups = self.options.pg_collection
        x = self.entered(enter_tensor_parallel, x, groups.tp, self.options.sequence_parallel)  # [S, B, H]
        # [S, B, A/tp, D], and [S, B, max(G/tp, 1), D] twice
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotary is not None and self.rotates:
            cos, sin = context.rotary.of(self.core_attention.window)  # [S, R/2] or [S, B, R/2]
            q, k = fused_rope(q, k, cos, sin, layout=self.layout, rotary_dim=2 * cos.shape[-1])
        if context.cache is not None:
            k, v = context.cache.append(k, v)
        out = self.core_attention(q, k, v, context, self._sink(q)).flatten(2)  # [S, B, A/tp * D]
        if self.gate_proj is not None:
            out = out * torch.sigmoid(self.gate_proj(x))
        y: Tensor = self.o_proj(out)  # [S, B, H]
        return y

    def _sink(self, q: Tensor) -> Tensor | None:
        """Returns [A/tp], an additional score per head in every softmax, or None."""
        if self.softmax == "vanilla":
            return None
        return q.new_zeros(q.shape[2]) if self.softmax == "off_by_one" else local(self.sinks)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size)
