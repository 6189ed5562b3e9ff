"""dot_product_attention: plain softmax in float64, separate documents, queries after a cache, and dropout by key."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megalith.acceleration.recompute import recompute
from megalith.errors import ConfigError, ShapeError
from megalith.numerics.dropout import DropoutKey, attention_keep_mask, name_number
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.transformer.attention_mask import BIDIRECTIONAL, AttentionMask, Prefix
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.layer_context import LayerContext
from tests.rank_pool import ranks

S, B, A, G, D = 7, 3, 4, 2, 6
EXACT = 1e-12
LENGTHS = [[3, 4], [5, 1, 1], [7]]


def qkv(dtype: torch.dtype = torch.float64, groups: int = G, length: int = S) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((length, B, A, D), (length, B, groups, D), (length, B, groups, D))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def with_gradients(attend: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    dout = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def key_of(seed: int = 1) -> DropoutKey:
    return DropoutKey(seed, 0, torch.arange(B * S).view(B, S), site=1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSeqParams | None = None,
    p: float = 0.0,
    key: DropoutKey | None = None,
    head_offset: int = 0,
) -> Tensor:
    core = DotProductAttention(p, head_offset)
    name_dropout_sites_(core)
    return core(q, k, v, LayerContext(documents=packed, token_dropout_key=key))


def unfused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, keep: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Computes it head by head; ``visible`` [B, S, S], ``keep`` [B, A, S, S]."""
    out = torch.empty_like(q)
    for b in range(q.shape[1]):
        for a in range(q.shape[2]):
            g = a // (q.shape[2] // k.shape[2])
            scores = q[:, b, a] @ k[:, b, g].t() / D**0.5
            weights = torch.exp(scores) * visible[b]
            probs = weights / weights.sum(dim=-1, keepdim=True)
            if keep is not None:
                probs = probs * keep[b, a] / (1.0 - p)
            out[:, b, a] = probs @ v[:, b, g]
    return out


def visible(lengths: list[list[int]] | None) -> Tensor:
    """Earlier tokens of the same document: [B, S, S]."""
    causal = torch.ones(S, S).tril().bool()
    if lengths is None:
        return causal.expand(B, S, S)
    blocks = [torch.block_diag(*(torch.ones(n, n) for n in row)).bool() for row in lengths]
    return causal & torch.stack(blocks)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole rows", "documents"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_is_the_written_out_softmax_forward_and_backward(groups, lengths):
    packed = None if lengths is None else PackedSeqParams.from_lengths(lengths)
    tensors = qkv(groups=groups)
    got = with_gradients(lambda q, k, v: attend(q, k, v, packed), *tensors)
    want = with_gradients(lambda q, k, v: unfused(q, k, v, visible(lengths)), *tensors)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_are_torchs_attention_over_repeated_heads(dtype):
    q, k, v = qkv(dtype)
    repeated = (x.repeat_interleave(A // G, dim=2) for x in (k, v))
    want = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, *repeated)), is_causal=True)
    got = attend(q, k, v)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.permute(2, 0, 1, 3), rtol=1e-6, atol=1e-6)


def test_packed_documents_are_separate_sequences():
    q, k, v = qkv()
    got = attend(q, k, v, PackedSeqParams.from_lengths(LENGTHS))
    for b, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            document = (slice(start, start + length), slice(b, b + 1))
            want = attend(q[document], k[document], v[document])
            torch.testing.assert_close(got[document], want, rtol=EXACT, atol=EXACT)
            start += length


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_leaks_from_one_document_into_another(dtype, p):
    packed, changed = PackedSeqParams.from_lengths(LENGTHS), qkv(dtype)

    before = attend(*qkv(dtype), packed, p, key_of())
    for tensor in changed:
        tensor[1, 0] += 1.0  # a token of the first of two documents of row 0
    after = attend(*changed, packed, p, key_of())
    assert not torch.equal(after[:3, 0], before[:3, 0])
    assert torch.equal(after[3:, 0], before[3:, 0])
    assert torch.equal(after[:, 1:], before[:, 1:])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_no_token_sees_a_later_one(p):
    changed = qkv()
    for tensor in changed:
        tensor[4] += 1.0
    before, after = (attend(*x, None, p, key_of()) for x in (qkv(), changed))
    assert torch.equal(after[:4], before[:4])
    assert not torch.equal(after[4:], before[4:])


