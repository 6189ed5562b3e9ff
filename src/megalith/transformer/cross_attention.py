"""Cross attention: a decoder's queries over keys and values from an encoder's output, with heads split over tp.

    o = W_o softmax(scale W_q x (W_k e)^T) W_v e,   x of the decoder [Sd, B, H], e of the encoder [Se, B, H]

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3. It has no positions, neither rotary nor as a bias. Under context
parallelism keys and values of the encoder's whole rows are all-gathered, whatever the method of self-attention, because
all queries use all of them. In generation they are computed once and cached.
"""

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.errors import ConfigError, ShapeError
from megalith.fusions import fused_attention
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_join
from megalith.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.topology.collectives import gather_from_sequence_parallel_region
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.encoder_output import EncoderOutput
from megalith.transformer.initialization import output_std
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.unfused_attention import Scores, attend

__all__ = ["CrossAttention"]


class CrossAttention(nn.Module):
    """Attention of a decoder over an encoder's output, with A heads of size D, A/tp of them on this rank; no GQA.

    Raises:
        ShapeError: tp does not divide the heads.
    """

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        A, D, H, groups = config.num_attention_heads, config.kv_channels, config.hidden_size, options.pg_collection
        if A % groups.size("tp"):
            raise ShapeError(f"parallel.tensor ({groups.size('tp')}) must divide num_attention_heads ({A})")
        self.head_size, self.options = D, options
        self.scale, self.softcap = config.attention_scale, config.attention.logit_softcap
        self.head_offset = groups.rank("tp") * (A // groups.size("tp"))
        self.dropout = DropoutSite(config.attention_dropout)
        bias, std = config.qkv_bias, config.init_method_std

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(H, A * D, options, bias=bias, std=std, input_is_gathered=True)

        self.entered = DiscardableOutput("layernorm")
        self.q_proj, self.k_proj, self.v_proj = column(), column(), column()
        self.o_proj = RowParallelLinear(A * D, H, options, bias=config.output_bias, std=output_std(config))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[Sd, B, H] -> [Sd, B, H], both [Sd/tp, B, H] under sequence parallelism; Sd is this rank's part under cp.

        Raises ConfigError if ``context`` has no encoder output.
        """
        groups, encoder = self.options.pg_collection, context.encoder
        if encoder is None:
            raise ConfigError("cross attention needs the encoder's output; set encoder in the LayerContext")
        x = self.entered(enter_tensor_parallel, x, groups.tp, self.options.sequence_parallel)  # [Sd, B, H]
        q = self._heads(self.q_proj(x))  # [Sd, B, A/tp, D]
        kept = None if context.cache is None else context.cache.cross
        k, v = self._keys_and_values(encoder, x.dtype) if kept is None else kept  # [Se, B, A/tp, D] twice
        if context.cache is not None:
            context.cache.cross = k, v
        y: Tensor = self.o_proj(self._attend(q, k, v, encoder, context).flatten(2))
        return y

    def _keys_and_values(self, encoder: EncoderOutput, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the encoder's whole rows, [Se, B, A/tp, D] each."""
        groups = self.options.pg_collection
        # an earlier stage sends it in the dtype of the residual stream
        hidden = enter_tensor_parallel(
            encoder.hidden.to(dtype), groups.tp, self.options.sequence_parallel
        )  # [Se/cp, B, H]
        k, v = self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))
        if groups.cp is None:
            return k, v
        size = groups.size("cp")
        k, v = (zigzag_join(gather_from_sequence_parallel_region(x, groups.cp), size) for x in (k, v))
        return k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, encoder: EncoderOutput, context: LayerContext) -> Tensor:
        """Returns [Sd, B, A/tp, D]."""
        dropout = self.dropout.of(context.token_dropout_key)
        if dropout is None and encoder.seen is None:
            return fused_attention(q, k, v, causal=False, scale=self.scale, softcap=self.softcap)[0]
        seen = encoder.seen
        if seen is None:
            seen = torch.ones(1, 1, len(q), len(k), dtype=torch.bool, device=q.device)
        unfused = attend if dropout is None else torch.compiler.disable(attend)
        out: Tensor = unfused(
            q, k, v, Scores(self.scale, self.softcap), seen, dropout=dropout, head_offset=self.head_offset
        )
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size)
