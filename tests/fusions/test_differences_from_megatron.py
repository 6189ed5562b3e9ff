"""Differences listed in docs/coming_from_megatron.md that no test of an operation shows already."""

import math

import pytest
import torch
from torch import Tensor

from megalith import fusions
from megalith.errors import ConfigError

T, F = 6, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fused", [False, True])
def test_inference_without_gradients_leaves_x_as_it_is(fused):
    x, residual, bias = draw(T, F), draw(T, F), draw(F)
    before = x.clone()
    y = fusions.get_bias_dropout_add(False, fused)((x, bias), residual, 0.1)
    assert torch.equal(x, before)
    assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("training", [False, True])
def test_to_drop_everything_is_refused_in_inference_too(training):
    with pytest.raises(ConfigError, match=r"prob must be in \[0, 1\)"):
        fusions.get_bias_dropout_add(training, True)((draw(T, F), None), draw(T, F), 1.0)


def test_logits_are_not_overwritten_and_backward_runs_twice():
    logits, target = draw(T, F).requires_grad_(), torch.arange(T) % F
    before = logits.detach().clone()
    loss = fusions.fused_vocab_parallel_cross_entropy(logits, target).sum()
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(logits, before)


def test_the_steps_of_cross_entropy_give_the_gradient_in_the_dtype_that_is_asked_for():
    softmax, hidden = draw(T, F).softmax(dim=-1), torch.zeros(T, dtype=torch.bool)
    arguments = softmax, torch.ones(T), hidden, torch.arange(T) % F
    assert fusions.calculate_gradients(*arguments).dtype == torch.float32
    rounded = fusions.calculate_gradients(*arguments, torch.bfloat16)
    assert torch.equal(rounded, fusions.calculate_gradients(*arguments).bfloat16())


def test_scores_are_not_overwritten_by_a_mask_function_that_writes():
    softmax = fusions.FusedScaleMaskSoftmax(
        False, False, "causal", False, lambda x, mask: x.masked_fill_(mask, -10000.0), True, None
    )
    x = draw(1, 2, 3, 3)
    before = x.clone()
    softmax(x, None)
    assert torch.equal(x, before)


def test_causal_scores_of_fewer_queries_than_keys_end_together():
    softmax = fusions.FusedScaleMaskSoftmax(False, False, "causal", True, None, True, None)
    p = softmax(torch.zeros(1, 1, 2, 4), None)
    assert p.flatten(0, 2).tolist() == [[pytest.approx(1 / 3)] * 3 + [0.0], [0.25] * 4]


@pytest.mark.parametrize(
    "unit",
    [
        lambda x, b: fusions.bias_swiglu_impl(x, b),
        lambda x, b: fusions.bias_geglu_impl(x, b),
        lambda x, b: fusions.bias_gelu_impl(x, b),
        lambda x, b: fusions.weighted_bias_quick_geglu_impl(x, b, torch.ones(T, 1)),
        lambda x, b: fusions.weighted_bias_swiglu_impl(x, b, torch.ones(T, 1)),
    ],
)
def test_a_unit_has_the_dtype_of_its_input_whatever_that_of_its_bias(unit):
    x, bias = draw(T, F).bfloat16().requires_grad_(), draw(F).requires_grad_()
    y = unit(x, bias)
    dx, dbias = torch.autograd.grad(y.sum(), (x, bias))
    assert (y.dtype, dx.dtype, dbias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_written_gradients_have_the_dtype_of_what_they_are_the_gradient_of():
    g, y, bias = draw(T, F // 2), draw(T, F).bfloat16(), draw(F)
    assert fusions.swiglu_back(g, y).dtype == torch.bfloat16
    assert fusions.bias_geglu_back(g, y, bias).dtype == torch.bfloat16
    assert fusions.bias_gelu_back(draw(T, F), bias, y).dtype == torch.bfloat16


def test_shapes_of_written_gradients():
    g, y, bias, weights = draw(T, F // 2), draw(T, F), draw(F), draw(T, 1)

    def shapes(found: Tensor | tuple[Tensor, ...]) -> list[list[int]]:
        return [list(x.shape) for x in (found if isinstance(found, tuple) else (found,))]

    for back in (fusions.swiglu_back, fusions.geglu_back, fusions.quick_geglu_back):
        assert shapes(back(g, y)) == [[T, F]]
    for back in (fusions.bias_swiglu_back, fusions.bias_geglu_back):
        assert shapes(back(g, y, bias)) == [[T, F]]
    for back in (fusions.weighted_swiglu_back, fusions.weighted_quick_geglu_back):
        assert shapes(back(g, y, weights)) == [[T, F], [T, 1]]
    # in Megatron the second is [T, F], which the caller sums
    assert shapes(fusions.weighted_bias_quick_geglu_back(g, y, bias, weights)) == [[T, F], [F], [T, 1]]
    assert shapes(fusions.bias_gelu_back(draw(T, F), bias, y)) == [[T, F]]
    assert shapes(fusions.weighted_squared_relu_back(draw(T, F), y, weights)) == [[T, F], [T, 1]]


def test_the_clamp_comes_after_the_bias():
    six, four = torch.full((1, 2), 6.0), torch.full((2,), 4.0)
    y = fusions.weighted_bias_quick_geglu_impl(six, four, torch.ones(1, 1), clamp_value=7.0)
    assert y.item() == pytest.approx(49.0 / (1.0 + math.exp(-1.702 * 7.0)))  # in Megatron, 6 + 4 = 10 is not clamped


def test_inputs_may_have_any_dimensions_and_strides():
    x = draw(3, 2, F).transpose(0, 1)
    assert torch.equal(fusions.bias_swiglu_impl(x, None), fusions.bias_swiglu_impl(x.contiguous(), None))
    assert torch.equal(fusions.bias_swiglu_impl(x[None], None)[0], fusions.bias_swiglu_impl(x, None))


def test_packed_tokens_after_the_last_document_take_the_first_row_of_the_tables():
    t, angles = draw(4, 1, 3), torch.tensor([[0.5], [1.0]])
    borders = torch.tensor([0, 2])  # of four tokens
    y = fusions.fused_apply_mla_rope_for_q(t, angles.cos(), angles.sin(), 1, 2, borders)
    first = fusions.fused_apply_mla_rope_for_q(
        t, angles.cos(), angles.sin(), 1, 2, position_ids=torch.zeros(4, dtype=torch.int64)
    )
    assert torch.equal(y[2:], first[2:])