@pytest.mark.parametrize("num_new", [1, 3, 6, 7])
def test_queries_after_a_cache_are_the_last_positions(num_new):
    q, k, v = qkv()
    got = attend(q[-num_new:], k, v)
    torch.testing.assert_close(got, attend(q, k, v)[-num_new:], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("groups", [G, A])
def test_nothing_of_size_s_by_s_is_kept_for_backward(groups):
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    length = 64
    leaves = [tensor.requires_grad_() for tensor in qkv(torch.float32, groups=groups, length=length)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attend(*leaves)
    assert max(sizes) == length * B * A * D < length * length * B * A


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole rows", "documents"])
def test_dropout_zeroes_the_probabilities_that_its_mask_does_not_keep(lengths):
    packed = None if lengths is None else PackedSeqParams.from_lengths(lengths)
    p, key = 0.3, key_of()
    keep = attention_keep_mask(key.named(name_number("dropout")), p, A, S)
    got = with_gradients(lambda q, k, v: attend(q, k, v, packed, p, key), *qkv())
    want = with_gradients(lambda q, k, v: unfused(q, k, v, visible(lengths), keep, p), *qkv())
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_the_mean_over_many_keys_is_attention_without_dropout():
    q, k, v = qkv()
    num_keys = 400
    outs = torch.stack([attend(q, k, v, None, 0.2, key_of(i)) for i in range(num_keys)])
    error = (outs.mean(dim=0) - attend(q, k, v)).abs()
    assert (error <= 5 * outs.std(dim=0) / num_keys**0.5 + EXACT).all()


def test_one_key_gives_one_result_and_another_key_another():
    q, k, v = qkv()
    first, again, other = (attend(q, k, v, None, 0.3, key) for key in (key_of(), key_of(), key_of(2)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_recomputation_drops_the_same_elements():
    def drop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, None, 0.3, key_of())

    kept = with_gradients(drop, *qkv())
    computed_again = with_gradients(lambda *tensors: recompute(drop, *tensors), *qkv())
    for got, want in zip(computed_again, kept, strict=True):
        assert torch.equal(got, want)


def test_each_half_of_the_heads_drops_what_the_whole_does():
    q, k, v = qkv()
    whole = attend(q, k, v, None, 0.3, key_of())
    for rank in range(2):  # as ranks of tp 2 hold them
        heads, groups = slice(rank * 2, rank * 2 + 2), slice(rank, rank + 1)
        half = attend(q[:, :, heads], k[:, :, groups], v[:, :, groups], None, 0.3, key_of(), rank * 2)
        torch.testing.assert_close(half, whole[:, :, heads], rtol=EXACT, atol=EXACT)


def test_narrow_inputs_with_dropout_stay_narrow_and_near():
    q, k, v = qkv(torch.bfloat16)
    got = attend(q, k, v, None, 0.3, key_of())
    want = attend(q.double(), k.double(), v.double(), None, 0.3, key_of())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=4e-2)  # scores, probabilities and output are rounded


def over_ranks(mask: AttentionMask, p: float, window: int | None) -> Tensor:
    """This rank's part of a row of 8 tokens."""
    core = DotProductAttention(p, 0, window, dist.group.WORLD if dist.is_initialized() else None)
    name_dropout_sites_(core)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = zigzag_positions(8, size, rank)
    ids = torch.arange(B * 8).view(B, 8)[:, mine]
    return core(*(x[mine] for x in qkv(length=8)), LayerContext(mask, token_dropout_key=DropoutKey(1, 0, ids)))


@pytest.mark.parametrize("mask", [AttentionMask(window=3), BIDIRECTIONAL, AttentionMask(causal=False, window=4)])
@pytest.mark.parametrize(("p", "window"), [(0.0, None), (0.3, None), (0.0, 2)])
def test_rows_split_over_ranks_keep_the_mask_and_the_window_of_their_layer(mask, p, window):
    want = over_ranks(mask, p, window)
    for rank, got in enumerate(ranks(2, over_ranks, mask, p, window)):
        torch.testing.assert_close(got, want[zigzag_positions(8, 2, rank)], rtol=EXACT, atol=EXACT)


def refuse_over_ranks() -> None:
    core, (q, k, v) = DotProductAttention(0.0, 0, None, dist.group.WORLD), qkv(length=4)
    with pytest.raises(ShapeError, match=r"context parallelism needs whole rows and does not support a cache"):
        core(q[-2:], k, v, LayerContext())
    with pytest.raises(
        ConfigError, match=r"context parallelism does not support a bidirectional prefix; set parallel.context=1"
    ):
        core(q, k, v, LayerContext(AttentionMask(prefix=Prefix.of([1, 2, 0], 8))))


def test_a_cache_and_a_prefix_over_split_rows_are_refused():
    ranks(2, refuse_over_ranks)
