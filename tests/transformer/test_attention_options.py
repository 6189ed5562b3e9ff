"""Options of attention: transformers' modules or a formula in float64; a cache, a prefix, dropout, splits over tp."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import layer_norm, linear, rms_norm
from transformers import Gemma2Config, GptOssConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from megalith.config import RopeConfig
from megalith.numerics.dropout import DropoutKey, attention_keep_mask
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.local_ranges import local_ranges
from megalith.parallel.parameters import declared_parameters, initialize_parameters_
from megalith.transformer.attention import SelfAttention
from megalith.transformer.attention_mask import AttentionMask, Prefix
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.rotary import RotaryTables, rotary_tables
from tests.parallel.groups import collection, slice_of, whole
from tests.rank_pool import ranks
from tests.sampling import sampled
from tests.transformer.shapes import config, options

S, B, H, A, G, D = 8, 2, 16, 4, 2, 6
P = 0.3
EPS = 1e-3  # large, so that using it in the wrong place shows
EXACT = 1e-12
FLOAT32 = 1e-5  # these transformers modules compute their softmax, or their norms, in float32
ALL = {
    "softmax": "learnable",
    "qk_norm": "LayerNorm",
    "output_gate": True,
    "logit_softcap": 2.0,
    "scale": 0.5,
    "qkv_bias": True,
    "output_bias": False,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "off by one": {"softmax": "off_by_one"},
    "sinks": {"softmax": "learnable"},
    "RMSNorm": {"qk_norm": "RMSNorm"},
    "LayerNorm": {"qk_norm": "LayerNorm"},
    "L2": {"qk_norm": "L2"},
    "gate": {"output_gate": True},
    "softcap": {"logit_softcap": 1.5},
    "scale": {"scale": 0.7},
    "output bias": {"output_bias": True},
    "all": ALL,
}
of_options = pytest.mark.parametrize("attention", OPTIONS.values(), ids=OPTIONS)


def built(attention: Mapping[str, Any], groups: int = G, dropout: float = 0.0, **changes: Any) -> SelfAttention:
    shape = config(
        attention=attention,
        num_query_groups=groups,
        kv_channels=D,
        attention_dropout=dropout,
        layernorm_epsilon=EPS,
    )
    layer = SelfAttention(shape, options(**changes))
    initialize_parameters_(layer, seed=1)
    name_dropout_sites_(layer)
    with torch.no_grad():
        for name, parameter, spec in declared_parameters(layer):
            if len(spec.shape) == 1:  # initial ones and zeros hide mistakes, and so does shifting every score equally
                steps = torch.linspace(-0.4, 0.6, spec.shape[0], dtype=torch.float64) + len(name) / 40.0
                values = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                values.add_(slice_of(steps, local_ranges(parameter)))
    return layer


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table(start: int = 0, end: int = S) -> RotaryTables:
    return rotary_tables(torch.arange(start, end), D, RopeConfig(), torch.float64)


def key() -> DropoutKey:
    return DropoutKey(3, 0, torch.arange(B * S).view(B, S))


def with_gradients(attend: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of ``parameters``."""
    x = x_of().requires_grad_()
    y = attend(x)
    dy = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    found = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"y": y.detach(), "dx": found[0], **dict(zip(parameters, found[1:], strict=True))}


SIZES = {
    "hidden_size": H,
    "num_attention_heads": A,
    "num_key_value_heads": G,
    "head_dim": D,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "layer_types": ["full_attention"],
    "attn_implementation": "eager",
}
# transformers' module and its settings, our settings, the tolerance
PEERS: dict[str, tuple[type, Any, dict[str, Any], float]] = {
    "gpt-oss": (
        GptOssAttention,
        GptOssConfig(**SIZES, attention_bias=True),
        {"softmax": "learnable", "qkv_bias": True, "output_bias": True},
        EXACT,
    ),
    "gemma 2": (
        Gemma2Attention,
        Gemma2Config(**SIZES, attn_logit_softcapping=1.5, query_pre_attn_scalar=3),
        {"logit_softcap": 1.5, "scale": 3.0**-0.5},
        FLOAT32,
    ),
    "qwen3": (Qwen3Attention, Qwen3Config(**SIZES), {"qk_norm": "RMSNorm"}, FLOAT32),
    "qwen3-next": (
        Qwen3NextAttention,
        Qwen3NextConfig(**SIZES, attention_bias=True),
        {"qk_norm": "RMSNorm", "output_gate": True, "qkv_bias": True, "output_bias": True},
        FLOAT32,
    ),
}


