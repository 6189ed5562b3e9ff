"""attention: its formula from its own weights, rotary, cached and packed; split over tp; what it refuses."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from megalith.errors import ShapeError
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.parameters import declared_parameters, initialize_parameters_
from megalith.transformer.attention import KVCache, SelfAttention
from megalith.transformer.rotary import RotaryTable, rotary_table
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, B, H, A, G, D = 8, 2, 16, 4, 2, 6
EXACT = 1e-12
SHAPE = {"kv_channels": D, "add_bias_linear": True, "attention_dropout": 0.3}


def built(**changes: object) -> SelfAttention:
    layer = SelfAttention(config(**SHAPE), options(**changes))
    initialize_parameters_(layer, seed=1)
    with torch.no_grad():
        for name, parameter, spec in declared_parameters(layer):
            if len(spec.shape) == 1:  # biases begin at zero, and would not show
                parameter.add_(len(name) / 20.0)
    return layer


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table(start: int = 0, end: int = S) -> RotaryTable:
    return rotary_table(torch.arange(start, end), D, 10000.0, torch.float64)


def key() -> DropoutKey:
    return DropoutKey(3, 0, torch.arange(B * S).view(B, S), site=1)


def test_it_projects_attends_and_projects_back():
    layer = built()
    w = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = x_of().transpose(0, 1)  # [B, S, H]
    heads = [linear(x, w[f"{n}_proj.weight"], w[f"{n}_proj.bias"]).view(B, S, -1, D).transpose(1, 2) for n in "qkv"]
    k, v = (each.repeat_interleave(A // G, dim=1) for each in heads[1:])
    attended = scaled_dot_product_attention(heads[0], k, v, is_causal=True)  # [B, A, S, D]
    want = linear(attended.transpose(1, 2).flatten(2), w["o_proj.weight"], w["o_proj.bias"]).transpose(0, 1)
    torch.testing.assert_close(layer(x_of(), None, None, None, None), want, rtol=EXACT, atol=EXACT)


def test_with_rotary_positions_only_distances_count():
    layer = built()
    near = layer(x_of(), table(), None, None, None)
    torch.testing.assert_close(layer(x_of(), table(100, 100 + S), None, None, None), near, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(layer(x_of(), None, None, None, None), near)


@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 1, 1, 3], [2, 6]])
def test_tokens_one_at_a_time_or_a_few_give_what_all_at_once_do(pieces):
    layer, cache, outs, start = built(), KVCache(), [], 0
    for length in pieces:
        outs.append(layer(x_of()[start : start + length], table(start, start + length), None, None, cache))
        start += length
        assert cache.num_tokens == start
    torch.testing.assert_close(torch.cat(outs), layer(x_of(), table(), None, None, None), rtol=EXACT, atol=EXACT)


def test_dropout_is_drawn_only_with_a_key():
    layer = built()
    without = layer(x_of(), table(), None, None, None)
    assert torch.equal(layer(x_of(), table(), None, None, None), without)
    with_key = layer(x_of(), table(), None, key(), None)
    assert not torch.allclose(with_key, without)
    assert torch.equal(layer(x_of(), table(), None, key(), None), with_key)


def results(layer: SelfAttention, x: Tensor, dy: Tensor, *, packed: bool, drops: bool) -> dict[str, Tensor]:
    documents = PackedSeqParams.from_lengths([[5, 3], [8]]) if packed else None
    y = layer(x.requires_grad_(), table(), documents, key() if drops else None, None)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: whole(p.grad) for name, p in layer.named_parameters()}


def on_this_rank(sequence_parallel: bool, packed: bool, drops: bool) -> dict[str, Tensor]:
    groups = collection(2)
    layer = built(pg_collection=groups, sequence_parallel=sequence_parallel)
    x, dy = x_of(), x_of().sin()
    if sequence_parallel:
        x, dy = (each.chunk(2)[groups.tp_rank].clone() for each in (x, dy))
    return results(layer, x, dy, packed=packed, drops=drops)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_over_tp_it_is_the_same(sequence_parallel, packed, drops):
    want = results(built(), x_of(), x_of().sin(), packed=packed, drops=drops)
    answers = ranks(2, on_this_rank, sequence_parallel, packed, drops)
    for name, value in want.items():
        parts = [answer[name] for answer in answers]
        for got in [torch.cat(parts)] if sequence_parallel and name in ("y", "dx") else parts:
            torch.testing.assert_close(got, value, rtol=EXACT, atol=EXACT)


def refuse_groups_that_tp_cannot_split() -> None:
    with pytest.raises(
        ShapeError,
        match=r"num_attention_heads \(4\) and num_query_groups \(2\) must be divisible by parallel.tensor \(4\)",
    ):
        built(pg_collection=collection(4))


def test_heads_and_groups_that_tp_cannot_split_are_refused():
    ranks(4, refuse_groups_that_tp_cannot_split)
