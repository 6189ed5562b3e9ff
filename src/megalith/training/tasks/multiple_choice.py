"""Measures how often a model assigns the highest likelihood to the right one of several continuations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalith.data.choices import Question
from megalith.errors import CheckpointError, DataError
from megalith.models.scoring import Score, score
from megalith.training.tasks.text_scores import TextScorer

__all__ = ["ChoiceAccuracy", "answer_questions"]


@dataclass(frozen=True)
class ChoiceAccuracy:
    """The shares of ``num_questions`` questions whose right choice is the first with the highest likelihood.

    Attributes:
        accuracy: by the log-likelihood of the whole choice.
        per_byte, per_token: by the log-likelihood divided by the choice's UTF-8 bytes, or by its tokens, which does not
            favor short choices.
        chance: the accuracy of guessing.
        num_cut: questions whose context was truncated at its beginning to fit.
    """

    accuracy: float
    per_byte: float
    per_token: float
    chance: float
    num_questions: int
    num_cut: int


def answer_questions(
    scorer: TextScorer,
    questions: Sequence[Question],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ChoiceAccuracy:
    """Measures the accuracy of ``scorer``'s model; calls ``progress`` with the number of choices done and the total.

    Raises:
        DataError: a choice adds no token to its context, or more than the model reads at once.
        CheckpointError: the model returns NaN.
    """
    encoded = [[scorer.encode(question.context, choice) for choice in question.choices] for question in questions]
    for number, (question, pairs) in enumerate(zip(questions, encoded, strict=True), 1):
        for choice, (_, continuation) in zip(question.choices, pairs, strict=True):
            _refuse_unfit(f"question {number}: the choice {choice!r:.60}", len(continuation), scorer.longest)
    in_a_row = [pair for pairs in encoded for pair in pairs]
    scores = iter(score(scorer.model, in_a_row, longest=scorer.longest, progress=progress))
    found = [[next(scores) for _ in question.choices] for question in questions]
    if any(math.isnan(each.log_likelihood) for of_one in found for each in of_one):
        raise CheckpointError("the model returns NaN for some of the choices; evaluate an earlier checkpoint")
    whole, per_byte, per_token, cut = 0, 0, 0, 0
    for question, of_one in zip(questions, found, strict=True):
        sizes = [len(choice.encode()) for choice in question.choices]
        whole += _chosen(of_one, [1] * len(of_one)) == question.answer
        per_byte += _chosen(of_one, sizes) == question.answer
        per_token += _chosen(of_one, [each.num_tokens for each in of_one]) == question.answer
        cut += any(each.num_cut for each in of_one)
    count = len(questions)
    chance = math.fsum(1 / len(question.choices) for question in questions) / count
    return ChoiceAccuracy(whole / count, per_byte / count, per_token / count, chance, count, cut)


def _chosen(scores: Sequence[Score], sizes: Sequence[int]) -> int:
    """Returns the index of the first choice with the highest log-likelihood per unit of ``sizes``."""
    relative = [each.log_likelihood / size for each, size in zip(scores, sizes, strict=True)]
    return relative.index(max(relative))


def _refuse_unfit(choice: str, num_tokens: int, longest: int) -> None:
    if not 0 < num_tokens <= longest:
        way_out = "shorten it" if num_tokens else "begin it with a space, or move text into it from the context"
        raise DataError(
            f"{choice} adds {num_tokens} tokens to its context, but must add from 1 to {longest}, the context length "
            f"of the model; {way_out}"
        )
