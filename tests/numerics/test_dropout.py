"""dropout: the same mask in every layout, the right rate, and a backward that recomputes the mask."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.dropout_mask import mask_operands
from megalith.numerics import dropout as module
from megalith.numerics.dropout import (
    DropoutKey,
    attention_dropout,
    attention_keep_mask,
    dropout,
    keep_mask,
    philox_key,
    uniform,
)
from megalith.numerics.philox import philox4x32

TOKENS = torch.arange(12).view(3, 4) + 2**40  # ids past 32 bits
KEY = DropoutKey(seed=1234, step=7, tokens=TOKENS, site=5)


def key_for(tokens: torch.Tensor) -> DropoutKey:
    return DropoutKey(KEY.seed, KEY.step, tokens, KEY.site)


def test_an_element_stays_by_its_word_of_the_documented_counter():
    token, feature, site, head = 2**40 + 6, 10, 5, 3
    counter = (torch.tensor([word]) for word in (6, 2**8, feature // 4, site + 2**16 * head))
    word = philox4x32(*counter, *philox_key(1234, 7))[feature % 4].item()
    key = key_for(torch.tensor([[token]]))
    for p in (word / 2**32, (word + 1) / 2**32):  # exact in float64
        kept = attention_keep_mask(key, p, num_heads=5, num_keys=16)[0, head, 0, feature].item()
        assert kept == (word >= p * 2**32)
    assert torch.equal(keep_mask(key, 0.5, 16)[0], attention_keep_mask(key, 0.5, 1, 16)[0, 0])


@pytest.mark.parametrize("num_counters", [1, 5, 2**14])
def test_the_mask_does_not_depend_on_how_it_is_cut(num_counters, monkeypatch):
    mask = keep_mask(KEY, 0.3, 37)
    monkeypatch.setattr(module, "counters_per_chunk", lambda device: num_counters)
    for first, last in ((0, 37), (0, 1), (3, 4), (1, 30), (35, 37), (8, 8)):
        assert torch.equal(keep_mask(KEY, 0.3, last - first, first), mask[..., first:last])
    assert torch.equal(keep_mask(key_for(TOKENS[1:, ::2]), 0.3, 37), mask[1:, ::2])
    assert torch.equal(keep_mask(key_for(TOKENS.t()), 0.3, 37), mask.transpose(0, 1))
    assert torch.equal(keep_mask(key_for(TOKENS[2, 3]), 0.3, 37), mask[2, 3])


def test_the_attention_mask_does_not_depend_on_how_it_is_cut():
    mask = attention_keep_mask(KEY, 0.3, num_heads=6, num_keys=9)
    assert mask.shape == (3, 6, 4, 9)
    assert torch.equal(attention_keep_mask(KEY, 0.3, 2, 9, head_offset=4), mask[:, 4:])
    assert torch.equal(attention_keep_mask(KEY, 0.3, 6, 5), mask[..., :5])
    assert torch.equal(attention_keep_mask(KEY, 0.3, 6, 4, key_offset=5), mask[..., 5:])
    assert torch.equal(attention_keep_mask(key_for(TOKENS[1:, 2:]), 0.3, 6, 9), mask[1:, :, 2:])


def test_seed_step_site_token_and_head_each_give_another_mask():
    key = key_for(torch.arange(100))
    others = [
        DropoutKey(1235, 7, key.tokens, 5),
        DropoutKey(1234, 8, key.tokens, 5),
        key.at(6),
        key_for(key.tokens + 100),
        key_for(key.tokens + 2**32),
    ]
    masks = [keep_mask(each, 0.5, 100) for each in (key, *others)]
    masks.append(attention_keep_mask(key_for(key.tokens[None]), 0.5, 1, 100, head_offset=1)[0, 0])
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert (mask == other).float().mean() == pytest.approx(0.5, abs=0.025)  # five standard deviations


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_right_share_is_dropped_and_the_mean_stays(p):
    key = key_for(torch.arange(1000))
    mask = keep_mask(key, p, 1000).double()
    deviation = (p * (1 - p)) ** 0.5
    assert mask.mean() == pytest.approx(1 - p, abs=4e-3 * deviation)
    assert mask.mean(dim=0).sub(1 - p).abs().max() < 5 * deviation / 1000**0.5
    assert mask.mean(dim=1).sub(1 - p).abs().max() < 5 * deviation / 1000**0.5
    centred = mask - mask.mean()
    for pair in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(pair.mean()) < 4e-3 * deviation**2
    y = dropout(torch.ones(1000, 1000, dtype=torch.float64), p, key)
    assert torch.equal(y, mask * (1 / (1 - p)))


def test_probabilities_0_and_1_keep_all_and_nothing():
    x = torch.randn(3, 4, 8, requires_grad=True)
    assert torch.equal(dropout(x, 0.0, KEY), x)
    assert keep_mask(KEY, 0.0, 8).all()
    assert not keep_mask(KEY, 1.0, 8).any()
    y = dropout(x, 1.0, KEY)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == torch.zeros(3, 4, 8).tolist()


def test_gradients_pass_where_elements_stayed():
    x = torch.randn(3, 4, 10, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, KEY, 3), x)
    assert torch.autograd.gradgradcheck(lambda x: dropout(x, 0.4, KEY, 3), x)
    assert torch.autograd.gradcheck(lambda p: attention_dropout(p, 0.4, KEY, 7), probs)
    (dx,) = torch.autograd.grad(dropout(x, 0.4, KEY, 3).sum(), x)
    assert torch.equal(dx, keep_mask(KEY, 0.4, 10, 3).double() * (1 / 0.6))


def test_backward_keeps_nothing_of_the_size_of_the_activations():
    saved = []
    x = torch.randn(3, 4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y = dropout(x, 0.4, KEY)
    assert max(saved, default=0) <= TOKENS.numel()
    y.sum().backward()


def test_recomputation_drops_the_same_elements():
    x = torch.randn(3, 4, 64, requires_grad=True)

    def block(x):
        return dropout(torch.tanh(dropout(x, 0.3, KEY)), 0.3, KEY.at(6)).square()

    (stored,) = torch.autograd.grad(block(x).sum(), x)
    (recomputed,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    assert torch.equal(recomputed, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_result_is_rounded_once(dtype):
    x = torch.randn(3, 4, 64, dtype=dtype).requires_grad_()
    y = dropout(x, 0.3, KEY)
    want = (x.double() * keep_mask(KEY, 0.3, 64)).float() * torch.tensor(1 / 0.7, dtype=torch.float32)
    assert torch.equal(y, want.to(dtype))
    assert y.dtype == torch.autograd.grad(y.sum(), x)[0].dtype == dtype


def test_inputs_are_left_as_they_were_and_may_be_strided():
    x = torch.randn(64, 4, 3).transpose(0, 2)
    before = x.clone()
    assert torch.equal(dropout(x, 0.3, KEY), dropout(x.contiguous(), 0.3, KEY))
    assert torch.equal(x, before)


def test_empty_tensors_stay_empty():
    assert dropout(torch.empty(3, 4, 0), 0.3, KEY).shape == (3, 4, 0)
    assert dropout(torch.empty(0, 8), 0.3, key_for(TOKENS[:0, 0])).shape == (0, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dropout(torch.ones(4, 3, 8), 0.1, KEY), ShapeError, r"\[3, 4, 'features'\].*got \[4, 3, 8\]"),
        (lambda: dropout(torch.tensor(1.0), 0.1, key_for(TOKENS[0, 0])), ShapeError, r"got \[\]"),
        (lambda: attention_dropout(torch.ones(3, 2, 5, 6), 0.1, KEY), ShapeError, r"\[3, 4\]; got \[3, 2, 5, 6\]"),
        (lambda: dropout(torch.ones(3, 4, 8), 1.1, KEY), ConfigError, r"in \[0, 1\]; got 1.1"),
        (lambda: keep_mask(KEY, -0.1, 8), ConfigError, r"in \[0, 1\]; got -0.1"),
        (lambda: keep_mask(KEY, float("nan"), 8), ConfigError, r"got nan"),
        (lambda: DropoutKey(1, 1, TOKENS.int()), ShapeError, r"int64.*got torch.int32"),
        (lambda: KEY.at(2**16), ConfigError, r"site must be in \[0, 65536\).*got 65536"),
        (lambda: attention_keep_mask(KEY, 0.1, 2, 8, 2**16 - 1), ConfigError, "got 2 heads starting at 65535"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: keep_mask(KEY, 0.1, 8),
        lambda: attention_keep_mask(KEY, 0.1, 2, 8),
        lambda: uniform(KEY, 8),
        lambda: mask_operands(KEY, torch.ones(3, 4, 8)),
    ],
)
def test_a_key_is_refused_while_a_cuda_graph_is_captured(draw, monkeypatch):
    draw()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match=r"CUDA graph, because every replay .* elements of step 7; pass no key"):
        draw()
    assert mask_operands(None, torch.ones(3, 4, 8))[0].dtype == torch.int64  # its generator is torch's own


def test_a_key_of_masks_packed_in_an_int64_is_never_negative():
    words = [philox_key(seed, step) for seed in (0, 1234) for step in range(50)]
    assert all(0 <= low < 2**32 and 0 <= high < 2**31 for low, high in words)
    assert len(set(words)) == len(words)


def test_a_uniform_number_is_the_upper_24_bits_of_the_word_that_a_dropout_would_read():
    feature, site = 10, 5  # for token 2^40 + 6
    counter = (torch.tensor([word]) for word in (6, 2**8, feature // 4, site))
    word = philox4x32(*counter, *philox_key(1234, 7))[feature % 4].item()
    drawn = uniform(KEY, 16)
    assert (drawn.shape, drawn.dtype) == ((3, 4, 16), torch.float32)
    assert drawn[1, 2, feature].item() == (word >> 8) / 2**24
    assert torch.equal(uniform(key_for(TOKENS[1:, 2:]), 13), drawn[1:, 2:, :13])


def test_uniform_numbers_fill_the_unit_interval():
    drawn = uniform(key_for(torch.arange(1000)), 64).double()
    assert 0.0 <= drawn.min() < 1e-3
    assert 1.0 - 1e-3 < drawn.max() < 1.0
    assert drawn.mean().item() == pytest.approx(1 / 2, abs=5 / (12 * 64000) ** 0.5)  # five standard deviations
    assert drawn.var().item() == pytest.approx(1 / 12, abs=2e-3)
