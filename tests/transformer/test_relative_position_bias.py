"""relative_position_bias: transformers' buckets, the bias of blocks, its gradient, and attention with every method."""

import pytest
import torch
from torch import Tensor

from megalith.config import RelativePositionConfig
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.context.relative_bias import add_gradient_between_, bias_between
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.transformer.attention_mask import BIDIRECTIONAL, CAUSAL
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.relative_position_bias import RelativePositionBias, relative_position_bucket
from tests.parallel.groups import collection
from tests.rank_pool import ranks
from tests.transformer.shapes import options

S, B, A, D = 16, 2, 4, 8
EXACT = 1e-12
METHODS = [
    ContextMethod("ring"),
    ContextMethod("all_gather"),
    ContextMethod("all_to_all"),
]


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 999)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_transformers(bidirectional, num_buckets, max_distance):
    T5Attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(-3000, 3001)
    got = relative_position_bucket(
        distance, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    want = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(got, want)


def test_a_block_has_the_bias_of_its_distances_and_gives_it_their_gradient():
    by_distance = torch.randn(A, 2 * S - 1, dtype=torch.float64, requires_grad=True)
    queries, keys = range(3, 9), range(7, 16)
    got = bias_between(by_distance, queries, keys)
    want = torch.stack([torch.stack([by_distance[:, j - i + S - 1] for j in keys], -1) for i in queries], 1)
    assert torch.equal(got, want)
    dbias = torch.randn_like(got)
    [whole] = torch.autograd.grad(want, by_distance, dbias, retain_graph=True)
    [by_windows] = torch.autograd.grad(got, by_distance, dbias)
    added = torch.zeros_like(whole)
    add_gradient_between_(added, dbias, queries, keys)
    torch.testing.assert_close(by_windows, whole, rtol=0, atol=EXACT)
    torch.testing.assert_close(added, whole, rtol=0, atol=EXACT)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(S, B, A, D, generator=generator, dtype=torch.float64) for _ in range(4)]


def unfused(causal: bool, lengths: list[list[int]] | None) -> list[Tensor]:
    """out and the gradients of q, k, v and the table, score by score."""
    q, k, v, dout = tensors()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias = table(options(), causal)
    weight = bias.weight
    documents = [[d for d, n in enumerate(row) for _ in range(n)] for row in lengths or [[S]] * B]
    rows = []
    for i in range(S):
        for b in range(B):
            seen = [j for j in range(S) if documents[b][j] == documents[b][i] and (j <= i or not causal)]
            buckets = relative_position_bucket(
                torch.tensor([j - i for j in seen]), bidirectional=not causal, num_buckets=8, max_distance=12
            )
            scores = torch.einsum("ad,jad->ja", q[i, b], k[seen, b]) + weight[buckets]  # the scale is 1
            rows.append(torch.einsum("ja,jad->ad", scores.softmax(0), v[seen, b]))
    out = torch.stack(rows).view(S, B, A, D)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, weight), dout)]


def table(build, causal: bool) -> RelativePositionBias:
    config = RelativePositionConfig(num_buckets=8, max_distance=12)
    bias = RelativePositionBias(config, A, build, bidirectional=not causal, std=1.0)
    torch.manual_seed(7)
    values = torch.randn(8, A, dtype=torch.float64)
    with torch.no_grad():
        weight = bias.weight.to_local() if hasattr(bias.weight, "to_local") else bias.weight
        weight.copy_(values[:, : weight.shape[1]])
    return bias


def attend_on_ranks(method: ContextMethod | None, causal: bool, lengths: list[list[int]] | None) -> list[Tensor]:
    """This rank's out and gradients of q, k, v, and its term of the table's gradient."""
    groups = collection(context=torch.distributed.get_world_size()) if method else None
    build = options(pg_collection=groups) if groups else options()
    bias = table(build, causal)
    mine = zigzag_positions(S, groups.size("cp"), groups.rank("cp")) if groups else torch.arange(S)
    q, k, v, dout = (x[mine] for x in tensors())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    documents = None if lengths is None else PackedSeqParams.from_lengths(lengths)
    context = LayerContext(mask=CAUSAL if causal else BIDIRECTIONAL, documents=documents, position_bias=bias(S, S))
    attention = DotProductAttention(0.0, 0, None, groups.cp if groups else None, method, scale=1.0)
    out = attention(q, k, v, context)
    dq, dk, dv, dtable = torch.autograd.grad(out, (q, k, v, bias.weight), dout)
    dtable = dtable.to_local() if hasattr(dtable, "to_local") else dtable
    return [x.detach() for x in (out, dq, dk, dv, dtable)]


@pytest.mark.parametrize("lengths", [None, [[5, 11], [9, 1, 6]]], ids=["whole", "packed"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_a_bias_is_its_formula_forward_and_backward(causal, lengths):
    for got, want in zip(attend_on_ranks(None, causal, lengths), unfused(causal, lengths), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=EXACT)


@pytest.mark.parametrize("lengths", [None, [[5, 11], [9, 1, 6]]], ids=["whole", "packed"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_split_over_cp_the_bias_is_that_of_global_positions(method, causal, lengths):
    want = unfused(causal, lengths)
    parts = ranks(2, attend_on_ranks, method, causal, lengths)
    for rank, part in enumerate(parts):
        mine = zigzag_positions(S, 2, rank)
        for got, whole in zip(part[:4], want[:4], strict=True):
            torch.testing.assert_close(got, whole[mine], rtol=0, atol=EXACT)
    torch.testing.assert_close(parts[0][4] + parts[1][4], want[4], rtol=0, atol=EXACT)


def test_queries_after_a_cache_have_the_bias_of_their_positions():
    q, k, v, _ = tensors()
    bias = table(options(), causal=True)
    attention = DotProductAttention(0.0, 0, scale=1.0)
    whole = attention(q, k, v, LayerContext(position_bias=bias(S, S)))
    last = attention(q[-3:], k, v, LayerContext(position_bias=bias(3, S)))
    torch.testing.assert_close(last, whole[-3:], rtol=0, atol=EXACT)
