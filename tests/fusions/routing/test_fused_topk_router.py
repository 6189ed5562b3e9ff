"""fused_topk_router: weights by hand, ties, NaN, groups, bias, Megatron's form, and refusals."""

import math

import pytest
import torch

from megalith.errors import ConfigError, ShapeError
from megalith.fusions import (
    compute_routing_scores_for_aux_loss,
    fused_topk_router,
    topk_routing_with_score_function,
    use,
)
from tests.accuracy import assert_same
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "blocked", "reference")
NAN, INF = float("nan"), float("inf")
LN2 = math.log(2.0)


@pytest.mark.parametrize("path", PATHS)
def test_weights_worked_out_by_hand(path, device):
    logits = torch.tensor([[0.0, LN2, -INF, 2 * LN2]], device=device)
    after = fused_topk_router(logits, 2, backend=path)
    assert after.indices.tolist() == [[3, 1]]
    assert after.probs[0].tolist() == pytest.approx([4 / 6, 2 / 6])
    assert after.tokens_per_expert.tolist() == [0, 1, 0, 1]
    before = fused_topk_router(logits, 2, use_pre_softmax=True, scaling_factor=7.0, backend=path)
    assert before.probs[0].tolist() == pytest.approx([4.0, 2.0])
    sigmoid = fused_topk_router(logits, 2, score_function="sigmoid", backend=path)
    assert sigmoid.probs[0].tolist() == pytest.approx([(4 / 5) / (4 / 5 + 2 / 3), (2 / 3) / (4 / 5 + 2 / 3)])
    alone = fused_topk_router(logits, 1, score_function="sigmoid", backend=path)
    assert alone.probs[0].tolist() == pytest.approx([4 / 5])
    root = fused_topk_router(logits, 1, score_function="sqrtsoftplus", backend=path)
    assert root.probs[0].tolist() == pytest.approx([math.sqrt(math.log(5))])


@pytest.mark.parametrize("path", PATHS)
def test_softmax_over_all_and_divided_is_softmax_over_the_chosen(path, device):
    logits = torch.randn(20, 16, device=device)
    before = fused_topk_router(logits, 4, use_pre_softmax=True, backend=path)
    after = fused_topk_router(logits, 4, backend=path)
    torch.testing.assert_close(before.probs / before.probs.sum(dim=1, keepdim=True), after.probs)
    assert before.indices.equal(after.indices)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_of_equal_logits_the_lower_expert_is_chosen(dtype, path, device):
    if path == "triton" and dtype == torch.float64:
        return
    logits = torch.zeros(3, 40, dtype=dtype, device=device)
    logits[1, 1::2] = -0.0  # equal to 0
    logits[2, 30:] = 1.0
    indices = fused_topk_router(logits, 12, backend=path).indices
    assert indices[:2].tolist() == [list(range(12))] * 2
    assert indices[2].tolist() == [*range(30, 40), 0, 1]