def as_ours(theirs: Mapping[str, Tensor], has_gate: bool, of_gradients: bool) -> dict[str, Tensor]:
    """Their tensors under our names; Qwen3-Next has each head's gate after its query, and norms with 1 + weight."""
    found = {name: tensor for name, tensor in theirs.items() if not (has_gate and name.startswith("q_proj"))}
    if has_gate:
        for part in ("weight", "bias"):
            packed = theirs[f"q_proj.{part}"].unflatten(0, (A, 2 * D))
            found[f"q_proj.{part}"], found[f"gate_proj.{part}"] = (x.flatten(0, 1) for x in packed.split(D, dim=1))
        if not of_gradients:
            found |= {f"{norm}.weight": 1.0 + theirs[f"{norm}.weight"] for norm in ("q_norm", "k_norm")}
    return found


@pytest.mark.parametrize(("module", "shape", "attention", "near"), PEERS.values(), ids=PEERS)
def test_it_is_the_attention_of_transformers_forward_and_backward(module, shape, attention, near):
    theirs: nn.Module = module(shape, layer_idx=0).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    angles = torch.arange(S).unsqueeze(1) * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # [S, D/2]
    angles = angles if module is GptOssAttention else torch.cat((angles, angles), dim=1)
    hidden = torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    positions = angles.cos()[None], angles.sin()[None]
    has_gate = attention.get("output_gate", False)

    def attend(x: Tensor) -> Tensor:
        return theirs(x.transpose(0, 1), positions, hidden)[0].transpose(0, 1)

    found = with_gradients(attend, dict(theirs.named_parameters()))
    want = {name: found.pop(name) for name in ("y", "dx")} | as_ours(found, has_gate, of_gradients=True)
    ours = built(attention)
    ours.load_state_dict(as_ours(theirs.state_dict(), has_gate, of_gradients=False))
    got = with_gradients(lambda x: ours(x, LayerContext(rotary=table())), dict(ours.named_parameters()))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}")


