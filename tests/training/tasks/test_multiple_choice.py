"""Multiple choice by likelihood: the best choice in total, per byte and per token, and refusals."""

import math
from dataclasses import replace

import pytest
import torch

from megalith.data.choices import Question
from megalith.errors import CheckpointError, DataError
from megalith.models.scoring import Score
from megalith.training.tasks import multiple_choice
from megalith.training.tasks.multiple_choice import answer_questions
from tests.training.tasks.scorers import LONGEST, scorer


def test_a_pair_is_split_as_lm_eval_splits_it():
    found = scorer()
    encode = found.tokenizer.encode
    whole = encode("Once upon a time")
    assert found.encode("Once upon", " a time") == (encode("Once upon"), whole[len(encode("Once upon")) :])
    assert found.encode("Once upon ", "a time") == found.encode("Once upon", " a time")
    assert found.encode("", "Once") == ([found.tokenizer.eod], encode("Once"))
    assert found.encode(" ", "Once") == ([found.tokenizer.eod], encode(" Once"))


def test_the_likeliest_wins_whole_by_byte_or_by_token(monkeypatch):
    likelihoods = [-4.0, -5.0, -6.0]
    tokens = [1, 2, 4]

    def score(*_, **__):
        return [
            Score(*each, num_cut=cut) for *each, cut in zip(likelihoods, [False] * 3, tokens, (0, 3, 0), strict=True)
        ]

    monkeypatch.setattr(multiple_choice, "score", score)
    choices = (" a", " ü b", " c d e f")  # total -4, -5, -6; per byte -2, -1, -0.75; per token -4, -2.5, -1.5
    won = [answer_questions(scorer(), [Question("Once", choices, answer)]) for answer in range(3)]
    assert [(each.accuracy, each.per_byte, each.per_token) for each in won] == [(1, 0, 0), (0, 0, 0), (0, 1, 1)]
    assert (won[0].chance, won[0].num_questions, won[0].num_cut) == (pytest.approx(1 / 3), 1, 1)


def test_a_byte_is_one_of_utf_8_and_not_a_letter(monkeypatch):
    # letters 6, 4, 3; bytes 6, 7, 7, since Cyrillic letters have two each and Chinese ones three
    choices, likelihoods, tokens = (" abcde", " жук", " 水火"), [-6.0, -6.3, -6.65], [6, 7, 7]
    monkeypatch.setattr(
        multiple_choice,
        "score",
        lambda *_, **__: [Score(*each, num_cut=0) for each in zip(likelihoods, [False] * 3, tokens, strict=True)],
    )
    # per byte -1, -0.9, -0.95; per letter -1, -1.575, -2.2
    won = [answer_questions(scorer(), [Question("Once", choices, answer)]) for answer in range(3)]
    assert [(each.accuracy, each.per_byte) for each in won] == [(1, 0), (0, 1), (0, 0)]


def test_accuracies_are_shares_of_the_questions_by_hand():
    found = scorer()
    texts = [("Once upon a", (" time", " name", " ships there")), ("", ("and", "each")), ("ships,", (" had", " x"))]
    want = []
    for context, choices in texts:
        losses = []
        for choice in choices:
            before, after = found.encode(context, choice)
            logits = found.model(torch.tensor([before + after]))[0, len(before) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(after), reduction="sum").item())
        want.append(losses.index(min(losses)))
    right = [Question(context, choices, best) for (context, choices), best in zip(texts, want, strict=True)]
    assert answer_questions(found, right).accuracy == 1.0
    right[1] = replace(right[1], answer=1 - right[1].answer)
    assert answer_questions(found, right).accuracy == pytest.approx(2 / 3)


def test_a_choice_that_adds_nothing_or_too_much_is_refused_by_its_question():
    good = Question("Once", (" upon", " a"), 0)
    with pytest.raises(
        DataError, match=rf"question 2: the choice .* adds \d+ tokens .* from 1 to {LONGEST}, .*shorten"
    ):
        answer_questions(scorer(), [good, Question("Once", (" a", "xyz" * 30), 0)])


def test_a_model_that_gives_nan_answers_nothing():
    found = scorer()
    with torch.no_grad():
        next(iter(found.model.parameters())).fill_(math.nan)
    with pytest.raises(CheckpointError, match="the model returns NaN"):
        answer_questions(found, [Question("Once", (" upon", " a"), 0)])
