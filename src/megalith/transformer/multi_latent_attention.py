"""Multi-head latent attention: keys and values of all heads are computed from one small latent per token.

    c_q = norm(W_qa x);               [q_nope | q_rope] = W_qb c_q   per head; without a query latent, W_q x
    [c | k_rope] = W_kva x;           [k_nope | v] = W_kvb norm(c)   per head; k_rope is shared by all heads
    o = W_o softmax(scale [q_nope | rotated q_rope] [k_nope | rotated k_rope]^T) v

DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1; "DeepSeek-V3", arXiv:2412.19437. The scale is
m^2 / sqrt(D), m = 0.1 mscale_all_dim ln(factor) + 1 with YaRN, else 1. The names are those of Hugging Face.

The projections to the latents are outside the tensor-parallel region, which begins at the latents: under sequence
parallelism the latents are gathered, because they are smaller than x. Heads are split over tp.

The cache holds norm(c) and the rotated k_rope, whatever the number of heads. For few queries after many tokens it is
used directly, as one key and value for all heads, with W_kvb = [W_k; W_v] absorbed into the adjacent products (section
2.1.2):

    q_nope . (W_k c) = (W_k^T q_nope) . c;   sum p (W_v c) = W_v (sum p c)

Z is the size of c. A query or key head of size D has N features that are not rotated and R that are; a value head has
Dv.
"""

import math

import torch
from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.config.draft import divisors
from megalith.errors import ShapeError
from megalith.fusions import Layout, fused_rope
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import local
from megalith.parallel.tensor.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.initialization import output_std
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.normalization import Normalization

__all__ = ["MLASelfAttention"]


