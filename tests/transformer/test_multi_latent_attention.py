"""Latent attention: its cache and the two ways to read it; tests/models/test_gpt_model.py compares numbers."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalith.config import TransformerConfig
from megalith.errors import ShapeError
from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import layer_specs
from megalith.transformer.multi_latent_attention import MLASelfAttention
from megalith.transformer.rotary import rotary_tables
from tests.parallel.groups import collection
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, B = 9, 2
EXACT = 1e-12


def built(shape: TransformerConfig) -> MLASelfAttention:
    layer = layer_specs(shape)(0).attention(shape, options())
    assert isinstance(layer, MLASelfAttention)
    initialize_parameters_(layer, seed=1)
    return layer


def context(shape: TransformerConfig, start: int, end: int, cache: KVCache | None = None) -> LayerContext:
    assert shape.rope is not None
    tables = rotary_tables(torch.arange(start, end), shape.rotary_head_size, shape.rope, torch.float64)
    return LayerContext(rotary=tables, cache=cache)


def x_of(shape: TransformerConfig, tokens: int = S) -> Tensor:
    return torch.randn(tokens, B, shape.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def in_parts(layer: MLASelfAttention, shape: TransformerConfig, x: Tensor, sizes: list[int]) -> tuple[Tensor, KVCache]:
    """The output of ``layer`` for ``x`` in parts, with a cache of the earlier parts."""
    cache, outs, start = KVCache(len(x)), [], 0
    for size in sizes:
        outs.append(layer(x[start : start + size], context(shape, start, start + size, cache)))
        start += size
    return torch.cat(outs), cache


CHANGES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "no latent of queries": {"mla": {"kv_lora_rank": 10, "v_head_dim": 5}},
    "a window and capped scores": {"attention": {"window": 3, "logit_softcap": 2.0}},
    "no positions": {"rope": {"layers": [False]}},
    "yarn": {
        "rope": {
            "scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
            }
        }
    },
}


@pytest.mark.parametrize("absorbs", [False, True, None], ids=["expanded", "absorbed", "as is cheaper"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_tokens_after_a_cache_of_latents_are_those_of_the_whole_row(changes, absorbs):
    shape = config("latents", **changes)
    layer, x = built(shape), x_of(shape)
    want = layer(x, context(shape, 0, S))
    choice = MLASelfAttention._absorbing_is_cheaper
    with patch.object(MLASelfAttention, "_absorbing_is_cheaper", choice if absorbs is None else lambda *_: absorbs):
        for sizes in ([S], [4, 1, 1, 3], [1] * S):
            got, _ = in_parts(layer, shape, x, sizes)
            torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


@torch.no_grad()
def test_a_cache_holds_one_latent_and_one_rotated_key_of_a_token_whatever_the_number_of_heads():
    for heads in (4, 8):
        shape = config("latents", num_attention_heads=heads, num_query_groups=heads)
        _, cache = in_parts(built(shape), shape, x_of(shape), [4, 5])
        assert shape.mla is not None
        assert [tuple(held.shape) for held in cache.held] == [(S, B, 1, 10 + 4)]


@pytest.mark.parametrize(
    ("num_before", "num_new"), [(0, 1), (0, 8), (1, 1), (8, 1), (8, 8), (40, 3), (40, 40), (8, 40)]
)
@pytest.mark.parametrize("sizes", [{}, {"kv_lora_rank": 40, "v_head_dim": 30}, {"kv_lora_rank": 2}], ids=str)
@torch.no_grad()
def test_the_cheaper_way_to_read_a_cache_is_taken_by_torchs_count(sizes, num_before, num_new):
    plain = config("latents").mla
    assert plain is not None
    shape = config("latents", mla=plain.model_dump() | sizes)
    layer, x = built(shape), x_of(shape, num_before + num_new)
    flops = {}
    for absorbs in (False, True):
        cache = KVCache(len(x))
        with patch.object(MLASelfAttention, "_absorbing_is_cheaper", lambda *_, absorbs=absorbs: absorbs):
            if num_before:
                layer(x[:num_before], context(shape, 0, num_before, cache))
            with FlopCounterMode(display=False) as counter:
                layer(x[num_before:], context(shape, num_before, len(x), cache))
        flops[absorbs] = counter.get_total_flops()
    assert layer._absorbing_is_cheaper(num_new, len(x)) == (flops[True] < flops[False])


def refusal() -> str:
    groups = collection(2)
    with pytest.raises(ShapeError) as error:
        MLASelfAttention(config("latents", num_attention_heads=3, num_query_groups=3), options(pg_collection=groups))
    return str(error.value)


def test_heads_that_ranks_do_not_divide_are_refused_on_every_rank():
    assert set(ranks(2, refusal)) == {"parallel.tensor (2) must divide num_attention_heads (3); use 1, 3"}