def formula(layer: SelfAttention, attention: Mapping[str, Any], x: Tensor, visible: Tensor, drops: bool) -> Tensor:
    """Computes it head by head, from the weights of ``layer``; ``visible`` [B, S, S]."""
    w, out = dict(layer.named_parameters()), x.new_empty(S, B, A, D)
    q, k, v = (linear(x, w[f"{n}_proj.weight"], w.get(f"{n}_proj.bias")).view(S, B, -1, D) for n in "qkv")
    kind = attention.get("qk_norm")
    if kind == "LayerNorm":
        q, k = (layer_norm(y, (D,), w[f"{n}_norm.weight"], w[f"{n}_norm.bias"], EPS) for n, y in (("q", q), ("k", k)))
    elif kind is not None:  # L2: x / sqrt(mean(x^2) + eps)
        q, k = (rms_norm(y, (D,), w.get(f"{n}_norm.weight"), EPS) for n, y in (("q", q), ("k", k)))
    for b in range(B):
        for a in range(A):
            scores = q[:, b, a] @ k[:, b, a // (A // G)].t() * attention.get("scale", D**-0.5)
            if cap := attention.get("logit_softcap"):
                scores = cap * torch.tanh(scores / cap)
            weights = torch.exp(scores) * visible[b]
            total = weights.sum(dim=1, keepdim=True)
            softmax = attention.get("softmax", "vanilla")
            if softmax != "vanilla":
                total = total + (1.0 if softmax == "off_by_one" else torch.exp(w["sinks"][a]))
            probs = weights / total
            if drops:
                site = layer.core_attention.dropout
                keep = attention_keep_mask(site.of(key()).key, P, A, S)[b, a]
                probs = probs * keep / (1.0 - P)
            out[:, b, a] = probs @ v[:, b, a // (A // G)]
    y = out.flatten(2)
    if attention.get("output_gate"):
        y = y * torch.sigmoid(linear(x, w["gate_proj.weight"], w.get("gate_proj.bias")))
    return linear(y, w["o_proj.weight"], w.get("o_proj.bias"))


CAUSAL = torch.ones(S, S).tril().expand(B, S, S)
LENGTHS = [[5, 3], [8]]
DOCUMENTS = torch.stack([torch.block_diag(*(torch.ones(n, n) for n in row)).tril() for row in LENGTHS])
PREFIXES = [3, 8]
BEFORE = [(torch.arange(S) < n).float() for n in PREFIXES]
PREFIX = torch.stack([CAUSAL[0].maximum(before.outer(before)) for before in BEFORE])
CONTEXTS = {
    "causal": (LayerContext(), CAUSAL, False),
    "documents": (LayerContext(documents=PackedSeqParams.from_lengths(LENGTHS)), DOCUMENTS, False),
    "prefix": (LayerContext(mask=AttentionMask(prefix=Prefix.of(PREFIXES, S))), PREFIX, False),
    "dropout": (LayerContext(token_dropout_key=key()), CAUSAL, True),
    "dropout, documents": (
        LayerContext(documents=PackedSeqParams.from_lengths(LENGTHS), token_dropout_key=key()),
        DOCUMENTS,
        True,
    ),
    "dropout, prefix": (
        LayerContext(mask=AttentionMask(prefix=Prefix.of(PREFIXES, S)), token_dropout_key=key()),
        PREFIX,
        True,
    ),
}


@of_options
@pytest.mark.parametrize(("context", "visible", "drops"), CONTEXTS.values(), ids=CONTEXTS)
def test_it_is_the_formula_forward_and_backward(context, visible, drops, attention):
    layer = built(attention, dropout=P)
    parameters = dict(layer.named_parameters())
    got = with_gradients(lambda x: layer(x, context), parameters)
    want = with_gradients(lambda x: formula(layer, attention, x, visible, drops), parameters)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}")


@of_options
@pytest.mark.parametrize("pieces", [[1] * 8, [3, 1, 1, 3]])
def test_tokens_one_at_a_time_or_a_few_give_what_all_at_once_do(pieces, attention):
    layer, cache, outs, start = built(attention), KVCache(S), [], 0
    for length in pieces:
        context = LayerContext(rotary=table(start, start + length), cache=cache)
        outs.append(layer(x_of()[start : start + length], context))
        start += length
    torch.testing.assert_close(torch.cat(outs), layer(x_of(), LayerContext(rotary=table())), rtol=EXACT, atol=EXACT)


def test_the_defaults_have_the_parameters_that_there_were():
    names = {name for name, _ in built({}).named_parameters()}
    assert names == {f"{n}_proj.weight" for n in "qkvo"}


def results(layer: SelfAttention, x: Tensor, dy: Tensor, drops: bool) -> dict[str, Tensor]:
    context = LayerContext(rotary=table(), token_dropout_key=key() if drops else None)
    y = layer(x.requires_grad_(), context)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: whole(p.grad) for name, p in layer.named_parameters()}


def on_this_rank(sequence_parallel: bool, groups: int, drops: bool) -> dict[str, dict[str, Tensor]]:
    tp = torch.distributed.get_world_size()
    pg_collection, found = collection(tp), {}
    for name, attention in OPTIONS.items():
        layer = built(attention, groups, P, pg_collection=pg_collection, sequence_parallel=sequence_parallel)
        x, dy = x_of(), x_of().sin()
        if sequence_parallel:
            x, dy = (each.chunk(tp)[pg_collection.rank("tp")].clone() for each in (x, dy))
        found[name] = results(layer, x, dy, drops)
    return found


# ranks of tp, query groups, sequence parallelism, dropout; `make test` takes each of the first two once
SPLITS = [(*split, *ways) for split in ((2, 2), (2, 1), (4, 2), (4, 1)) for ways in product([False, True], repeat=2)]


@pytest.mark.parametrize(
    ("tp", "groups", "sequence_parallel", "drops"), sampled(SPLITS, lambda case: {case[:2], case[2:]})
)
def test_split_over_tp_output_and_every_gradient_are_those_of_one_process(tp, groups, sequence_parallel, drops):
    answers = ranks(tp, on_this_rank, sequence_parallel, groups, drops)
    for option, attention in OPTIONS.items():
        want = results(built(attention, groups, P), x_of(), x_of().sin(), drops)
        for name, value in want.items():
            parts = [answer[option][name] for answer in answers]
            for got in [torch.cat(parts)] if sequence_parallel and name in ("y", "dx") else parts:
                message = f"{option}, {name}"
                torch.testing.assert_close(got, value, rtol=EXACT, atol=EXACT, msg=lambda m, n=message: f"{n}: {m}")