class MLASelfAttention(nn.Module):
    """Latent self-attention with A heads, A/tp of them on this rank, and sizes from ``config.mla``, which must be set.

    ``window`` and ``rotates`` are those of ``SelfAttention``. Raises ShapeError if tp does not divide the heads.
    """

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, *, window: int | None = None, rotates: bool = True
    ) -> None:
        super().__init__()
        mla, A, H, groups = config.mla, config.num_attention_heads, config.hidden_size, options.pg_collection
        assert mla is not None, "checked by the layer spec"
        tp = groups.size("tp")
        if A % tp:
            raise ShapeError(
                f"parallel.tensor ({tp}) must divide num_attention_heads ({A}); use {', '.join(map(str, divisors(A)))}"
            )
        self.options, self.rotates = options, rotates
        self.latent_size, self.value_size = mla.kv_lora_rank, mla.v_head_dim
        self.head_parts = mla.qk_nope_head_dim, mla.qk_rope_head_dim
        self.layout: Layout = "interleaved" if config.rope is not None and config.rope.interleaved else "neox"
        self.core_attention = DotProductAttention(
            config.attention_dropout,
            groups.rank("tp") * (A // tp),
            window,
            groups.cp,
            options.context_method,
            scale=_scale(config),
            softcap=config.attention.logit_softcap,
        )
        bias, std = config.qkv_bias, config.init_method_std

        def column(in_features: int, out_features: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(in_features, out_features, options, bias=False, std=std, input_is_gathered=True)

        self.q_entered, self.kv_entered = DiscardableOutput("layernorm"), DiscardableOutput("layernorm")
        self.has_query_latent = mla.q_lora_rank is not None
        if mla.q_lora_rank is None:
            self.q_proj = column(H, A * config.kv_channels)
        else:
            self.q_a_proj = ReplicatedLinear(H, mla.q_lora_rank, options, bias=bias, std=std)
            self.q_a_layernorm = Normalization(config, options, mla.q_lora_rank, mla.norm_epsilon)
            self.q_b_proj = column(mla.q_lora_rank, A * config.kv_channels)
        latent_and_key = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.kv_a_proj_with_mqa = ReplicatedLinear(H, latent_and_key, options, bias=bias, std=std)
        self.kv_a_layernorm = Normalization(config, options, mla.kv_lora_rank, mla.norm_epsilon)
        self.kv_b_proj = column(mla.kv_lora_rank, A * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.o_proj = RowParallelLinear(A * mla.v_head_dim, H, options, bias=config.output_bias, std=output_std(config))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]."""
        q_nope, q_rope = self._queries(x).split(self.head_parts, dim=-1)  # [S, B, A/tp, N], [S, B, A/tp, R]
        latent, k_rope = self._latents(x)  # [S, B, Z], [S, B, 1, R]
        if context.rotary is not None and self.rotates:
            cos, sin = context.rotary.of(self.core_attention.window)  # [S, R/2] or [S, B, R/2]
            q_rope, k_rope = fused_rope(q_rope, k_rope, cos, sin, layout=self.layout)
        if context.cache is None:
            out = self._attend(q_nope, q_rope, latent, k_rope, context)
        else:
            (held,) = context.cache.append(torch.cat((latent.unsqueeze(2), k_rope), dim=-1))  # [Sk, B, 1, Z + R]
            if self._absorbing_is_cheaper(len(x), len(held)):
                out = self._attend_absorbed(q_nope, q_rope, held, context)
            else:
                latent, k_rope = held.split((self.latent_size, self.head_parts[1]), dim=-1)
                out = self._attend(q_nope, q_rope, latent.squeeze(2), k_rope, context)
        y: Tensor = self.o_proj(out.flatten(2))  # [S, B, H]
        return y

    def _queries(self, x: Tensor) -> Tensor:
        """[S, B, H], or [S/tp, B, H] under sequence parallelism -> [S, B, A/tp, D]."""
        q: Tensor
        if self.has_query_latent:
            q = self.q_b_proj(self.q_entered(self._enter, self.q_a_layernorm(self.q_a_proj(x))))
        else:
            q = self.q_proj(self.q_entered(self._enter, x))
        return q.view(*q.shape[:2], -1, sum(self.head_parts))

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the normed latents [S, B, Z] and the unrotated keys [S, B, 1, R]; ``x`` is the input of forward."""
        sizes = self.latent_size, self.head_parts[1]
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(sizes, dim=-1)  # [S, B, Z], [S, B, R]
        latent, k_rope = self.kv_entered(self._enter, self.kv_a_layernorm(latent), k_rope).split(sizes, dim=-1)
        return latent, k_rope.unsqueeze(2)

    def _enter(self, *parts: Tensor) -> Tensor:
        """Concatenates the features of ``parts`` and enters the tensor-parallel region."""
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return enter_tensor_parallel(x, self.options.pg_collection.tp, self.options.sequence_parallel)

    def _attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, context: LayerContext) -> Tensor:
        """Returns [Sq, B, A/tp, Dv]; keys and values come from ``latent`` [Sk, B, Z] and ``k_rope`` [Sk, B, 1, R]."""
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.head_parts[0] + self.value_size))
        k_nope, v = kv.split((self.head_parts[0], self.value_size), dim=-1)  # [Sk, B, A/tp, N], [Sk, B, A/tp, Dv]
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)  # [Sk, B, A/tp, D]
        out: Tensor = self.core_attention(torch.cat((q_nope, q_rope), dim=-1), k, v, context)
        return out

    def _attend_absorbed(self, q_nope: Tensor, q_rope: Tensor, held: Tensor, context: LayerContext) -> Tensor:
        """``_attend`` directly over the cache ``held`` [Sk, B, 1, Z + R], as one key and value for all heads."""
        assert self.kv_b_proj.weight is not None, "kv_b_proj has its own weight"
        weight = local(self.kv_b_proj.weight).unflatten(0, (-1, self.head_parts[0] + self.value_size))
        to_key, to_value = weight.split((self.head_parts[0], self.value_size), dim=1)  # [A/tp, N, Z], [A/tp, Dv, Z]
        q = torch.cat((torch.einsum("sban,anz->sbaz", q_nope, to_key), q_rope), dim=-1)  # [Sq, B, A/tp, Z + R]
        # computing R extra columns of the value costs less than copying the cache without them
        out = self.core_attention(q, held, held, context)[..., : self.latent_size]
        return torch.einsum("sbaz,avz->sbav", out, to_value)

    def _absorbing_is_cheaper(self, num_queries: int, num_keys: int) -> bool:
        """Whether ``_attend_absorbed`` needs fewer multiplications per head than ``_attend``."""
        (N, R), Z, Dv = self.head_parts, self.latent_size, self.value_size
        more_scores = num_queries * num_keys * (2 * (Z + R) - (N + R + Dv))
        return more_scores < (num_keys - num_queries) * Z * (N + Dv)


def _scale(config: TransformerConfig) -> float:
    """Returns the factor on attention scores."""
    if config.attention.scale is not None:
        return config.attention.scale
    scaling, m = None if config.rope is None else config.rope.scaling, 1.0
    if scaling is not None and scaling.mscale_all_dim is not None:
        m += 0.1 * scaling.mscale_all_dim * math.log(scaling.factor)
    return m * m / math.sqrt(config.kv_channels)
