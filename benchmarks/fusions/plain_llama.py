"""A Llama written by hand in plain torch, and the same with parts replaced by ``megalith.fusions``.

Parameters are named as in Hugging Face's model. S sequence, B batch, H hidden, A heads, G groups, D head size.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

from megalith import fusions
from megalith.config import TransformerConfig

__all__ = ["FUSED", "PLAIN", "Parts", "PlainLlama"]


class Parts:
    """The replaceable parts in plain torch: norm, rotary embedding, gated activation and loss."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of [..., H]."""
        return rms_norm(x, (x.shape[-1],), weight, eps)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates the halves of heads [B, S, A, D] by tables [S, D/2]."""

        def of(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            c, s = cos[None, :, None].to(x.dtype), sin[None, :, None].to(x.dtype)
            return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

        return of(q), of(k)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU of two halves [..., F]."""
        return silu(gate) * up

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of logits [B, S, V]."""
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class _Fused(Parts):
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fusions.fused_rms_norm(x, weight, eps)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        tables = (table[:, None].expand(-1, len(q), -1) for table in (cos, sin))
        rotated = fusions.fused_rope(q.transpose(0, 1), k.transpose(0, 1), *tables)  # heads are [S, B, A, D] there
        return rotated[0].transpose(0, 1), rotated[1].transpose(0, 1)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return fusions.glu(gate, up, activation="silu")

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return fusions.fused_vocab_parallel_cross_entropy(logits, labels).mean()


PLAIN, FUSED = Parts(), _Fused()


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig, parts: Parts) -> None:
        super().__init__()
        A, G, D, H = config.num_attention_heads, config.num_query_groups, config.kv_channels, config.hidden_size
        wide, narrow = A * D, G * D
        self.parts, self.D, self.is_grouped = parts, D, A != G
        self.q_proj, self.k_proj = nn.Linear(H, wide, bias=False), nn.Linear(H, narrow, bias=False)
        self.v_proj, self.o_proj = nn.Linear(H, narrow, bias=False), nn.Linear(wide, H, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.D)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.parts.rotated(q, k, cos, sin)  # [B, S, A, D], [B, S, G, D]
        heads = (each.transpose(1, 2) for each in (q, k, v))
        y = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, H: int, F: int, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.gate_proj, self.up_proj = nn.Linear(H, F, bias=False), nn.Linear(H, F, bias=False)
        self.down_proj = nn.Linear(F, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.parts.gated(self.gate_proj(x), self.up_proj(x)))


class _Norm(nn.Module):
    def __init__(self, H: int, eps: float, parts: Parts) -> None:
        super().__init__()
        self.weight, self.eps, self.parts = nn.Parameter(torch.ones(H)), eps, parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.norm(x, self.weight, self.eps)


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig, parts: Parts) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.layernorm_epsilon
        self.input_layernorm, self.post_attention_layernorm = _Norm(H, eps, parts), _Norm(H, eps, parts)
        self.self_attn, self.mlp = _Attention(config, parts), _MLP(H, config.ffn_hidden_size, parts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """``model(tokens, labels)``, both [B, S], returns the mean loss."""

    def __init__(self, config: TransformerConfig, parts: Parts) -> None:
        super().__init__()
        V, H = config.vocab_size or 0, config.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(V, H)
        self.model.layers = nn.ModuleList(_Layer(config, parts) for _ in range(config.num_layers))
        self.model.norm = _Norm(H, config.layernorm_epsilon, parts)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.parts, self.half = parts, config.kv_channels // 2

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        steps = torch.arange(self.half, device=tokens.device) / self.half
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / 10000.0**steps  # [S, D/2]
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(tokens)  # [B, S, H]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.parts.loss(self.lm_head(self.model.norm(x)), labels)
