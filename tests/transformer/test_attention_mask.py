"""attention_mask: visible keys, by hand; and attention is the softmax over exactly these, with and without dropout."""

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.numerics.dropout import DropoutKey, attention_keep_mask, name_number
from megalith.packed_seq_params import PackedSeqParams
from megalith.transformer.attention_mask import BIDIRECTIONAL, CAUSAL, AttentionMask, Prefix
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.layer_context import LayerContext

CPU = torch.device("cpu")
S, B, A, G, D = 6, 7, 4, 2, 3
EXACT, SINGLE = 1e-12, 1e-5  # a few roundings in float64, and in float32
LENGTHS = [[6], [1, 5], [2, 4], [3, 3], [1, 1, 4], [2, 2, 2], [1] * 6]


def padded() -> PackedSeqParams:
    """Rows of 6, 5, .. 0 tokens, padded on the right, and one of 3 padded on both sides."""
    is_token = torch.arange(S) < torch.tensor([[6], [5], [4], [2], [1], [0], [0]])
    is_token[6, 2:5] = True
    return PackedSeqParams.from_padding(is_token)


# name: (mask, documents)
KINDS: dict[str, tuple[AttentionMask, PackedSeqParams | None]] = {
    "causal": (CAUSAL, None),
    "bidirectional": (BIDIRECTIONAL, None),
    "causal window": (AttentionMask(window=2), None),
    "window of one": (AttentionMask(window=1), None),
    "window of the row": (AttentionMask(window=S), None),
    "bidirectional window": (AttentionMask(causal=False, window=3), None),
    "prefix": (AttentionMask(prefix=Prefix.of(range(S + 1), S)), None),
    "documents": (CAUSAL, PackedSeqParams.from_lengths(LENGTHS)),
    "bidirectional documents": (BIDIRECTIONAL, PackedSeqParams.from_lengths(LENGTHS)),
    "window in documents": (AttentionMask(causal=False, window=2), PackedSeqParams.from_lengths(LENGTHS)),
    "padding": (BIDIRECTIONAL, padded()),
    "causal padding": (CAUSAL, padded()),
}


def drawn(seen: Tensor) -> list[str]:
    """A mask as text, one word per query: "x" where it sees the key."""
    return ["".join("x" if key else "." for key in query) for query in seen.tolist()]


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        (CAUSAL, ["x...", "xx..", "xxx.", "xxxx"]),
        (BIDIRECTIONAL, ["xxxx"] * 4),
        (AttentionMask(window=2), ["x...", "xx..", ".xx.", "..xx"]),
        (AttentionMask(window=1), ["x...", ".x..", "..x.", "...x"]),
        (AttentionMask(causal=False, window=2), ["xx..", "xxx.", ".xxx", "..xx"]),
        (AttentionMask(causal=False, window=1), ["x...", ".x..", "..x.", "...x"]),
        (AttentionMask(causal=False, window=9), ["xxxx"] * 4),
    ],
)
def test_who_sees_whom_by_hand(mask, want):
    seen = mask.visible(4, CPU)
    assert (seen.dtype, seen.shape) == (torch.bool, (1, 1, 4, 4))
    assert drawn(seen[0, 0]) == want


def test_a_prefix_sees_itself_and_the_rest_is_causal_by_hand():
    seen = AttentionMask(prefix=Prefix.of([0, 1, 3, 4], 4)).visible(4, CPU)
    assert seen.shape == (4, 1, 4, 4)
    assert drawn(seen[0, 0]) == drawn(seen[1, 0]) == ["x...", "xx..", "xxx.", "xxxx"]
    assert drawn(seen[2, 0]) == ["xxx.", "xxx.", "xxx.", "xxxx"]
    assert drawn(seen[3, 0]) == ["xxxx"] * 4


def test_documents_are_apart_under_any_mask_by_hand():
    documents = PackedSeqParams.from_lengths([[3, 1], [4]])
    causal, both = (mask.visible(4, CPU, documents) for mask in (CAUSAL, BIDIRECTIONAL))
    assert causal.shape == both.shape == (2, 1, 4, 4)
    assert drawn(causal[0, 0]) == ["x...", "xx..", "xxx.", "...x"]
    assert drawn(both[0, 0]) == ["xxx.", "xxx.", "xxx.", "...x"]
    assert drawn(causal[1, 0]) == ["x...", "xx..", "xxx.", "xxxx"]


def test_tokens_and_padding_do_not_see_each_other_by_hand():
    documents = PackedSeqParams.from_padding(torch.tensor([[False, True, True, False]]))
    assert drawn(BIDIRECTIONAL.visible(4, CPU, documents)[0, 0]) == ["x...", ".xx.", ".xx.", "...x"]


@pytest.mark.parametrize(
    ("mask", "sides"),
    [
        (CAUSAL, None),
        (BIDIRECTIONAL, None),
        (AttentionMask(window=3), (2, 0)),
        (AttentionMask(causal=False, window=3), (2, 2)),
    ],
)
def test_a_window_in_keys_before_and_after(mask, sides):
    assert mask.sides == sides


