"""Log-likelihoods of continuations: match transformers' logits, and batches match single pairs."""

import numpy as np
import pytest
import torch

from megalith.errors import ConfigError
from megalith.models import scoring
from megalith.models.hf.gpt2 import GPT2
from megalith.models.hf.llama import LLAMA
from megalith.models.scoring import score
from tests.models.hf.peers import gpt2, llama, same_as_ours

LONGEST = 24


def pairs(num_pairs: int = 9) -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(0)

    def tokens(most: int) -> list[int]:
        return random.integers(0, 61, random.integers(1, most)).tolist()

    return [(tokens(12), tokens(9)) for _ in range(num_pairs)]


@pytest.mark.parametrize(("make", "family"), [(llama, LLAMA), (gpt2, GPT2)])
def test_they_are_those_of_the_logits_of_transformers(make, family):
    theirs = make()
    ours = same_as_ours(theirs, family)
    for (context, continuation), found in zip(pairs(), score(ours, pairs(), longest=LONGEST), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([context + continuation])).logits[0].double()
        predicted = logits.log_softmax(-1)[len(context) - 1 : -1]
        want = sum(row[token].item() for row, token in zip(predicted, continuation, strict=True))
        assert found.log_likelihood == pytest.approx(want, abs=1e-5)
        assert found.is_greedy == (predicted.argmax(-1).tolist() == continuation)
        assert (found.num_tokens, found.num_cut) == (len(continuation), 0)


@pytest.mark.parametrize(
    ("tokens", "positions"), [(1, 4096), (20, 4096), (70, 4096), (4096, 0), (4096, 20), (70, 40), (4096, 4096)]
)
def test_in_batches_they_are_those_of_pairs_one_by_one(tokens, positions, monkeypatch):
    model = same_as_ours(llama(), LLAMA).double()
    alone = [score(model, [pair], longest=LONGEST)[0] for pair in pairs()]
    monkeypatch.setattr(scoring, "_TOKENS_AT_ONCE", tokens)
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", positions * 61)
    seen: list[tuple[int, int]] = []
    together = score(model, pairs(), longest=LONGEST, progress=lambda *progress: seen.append(progress))
    for one, other in zip(alone, together, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-12)
        assert (one.is_greedy, one.num_tokens, one.num_cut) == (other.is_greedy, other.num_tokens, other.num_cut)
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    assert len(seen) == {1: 10, 0: 10, 4096: 2}.get(min(tokens, positions), len(seen))


@pytest.mark.parametrize(("context", "most"), [(1, 300), (20, 300), (20, 20)])
def test_logits_of_a_batch_are_bounded_whatever_the_vocabulary_and_a_context_has_none(context, most, monkeypatch):
    model = same_as_ours(llama(), LLAMA)
    made: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: made.append(_[-1].numel()))
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", most * 61)
    uneven = [([1] * context, [2] * (1 + number % 4)) for number in range(200)]
    score(model, uneven, longest=LONGEST)
    assert max(made) <= most * 61
    # as many rows at once as possible, no longer than the longest continuation and the padding after another
    assert len(made) <= 2 + 200 * (4 + 3) // most


def test_the_likeliest_continuation_is_greedy_and_another_is_not():
    model = same_as_ours(llama(), LLAMA)
    context = [5, 9, 2]
    with torch.no_grad():
        first = int(model(torch.tensor([context]))[0, -1].argmax())
        second = int(model(torch.tensor([[*context, first]]))[0, -1].argmax())
    greedy = [(context, [first, second]), (context, [first, (second + 1) % 61]), (context, [(first + 1) % 61, second])]
    assert [each.is_greedy for each in score(model, greedy, longest=LONGEST)] == [True, False, False]


def test_of_a_context_that_does_not_fit_the_end_is_kept():
    model = same_as_ours(gpt2(), GPT2)  # of 24 positions
    context, continuation = list(range(40)), [7, 3, 1]
    [cut] = score(model, [(context, continuation)], longest=LONGEST)
    [fitting] = score(model, [(context[18:], continuation)], longest=LONGEST)
    assert (cut.num_cut, fitting.num_cut) == (18, 0)
    assert cut.log_likelihood == fitting.log_likelihood


def test_the_mode_of_the_model_stays_and_nothing_is_dropped():
    model = same_as_ours(gpt2(resid_pdrop=0.5, embd_pdrop=0.5), GPT2).train()
    one, other = (score(model, pairs(2), longest=LONGEST) for _ in range(2))
    assert one == other
    assert model.training


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [1] * 25)])
def test_what_cannot_be_scored_is_refused(pair):
    with pytest.raises(ConfigError, match="a continuation 1 to 24, the maximum for one forward; got"):
        score(same_as_ours(gpt2(), GPT2), [([1], [2]), pair], longest=LONGEST)