@pytest.mark.parametrize("path", PATHS)
def test_many_equal_logits_are_chosen_alike_by_every_path(path, device):
    torch.manual_seed(0)
    logits = torch.randint(-3, 3, (200, 24), device=device).bfloat16()
    for settings in ({}, {"num_groups": 4, "group_topk": 2}):
        want = fused_topk_router(logits.double(), 4, **settings).indices
        assert fused_topk_router(logits, 4, **settings, backend=path).indices.equal(want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_chosen_as_inf_and_makes_the_weights_nan(sign, path, device):
    nan = torch.tensor(NAN).copysign(torch.tensor(sign))
    logits = torch.tensor([[INF, nan, 2.0, nan], [1.0, 3.0, -INF, -INF]], device=device)
    for settings in ({}, {"use_pre_softmax": True}, {"score_function": "sigmoid"}):
        routing = fused_topk_router(logits, 3, **settings, backend=path)
        assert routing.indices.tolist() == [[0, 1, 3], [1, 0, 2]]
        assert routing.probs[0, 1:].isnan().all()
        assert routing.probs[1].isfinite().all()
        assert routing.tokens_per_expert.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("path", PATHS)
def test_bias_chooses_and_is_not_in_the_weights(path, device):
    torch.manual_seed(0)
    logits, bias = torch.randn(9, 8, device=device), torch.zeros(8, device=device)
    bias[5] = 100.0
    routing = fused_topk_router(logits, 1, score_function="sigmoid", expert_bias=bias, backend=path)
    assert (routing.indices == 5).all()
    torch.testing.assert_close(routing.probs[:, 0], torch.sigmoid(logits[:, 5]))
    assert routing.tokens_per_expert.tolist() == [0] * 5 + [9, 0, 0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("score", ["softmax", "pre_softmax", "sigmoid"])
def test_the_chosen_are_in_as_many_groups_as_allowed(score, path, device):
    torch.manual_seed(0)
    settings = {"use_pre_softmax": True} if score == "pre_softmax" else {"score_function": score}
    logits = torch.randn(50, 24, device=device)
    routing = fused_topk_router(logits, 4, num_groups=6, group_topk=2, **settings, backend=path)
    groups = (routing.indices // 4).sort(dim=1).values
    assert ((groups[:, 1:] != groups[:, :-1]).sum(dim=1) <= 1).all()
    assert all(len(set(row)) == 4 for row in routing.indices.tolist())


@pytest.mark.parametrize("path", PATHS)
def test_a_masked_expert_of_the_best_group_comes_before_those_of_others(path, device):
    logits = torch.tensor([[-1.0, -1.0, 5.0, -INF, -1.0, -1.0]], device=device)
    routing = fused_topk_router(logits, 2, score_function="sigmoid", num_groups=3, group_topk=1, backend=path)
    assert routing.indices.tolist() == [[2, 3]]
    assert_same(routing.probs, torch.tensor([[1.0, 0.0]], device=device))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_scores_at_both_ends_have_a_gradient_that_is_a_number(score, path, device):
    logits = torch.tensor([[60.0, 30.0, 0.0, -41.0, -60.0, -INF]], device=device, requires_grad=True)
    routing = fused_topk_router(logits, 6, score_function=score, backend=path)
    (gradient,) = torch.autograd.grad(routing.probs, logits, torch.arange(6.0, device=device)[None])
    exact = logits.detach()[:, :5].double().requires_grad_()
    q = 1 / (1 + torch.exp(-exact)) if score == "sigmoid" else torch.log1p(torch.exp(exact)).sqrt()
    dy = torch.arange(5.0, device=device, dtype=torch.float64)[None]
    (want,) = torch.autograd.grad(q / q.sum(dim=1, keepdim=True), exact, dy)
    torch.testing.assert_close(gradient[:, :5].double(), want, rtol=3e-6, atol=1e-30)
    assert gradient[0, 5] == 0.0


@pytest.mark.parametrize("path", PATHS)
def test_the_form_that_the_field_knows(path, device):
    torch.manual_seed(0)
    logits = torch.randn(7, 12, device=device, requires_grad=True)
    probs, routing_map = topk_routing_with_score_function(logits, 3, True, scaling_factor=2.0, backend=path)
    chosen = logits.topk(3).indices
    want = torch.zeros_like(logits).scatter(1, chosen, 2.0 * torch.softmax(logits, dim=1).gather(1, chosen))
    torch.testing.assert_close(probs, want)
    assert routing_map.equal(want != 0)
    dy = torch.randn_like(probs)
    got, expected = (torch.autograd.grad(y, logits, dy)[0] for y in (probs, want))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("path", PATHS)
def test_scores_for_the_auxiliary_loss_are_of_all_experts(path, device):
    logits = torch.tensor([[0.0, LN2, 0.0, 2 * LN2]], device=device)
    with use(path):
        routing_map, scores = compute_routing_scores_for_aux_loss(logits.bfloat16().float(), 3)
        assert routing_map.tolist() == [[True, True, False, True]]
        assert scores[0].tolist() == pytest.approx([1 / 8, 2 / 8, 1 / 8, 4 / 8], rel=1e-2)
        _, scores = compute_routing_scores_for_aux_loss(logits, 3, "sigmoid")
        q = torch.tensor([1 / 2, 2 / 3, 1 / 2, 4 / 5], device=device)
        torch.testing.assert_close(scores[0], q / q.sum())
        assert compute_routing_scores_for_aux_loss(logits.bfloat16(), 1)[1].dtype == torch.float32


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    logits = memory.as_strided((3, 4), (2**30, 1), 2**31).copy_(torch.tensor([0.0, 1.0, 2.0, 3.0])).requires_grad_()
    routing = fused_topk_router(logits, 1, use_pre_softmax=True, backend="triton")
    assert routing.indices.tolist() == [[3]] * 3
    p = torch.softmax(torch.tensor([0.0, 1.0, 2.0, 3.0]), dim=0)
    want = p[3] * (torch.tensor([0.0, 0.0, 0.0, 1.0]) - p)
    for gradient in torch.autograd.grad(routing.probs.sum(), logits)[0]:
        torch.testing.assert_close(gradient.float(), want, rtol=1e-3, atol=1e-5)


X = torch.randn(2, 8)


@pytest.mark.parametrize(
    ("given", "settings", "error", "message"),
    [
        ((X, 9), {}, ConfigError, r"topk must be from 1 to the number of experts, 8; got 9"),
        ((X, 0), {}, ConfigError, r"topk must be .*got 0"),
        ((X.long(), 2), {}, ShapeError, r"logits must be float16, .*got torch.int64"),
        ((X[0], 2), {}, ShapeError, r"logits must be \[T, E\], a row for each token; got \[8\]"),
        ((X, 2), {"score_function": "tanh"}, ConfigError, r"score_function must be softmax, .*got 'tanh'"),
        ((X, 2), {"expert_bias": X[0]}, ConfigError, r"use score_function='sigmoid' or 'sqrtsoftplus'"),
        (
            (X, 2),
            {"expert_bias": X, "score_function": "sigmoid"},
            ShapeError,
            r"expert_bias must be \[8\], one for each expert; got \[2, 8\]",
        ),
        (
            (X, 2),
            {"expert_bias": X[0].to("meta"), "score_function": "sigmoid"},
            ShapeError,
            r"got logits on cpu, expert_bias on meta",
        ),
        ((X, 1), {}, ConfigError, r"softmax over the single chosen expert of topk=1 .*use_pre_softmax=True"),
        ((X, 2), {"score_function": "sigmoid", "use_pre_softmax": True}, ConfigError, r"got 'sigmoid'; leave it out"),
        ((X, 2), {"num_groups": 2}, ConfigError, r"num_groups and group_topk must be set together; got 2 and None"),
        ((X, 2), {"num_groups": 3, "group_topk": 1}, ConfigError, r"num_groups must divide the 8 experts; got 3"),
        ((X, 2), {"num_groups": 4, "group_topk": 5}, ConfigError, r"group_topk must be from 1 to num_groups, 4; got 5"),
        ((X, 3), {"num_groups": 4, "group_topk": 2}, ConfigError, r"topk \(3\) must be a multiple of group_topk \(2\)"),
        ((X, 6), {"num_groups": 4, "group_topk": 2}, ConfigError, r"topk \(6\) must be at most .* 2 groups of 2"),
    ],
)
def test_what_cannot_be_met_is_refused(given, settings, error, message):
    with pytest.raises(error, match=message):
        fused_topk_router(*given, **settings)
