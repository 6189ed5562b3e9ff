"""A GPT in plain torch, without dropout: the logits of one row of tokens."""

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, rms_norm, silu

from megalith.config import TransformerConfig

__all__ = ["by_formula"]


def attend(q: Tensor, k: Tensor, v: Tensor, c: TransformerConfig, layer: int) -> Tensor:
    """[S, A, D] each -> [S, A * D], causal, within the window of ``layer``."""
    scores = torch.einsum("sad,tad->ast", q, k) / q.shape[-1] ** 0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) & (distance < (window_of(c, layer) or len(q)))
    return torch.einsum("ast,tad->sad", scores.masked_fill(~seen, float("-inf")).softmax(dim=-1), v).flatten(1)


def window_of(c: TransformerConfig, layer: int) -> int | None:
    pattern = c.attention.window_layers or (True,)
    return c.attention.window if pattern[layer % len(pattern)] else None


def turn(x: Tensor, c: TransformerConfig, layer: int, streams: Tensor | None = None) -> Tensor:
    """Applies rotary positions 0, 1, 2 ... to [S, A, D], or those of ``streams`` [3, S], as complex numbers."""
    rope, S = c.rope, len(x)
    if rope.layers and not rope.layers[layer % len(rope.layers)]:
        return x
    R = int(x.shape[-1] * rope.percent)
    is_local = rope.local_base is not None and window_of(c, layer) is not None
    pairs = torch.arange(R // 2)
    angle = torch.arange(S)[:, None] * (rope.local_base if is_local else rope.base) ** (-2 * pairs.double() / R)
    if rope.scaling is not None and not is_local:
        angle = angle / rope.scaling.factor
    if streams is not None:
        stream_of = torch.arange(3).repeat_interleave(torch.tensor(rope.sections))  # [R/2]
        angle = streams[stream_of].t() * rope.base ** (-2 * pairs.double() / R)
    first, second = (x[..., 0:R:2], x[..., 1:R:2]) if rope.interleaved else (x[..., : R // 2], x[..., R // 2 : R])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    both = torch.stack((turned.real, turned.imag), dim=-1 if rope.interleaved else -2).flatten(-2)
    return torch.cat((both, x[..., R:]), dim=-1)


def by_formula(c: TransformerConfig, w: dict[str, Tensor], row: Tensor, streams: Tensor | None = None) -> Tensor:
    """Logits [S, V] of one row of tokens, without dropout; ``streams`` [3, S]: its multimodal-rope positions."""

    def norm(x: Tensor, name: str, eps: float = c.layernorm_epsilon) -> Tensor:
        if c.normalization == "RMSNorm":
            return rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)
        return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], c.layernorm_epsilon)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def latent_heads(h: Tensor, attention: str, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [S, A, D], v [S, A, Dv] of multi-latent attention with a query latent."""
        eps, nope, A = c.mla.norm_epsilon, c.mla.qk_nope_head_dim, c.num_attention_heads
        q = project(
            norm(project(h, f"{attention}.q_a_proj"), f"{attention}.q_a_layernorm", eps), f"{attention}.q_b_proj"
        )
        latent, k_rope = project(h, f"{attention}.kv_a_proj_with_mqa").tensor_split([c.mla.kv_lora_rank], dim=1)
        kv = project(norm(latent, f"{attention}.kv_a_layernorm", eps), f"{attention}.kv_b_proj")
        q_nope, q_rope = q.unflatten(1, (A, -1)).tensor_split([nope], dim=2)
        k_nope, v = kv.unflatten(1, (A, -1)).tensor_split([nope], dim=2)
        q_rope, k_rope = turn(q_rope, c, layer), turn(k_rope[:, None], c, layer).expand(-1, A, -1)
        return torch.cat((q_nope, q_rope), dim=2), torch.cat((k_nope, k_rope), dim=2), v

    x = embedding(row, w["model.embed_tokens.weight"])
    if c.position_embedding_type == "learned_absolute":
        x = x + w["model.embed_positions.weight"][: len(row)]
    for index in range(c.num_layers):
        layer = f"model.layers.{index}"
        h = norm(x, f"{layer}.input_layernorm")
        if c.mla is not None:
            q, k, v = latent_heads(h, f"{layer}.self_attn", index)
        else:
            q, k, v = (project(h, f"{layer}.self_attn.{n}_proj").unflatten(1, (-1, c.kv_channels)) for n in "qkv")
        if c.position_embedding_type == "rope" and c.mla is None:
            q, k = (turn(each, c, index, streams) for each in (q, k))
        k, v = (each.repeat_interleave(c.num_attention_heads // c.num_query_groups, dim=1) for each in (k, v))
        x = x + project(attend(q, k, v, c, index), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        up = project(h, f"{layer}.mlp.up_proj")
        if c.activation == "swiglu":
            up = silu(project(h, f"{layer}.mlp.gate_proj")) * up
        else:
            up = gelu(up, approximate="tanh" if c.activation == "gelu_tanh" else "none")
        x = x + project(up, f"{layer}.mlp.down_proj")
    head = w["model.embed_tokens.weight"] if c.tie_word_embeddings else w["lm_head.weight"]
    return linear(norm(x, "model.norm"), head)
