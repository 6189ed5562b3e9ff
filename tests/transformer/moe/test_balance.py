"""balance: losses against loops and transformers, and biases and offsets that balance the loads."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megalith.config import RouterConfig
from megalith.transformer.moe.balance import (
    choices_of_sequences,
    load_metrics,
    quantile_offsets,
    scores_of_sequences,
    switch_loss,
    update_expert_bias_,
    update_quantile_offsets_,
    with_gradient_of,
    z_loss,
)
from megalith.transformer.moe.routing import choose_by_score, largest_of_rows
from tests.transformer.moe import oracle

EXACT = 1e-12
S, B, E, K = 10, 3, 8, 2
ALL_REAL = torch.ones(S * B, dtype=torch.bool)


def logits_of(T: int = S * B, num_experts: int = E, seed: int = 0) -> Tensor:
    return torch.randn(T, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(logits: Tensor, indices: Tensor, score: str = "softmax", real: Tensor = ALL_REAL) -> Tensor:
    """The switch loss of each sequence, [B]."""
    choices = choices_of_sequences(indices, E, B, real)
    scores = scores_of_sequences(logits, K, score, B, real)
    return switch_loss(scores, choices[:, -1], choices, K)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_switch_loss_of_a_sequence_is_that_of_loops_over_its_real_tokens(score):
    logits, real = logits_of(), torch.arange(S * B) % 7 != 3
    router = RouterConfig(score_function=score)
    indices, _ = choose_by_score(logits, K, router, None if score == "softmax" else torch.linspace(0, 1, E))
    got = loss_of(logits, indices, score, real)
    for b in range(B):
        tokens = [t for t in range(b, S * B, B) if real[t]]
        wanted = oracle.switch_loss(logits.numpy(), indices.tolist(), score, tokens)
        assert got[b].item() == pytest.approx(wanted, rel=EXACT)


def test_the_switch_loss_is_mixtrals_divided_by_the_experts_of_a_token():
    logits = logits_of().float()
    indices, _ = choose_by_score(logits, K, RouterConfig())
    one = torch.tensor(S * B)
    choices = choices_of_sequences(indices, E, B, ALL_REAL).sum(dim=0)
    ours = switch_loss(scores_of_sequences(logits, K, "softmax", B, ALL_REAL).sum(dim=0), one, choices, K)
    theirs = load_balancing_loss_func((logits,), E, K)
    torch.testing.assert_close(ours, theirs.to(ours.dtype) / K)


def test_even_loads_and_scores_have_the_loss_one_and_one_expert_for_all_has_its_score_times_the_experts():
    even = (torch.arange(S * B)[:, None] * K + torch.arange(K)) % E
    logits = torch.zeros(S * B, E, dtype=torch.float64)
    choices = choices_of_sequences(even[:24], E, 1, ALL_REAL[:24])
    scores = scores_of_sequences(logits[:24], K, "softmax", 1, ALL_REAL[:24])
    assert switch_loss(scores, choices[:, -1], choices, K).item() == pytest.approx(1.0, rel=EXACT)
    logits[:, 4] = 2.0
    choices = choices_of_sequences(torch.full((S * B, 1), 4), E, 1, ALL_REAL)
    scores = scores_of_sequences(logits, 1, "softmax", 1, ALL_REAL)
    wanted = E * math.exp(2) / (math.exp(2) + E - 1)
    assert switch_loss(scores, choices[:, -1], choices, 1).item() == pytest.approx(wanted, rel=EXACT)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradients_of_the_losses_are_those_of_finite_differences(score):
    logits = logits_of().requires_grad_()
    indices = largest_of_rows(logits, K)
    real = torch.arange(S * B) % 7 != 3
    assert torch.autograd.gradcheck(lambda x: loss_of(x, indices, score, real), logits)
    assert torch.autograd.gradcheck(lambda x: z_loss(x, real, real.sum()), logits)


def test_the_z_loss_is_that_of_loops_over_real_tokens():
    logits, real = logits_of(), torch.arange(S * B) % 7 != 3
    tokens = [t for t in range(S * B) if real[t]]
    wanted = oracle.z_loss(logits.numpy(), tokens)
    assert z_loss(logits, real, real.sum()).item() == pytest.approx(wanted, rel=EXACT)
    by_torch = logits[real].logsumexp(1).square().mean()
    assert z_loss(logits, real, real.sum()).item() == pytest.approx(by_torch.item(), rel=EXACT)


def test_a_sequence_without_a_real_token_has_no_loss():
    logits, real = logits_of(), torch.arange(S * B) % B != 1
    losses = loss_of(logits, largest_of_rows(logits, K), real=real)
    assert losses[1] == 0.0
    assert (losses[[0, 2]] > 0).all()
    assert z_loss(logits, torch.zeros_like(real), torch.tensor(0)) == 0.0


def test_backward_through_weights_is_backward_through_the_scaled_loss_too():
    x = logits_of().requires_grad_()
    y = with_gradient_of(x.sin(), x.square().sum(), 3.0)
    assert torch.equal(y, x.sin())
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, x.cos() + 6.0 * x, rtol=EXACT, atol=EXACT)


def loads_after(bias: Tensor, logits: Tensor) -> Tensor:
    indices, _ = choose_by_score(logits, K, RouterConfig(score_function="sigmoid"), bias)
    return torch.bincount(indices.flatten(), minlength=E)


def test_a_bias_that_follows_the_loads_evens_them_and_does_not_drift():
    logits = logits_of(512)
    logits[:, 0] += 3.0
    bias = torch.zeros(E)
    before = loads_after(bias, logits)
    assert before.max() / before.float().mean() > 3
    for _ in range(400):
        update_expert_bias_(bias, loads_after(bias, logits), 0.01)
        assert abs(bias.sum().item()) < 1e-4
    after = loads_after(bias, logits)
    assert after.max() / after.float().mean() < 1.2


def test_a_bias_moves_by_the_rate_toward_the_mean_load():
    bias = torch.zeros(4)
    update_expert_bias_(bias, torch.tensor([10, 2, 4, 4]), 0.1)  # mean 5: signs -1, 1, 1, 1, with mean 1/2
    torch.testing.assert_close(bias, torch.tensor([-0.15, 0.05, 0.05, 0.05]))
    update_expert_bias_(bias, torch.tensor([5, 5, 5, 5]), 0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.15, 0.05, 0.05, 0.05]))


def test_offsets_are_the_quantiles_of_loops():
    logits, offsets = logits_of(24), torch.linspace(-0.2, 0.2, E, dtype=torch.float64)
    real = torch.arange(24) % 6 != 1  # 20 tokens, 5 each
    got = quantile_offsets(logits, offsets, K, real)
    rows = [logits[t].numpy() for t in range(24) if real[t]]
    borders = [np.mean(sorted(row - offsets.numpy())[::-1][K - 1 : K + 1]) for row in rows]
    wanted = [sorted(row[e] - a for row, a in zip(rows, borders, strict=True))[::-1][20 * K // E] for e in range(E)]
    np.testing.assert_allclose(got[:-1].numpy(), wanted, rtol=EXACT)
    assert got[-1] == 1.0


def test_with_new_offsets_each_expert_has_its_exact_share_of_tokens_above_their_borders():
    logits, offsets = logits_of(256), torch.linspace(-0.2, 0.2, E, dtype=torch.float64)
    new = quantile_offsets(logits, offsets, K, torch.ones(256, dtype=torch.bool))[:-1]
    best = (logits - offsets).sort(dim=1, descending=True).values
    borders = (best[:, K - 1] + best[:, K]) / 2
    assert (logits - borders[:, None] > new).sum(dim=0).tolist() == [256 * K // E] * E


@pytest.mark.parametrize(("T", "num_experts", "top_k"), [(256, 8, 2), (64, 16, 4), (512, 8, 1), (100, 8, 2)])
def test_offsets_that_follow_the_quantiles_of_a_batch_give_every_expert_its_share(T, num_experts, top_k):
    logits = logits_of(T, num_experts) + torch.linspace(-1.5, 1.5, num_experts, dtype=torch.float64)
    real, offsets = torch.ones(T, dtype=torch.bool), torch.zeros(num_experts, dtype=torch.float64)
    unevenness = []
    for _ in range(21):
        loads = torch.bincount(largest_of_rows(logits - offsets, top_k).flatten(), minlength=num_experts)
        unevenness.append((loads - T * top_k / num_experts).abs().max().item())
        update_quantile_offsets_(offsets, quantile_offsets(logits, offsets, top_k, real), decay=0.0)
    # choices depend on the offsets of all experts together, so one update is not enough
    assert unevenness[1] < 0.4 * unevenness[0]
    assert unevenness[20] <= 1


def test_offsets_move_by_the_mean_of_all_micro_batches_and_keep_their_decay():
    offsets = torch.tensor([1.0, -1.0])
    update_quantile_offsets_(offsets, torch.tensor([8.0, 4.0, 2.0]), decay=0.75)  # means 4 and 2, centred 1 and -1
    torch.testing.assert_close(offsets, torch.tensor([1.0, -1.0]))
    update_quantile_offsets_(offsets, torch.tensor([0.0, 12.0, 2.0]), decay=0.5)  # centred -3 and 3
    torch.testing.assert_close(offsets, torch.tensor([-1.0, 1.0]))
    update_quantile_offsets_(offsets, torch.zeros(3), decay=0.0)
    torch.testing.assert_close(offsets, torch.tensor([-1.0, 1.0]))


def test_no_real_token_gives_no_offsets():
    for T in (0, 4):
        got = quantile_offsets(logits_of(T), torch.zeros(E), K, torch.zeros(T, dtype=torch.bool))
        assert torch.equal(got, torch.zeros(E + 1, dtype=torch.float64))


def test_load_metrics_are_those_of_a_histogram():
    chosen = np.random.default_rng(0).integers(0, 6, size=200)
    loads = np.bincount(chosen, minlength=8)
    shares = loads[loads > 0] / loads.sum()
    metrics = load_metrics(torch.from_numpy(loads))
    assert metrics.max_violation == pytest.approx(loads.max() / loads.mean() - 1)
    assert metrics.entropy == pytest.approx(-(shares * np.log(shares)).sum())
    assert metrics.dead_experts == 2
    even = load_metrics(torch.full((8,), 5))
    assert (even.max_violation, even.dead_experts) == (0.0, 0)
    assert even.entropy == pytest.approx(math.log(8))
    assert load_metrics(torch.zeros(8, dtype=torch.int64)).dead_experts == 8
