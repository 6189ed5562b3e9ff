"""attention: against its formula; rotary, cached, packed, under any mask; split over tp; refusals."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from megalith.config import RopeConfig
from megalith.errors import ShapeError
from megalith.numerics.dropout import DropoutKey
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.parameters import declared_parameters, initialize_parameters_
from megalith.transformer.attention import SelfAttention
from megalith.transformer.attention_mask import BIDIRECTIONAL, AttentionMask
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.rotary import RotaryTables, rotary_tables
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, B, H, A, G, D = 8, 2, 16, 4, 2, 6
EXACT = 1e-12
SHAPE = {"kv_channels": D, "add_bias_linear": True, "attention_dropout": 0.3}


def built(**changes: object) -> SelfAttention:
    window = changes.pop("window", None)
    shape = {name: changes.pop(name) for name in ("num_attention_heads", "num_query_groups") if name in changes}
    layer = SelfAttention(config(**SHAPE | shape), options(**changes), window=window)
    initialize_parameters_(layer, seed=1)
    name_dropout_sites_(layer)
    with torch.no_grad():
        for name, parameter, spec in declared_parameters(layer):
            if len(spec.shape) == 1:  # biases start at zero, which would hide mistakes
                parameter.add_(len(name) / 20.0)
    return layer


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table(start: int = 0, end: int = S) -> RotaryTables:
    return rotary_tables(torch.arange(start, end), D, RopeConfig(), torch.float64)


def key() -> DropoutKey:
    return DropoutKey(3, 0, torch.arange(B * S).view(B, S))


def test_it_projects_attends_and_projects_back():
    layer = built()
    w = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = x_of().transpose(0, 1)  # [B, S, H]
    heads = [linear(x, w[f"{n}_proj.weight"], w[f"{n}_proj.bias"]).view(B, S, -1, D).transpose(1, 2) for n in "qkv"]
    k, v = (each.repeat_interleave(A // G, dim=1) for each in heads[1:])
    attended = scaled_dot_product_attention(heads[0], k, v, is_causal=True)  # [B, A, S, D]
    want = linear(attended.transpose(1, 2).flatten(2), w["o_proj.weight"], w["o_proj.bias"]).transpose(0, 1)
    torch.testing.assert_close(layer(x_of(), LayerContext()), want, rtol=EXACT, atol=EXACT)


def test_with_rotary_positions_only_distances_count():
    layer = built()
    near, far = (layer(x_of(), LayerContext(rotary=table(start, start + S))) for start in (0, 100))
    torch.testing.assert_close(far, near, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(layer(x_of(), LayerContext()), near)


@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 1, 1, 3], [2, 6]])
def test_tokens_one_at_a_time_or_a_few_give_what_all_at_once_do(pieces):
    layer, cache, outs, start = built(), KVCache(S), [], 0
    for length in pieces:
        context = LayerContext(rotary=table(start, start + length), cache=cache)
        outs.append(layer(x_of()[start : start + length], context))
        start += length
        assert cache.num_tokens == start
    torch.testing.assert_close(torch.cat(outs), layer(x_of(), LayerContext(rotary=table())), rtol=EXACT, atol=EXACT)


def test_dropout_is_drawn_only_with_a_key():
    layer = built()
    without, again = (layer(x_of(), LayerContext(rotary=table())) for _ in range(2))
    assert torch.equal(again, without)
    with_key, once_more = (layer(x_of(), LayerContext(rotary=table(), token_dropout_key=key())) for _ in range(2))
    assert not torch.allclose(with_key, without)
    assert torch.equal(once_more, with_key)


def test_the_mask_of_the_batch_and_the_window_of_the_layer_say_what_is_seen():
    layer, narrow = built(), built(window=3)
    x, later = x_of(), x_of()
    later[6] += 1.0
    both_ways = LayerContext(mask=BIDIRECTIONAL)
    assert not torch.equal(layer(later, both_ways)[0], layer(x, both_ways)[0])
    assert torch.equal(narrow(later, both_ways)[:4], narrow(x, both_ways)[:4]), "token 6 is 3 from token 3"
    assert not torch.equal(narrow(later, both_ways)[4], narrow(x, both_ways)[4])
    windowed = LayerContext(mask=AttentionMask(window=3))
    assert torch.equal(narrow(x, LayerContext()), layer(x, windowed))
    assert not torch.allclose(narrow(x, LayerContext()), layer(x, LayerContext()))


@pytest.mark.parametrize("pieces", [[8], [1] * 8, [3, 1, 1, 3]])
def test_a_window_counts_back_through_the_cache(pieces):
    layer, cache, outs = built(window=3), KVCache(S), []
    for x in x_of().split(pieces):
        outs.append(layer(x, LayerContext(cache=cache)))
    torch.testing.assert_close(torch.cat(outs), layer(x_of(), LayerContext()), rtol=EXACT, atol=EXACT)


def results(layer: SelfAttention, x: Tensor, dy: Tensor, *, packed: bool, drops: bool) -> dict[str, Tensor]:
    documents = PackedSeqParams.from_lengths([[5, 3], [8]]) if packed else None
    context = LayerContext(documents=documents, rotary=table(), token_dropout_key=key() if drops else None)
    y = layer(x.requires_grad_(), context)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: whole(p.grad) for name, p in layer.named_parameters()}


def on_this_rank(groups: int, sequence_parallel: bool, packed: bool, drops: bool) -> dict[str, Tensor]:
    tp = torch.distributed.get_world_size()
    pg_collection = collection(tp)
    layer = built(num_query_groups=groups, pg_collection=pg_collection, sequence_parallel=sequence_parallel)
    x, dy = x_of(), x_of().sin()
    if sequence_parallel:
        x, dy = (each.chunk(tp)[pg_collection.rank("tp")].clone() for each in (x, dy))
    return results(layer, x, dy, packed=packed, drops=drops)


def check_split(tp: int, groups: int, sequence_parallel: bool, packed: bool, drops: bool) -> None:
    """Output and every gradient on ``tp`` ranks match those of one process."""
    want = results(built(num_query_groups=groups), x_of(), x_of().sin(), packed=packed, drops=drops)
    answers = ranks(tp, on_this_rank, groups, sequence_parallel, packed, drops)
    for name, value in want.items():
        parts = [answer[name] for answer in answers]
        for got in [torch.cat(parts)] if sequence_parallel and name in ("y", "dx") else parts:
            torch.testing.assert_close(got, value, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_over_tp_it_is_the_same(sequence_parallel, packed, drops):
    check_split(2, G, sequence_parallel, packed, drops)


@pytest.mark.parametrize(("packed", "drops"), [(False, False), (True, True)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "groups"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_that_share_a_group_of_heads_have_its_exact_gradient(tp, groups, sequence_parallel, packed, drops):
    check_split(tp, groups, sequence_parallel, packed, drops)


def read_in_pieces(groups: int) -> tuple[Tensor, list[int]]:
    """The outputs of one token at a time on this rank, and the shape of its cache."""
    layer, cache = built(num_query_groups=groups, pg_collection=collection(4)), KVCache(S)
    outs = [layer(x, LayerContext(rotary=table(i, i + 1), cache=cache)) for i, x in enumerate(x_of().split(1))]
    return torch.cat(outs).detach(), list(cache.held[0].shape)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_rank_caches_only_the_group_that_it_reads(groups):
    want = built(num_query_groups=groups)(x_of(), LayerContext(rotary=table()))
    for out, shape in ranks(4, read_in_pieces, groups):
        torch.testing.assert_close(out, want, rtol=EXACT, atol=EXACT)
        assert shape == [S, B, 1, D]


def refuse_groups_that_tp_cannot_split() -> None:
    with pytest.raises(
        ShapeError,
        match=r"parallel.tensor \(2\) must divide num_attention_heads \(6\), and divide num_query_groups \(3\) or be a "
        r"multiple of it; use 1, 3, 6$",
    ):
        built(num_attention_heads=6, num_query_groups=3, pg_collection=collection(2))
    with pytest.raises(ShapeError, match=r"parallel.tensor \(2\) must divide num_attention_heads \(3\).*; use 1, 3$"):
        built(num_attention_heads=3, num_query_groups=1, pg_collection=collection(2))


def test_heads_and_groups_that_tp_cannot_split_are_refused():
    ranks(2, refuse_groups_that_tp_cannot_split)