def test_a_layer_narrows_the_mask_and_never_widens_it():
    assert CAUSAL.within(None) is CAUSAL
    assert CAUSAL.within(3).window == 3
    assert AttentionMask(window=2).within(3).window == 2
    assert AttentionMask(window=5).within(3).window == 3
    assert not BIDIRECTIONAL.within(3).causal


def qkv(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((S, B, A, D), (S, B, G, D), (S, B, G, D))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def key() -> DropoutKey:
    return DropoutKey(1, 0, torch.arange(B * S).view(B, S))


def with_gradients(out: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    dout = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def unfused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, kept: Tensor) -> Tensor:
    """Attention as a plain softmax over visible keys, each probability multiplied by ``kept``, [B, A, S, S]."""
    k, v = (x.repeat_interleave(A // G, dim=2) for x in (k, v))
    scores = torch.einsum("sbad,tbad->bast", q, k) / D**0.5
    weights = torch.where(seen, scores.exp(), 0.0)
    return torch.einsum("bast,tbad->sbad", weights / weights.sum(dim=-1, keepdim=True) * kept, v)


def built(p: float, window: int | None = None) -> DotProductAttention:
    core = DotProductAttention(p, 0, window)
    name_dropout_sites_(core)
    return core


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradients_are_the_softmax_over_the_visible_keys(kind, p, dtype, tolerance):
    mask, documents = KINDS[kind]
    kept = torch.ones(B, A, S, S, dtype=torch.float64)
    if p:
        kept = attention_keep_mask(key().named(name_number("dropout")), p, A, S).double() / (1.0 - p)
    leaves = tuple(x.requires_grad_() for x in qkv(dtype))
    got = with_gradients(
        built(p)(*leaves, LayerContext(mask=mask, documents=documents, token_dropout_key=key() if p else None)), leaves
    )
    wide = tuple(x.double().requires_grad_() for x in qkv(dtype))
    want = with_gradients(unfused(*wide, mask.visible(S, CPU, documents), kept), wide)
    assert all(x.dtype == dtype for x in got)
    torch.testing.assert_close([x.double() for x in got], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mask", [CAUSAL, BIDIRECTIONAL], ids=["causal", "bidirectional"])
def test_a_window_of_the_layer_is_one_of_the_batch(mask, p):
    drop = key() if p else None
    got = built(p, window=3)(*qkv(torch.float64), LayerContext(mask=mask, token_dropout_key=drop))
    want = built(p)(*qkv(torch.float64), LayerContext(mask=mask.within(3), token_dropout_key=drop))
    assert torch.equal(got, want)


@pytest.mark.parametrize("num_new", [1, 4])
def test_queries_after_a_cache_see_through_a_window_what_they_would_without_one(num_new):
    q, k, v = qkv(torch.float64)
    context = LayerContext(mask=AttentionMask(window=3))
    whole, last = built(0.0)(q, k, v, context), built(0.0)(q[-num_new:], k, v, context)
    torch.testing.assert_close(last, whole[-num_new:], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused(window):
    with pytest.raises(ConfigError, match=rf"at least the query's own key; got window={window}; use 1 or more"):
        AttentionMask(window=window)
    with pytest.raises(ConfigError, match=rf"got window={window}"):
        built(0.0, window=window)(*qkv(torch.float64), LayerContext())


def test_a_prefix_beside_a_window_or_without_the_causal_rule_is_refused():
    prefix = Prefix.of([1], 4)
    for wrong in ({"window": 2}, {"causal": False}):
        with pytest.raises(ConfigError, match="combined with a window or causal=False; leave one of them out"):
            AttentionMask(prefix=prefix, **wrong)
    with pytest.raises(ConfigError, match="combined with a window or causal=False; leave one of them out"):
        AttentionMask(prefix=prefix).within(2)


@pytest.mark.parametrize("lengths", [[5, 1], [0, -1]])
def test_a_prefix_that_its_row_does_not_hold_is_refused(lengths):
    with pytest.raises(ConfigError, match=r"0 to 4 tokens, at most a whole row; got \["):
        Prefix.of(lengths, 4)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_prefix_of_packed_documents_is_refused_in_training_and_evaluation_alike(p):
    context = LayerContext(
        mask=AttentionMask(prefix=Prefix.of([2] * B, S)),
        documents=PackedSeqParams.from_lengths(LENGTHS),
        token_dropout_key=key(),
    )
    with pytest.raises(ConfigError, match="a single document each; leave packed documents out"):
        built(p)(*qkv(torch.float64), context)


@pytest.mark.parametrize("what", ["dropout", "a prefix"])
def test_dropout_or_a_prefix_after_a_cache_is_refused(what):
    q, k, v = qkv(torch.float64)
    prefix = AttentionMask(prefix=Prefix.of([2] * B, S))
    context = LayerContext(token_dropout_key=key()) if what == "dropout" else LayerContext(mask=prefix)
    with pytest.raises(ShapeError, match="need whole rows and do not support a cache; leave the cache out"):
        built(0.3)(q[-1:], k, v, context)


def test_a_prefix_moves_to_a_device():
    moved = Prefix.of([1, 2], 4).to("meta")
    assert moved.covers.device.type == moved.documents.cu_seqlens_q.device.type == "meta"
