"""Self-attention with its heads split over tp; grouped queries, rotary positions, any mask, a key-value cache.

Ainslie et al. 2023, "GQA", arXiv:2305.13245. q, k and v read one gathered input; o sums over tp. With fewer groups than
ranks, the tp/G ranks whose query heads share a group each compute its keys and values.
"""

from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.config.draft import divisors
from megalith.errors import ShapeError
from megalith.fusions import Layout, fused_rope
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.tensor.layers import BlockReplicatedLinear, ColumnParallelLinear, RowParallelLinear
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.initialization import output_std
from megalith.transformer.layer_context import LayerContext

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Self-attention: A query heads in G groups of D, A/tp and max(G/tp, 1) of them here.

    Args:
        window: how many keys a query sees, its own included; None: no window of its own.
        rotates: whether queries and keys are rotated by their positions, where the model has rotary ones; if not, only
            the mask tells this layer the order of tokens.

    Raises:
        ShapeError: tp does not divide the heads, or neither divides the groups nor is a multiple of them.
    """

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
            config.attention_dropout, groups.rank("tp") * (A // tp), window, groups.cp, options.context_method
        )
        bias, std = config.add_bias_linear, config.init_method_std

        def column(heads: int) -> ColumnParallelLinear | BlockReplicatedLinear:
            if heads % tp:
                return BlockReplicatedLinear(H, D, heads, options, bias=bias, std=std)
            return ColumnParallelLinear(H, heads * D, options, bias=bias, std=std, input_is_gathered=True)

        self.entered = DiscardableOutput("layernorm")
        self.q_proj, self.k_proj, self.v_proj = column(A), column(G), column(G)
        self.o_proj = RowParallelLinear(A * D, H, options, bias=bias, std=output_std(config))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H], of [S/tp, B, H] each under sequence parallelism."""
        groups = self.options.pg_collection
        x = self.entered(enter_tensor_parallel, x, groups.tp, self.options.sequence_parallel)  # [S, B, H]
        # [S, B, A/tp, D], and [S, B, max(G/tp, 1), D] twice
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if context.rotary is not None and self.rotates:
            cos, sin = context.rotary.of(self.core_attention.window)  # [S, R/2] or [S, B, R/2]
            q, k = fused_rope(q, k, cos, sin, layout=self.layout, rotary_dim=2 * cos.shape[-1])
        if context.cache is not None:
            k, v = context.cache.append(k, v)
        out = self.core_attention(q, k, v, context)
        y: Tensor = self.o_proj(out.flatten(2))  # [S, B, A/tp * D] -> [S, B, H]
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size)
