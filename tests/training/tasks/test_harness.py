"""The adapter for lm-eval, with a stand-in for its documented interface, because lm-eval needs 48 packages."""

import abc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megalith.data.choices import read_questions
from megalith.errors import ConfigError, MissingDependencyError
from megalith.models.generation import generate
from megalith.models.sampling import Sampling
from megalith.models.scoring import score
from megalith.training.tasks.harness import harness_model
from megalith.training.tasks.multiple_choice import answer_questions
from megalith.training.tasks.text_scores import TextScorer
from tests.training.tasks.scorers import LONGEST, scorer

TASK = Path(__file__).with_name("harness_task") / "ships.yaml"


class LM(abc.ABC):
    """The part of ``lm_eval.api.model.LM`` (0.4.13) that an adapter uses."""

    def __init__(self) -> None:
        self._rank, self._world_size, self._device = 0, 1, None
        self.cache_hook = SimpleNamespace(remembered=[])
        self.cache_hook.add_partial = lambda *entry: self.cache_hook.remembered.append(entry)

    @abc.abstractmethod
    def loglikelihood(self, requests: Any) -> Any: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: Any) -> Any: ...

    @abc.abstractmethod
    def generate_until(self, requests: Any) -> Any: ...


@pytest.fixture
def scores(monkeypatch) -> TextScorer:
    module: Any = ModuleType("lm_eval.api.model")
    module.LM = LM
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    return scorer()


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_it_is_an_lm_and_remembers_what_it_has_computed(scores):
    model = harness_model(scores)
    assert isinstance(model, LM)
    assert (model._rank, model._world_size) == (0, 1)
    found = model.loglikelihood(requests(("Once", " upon"), ("", "Once")))
    want = scores.score([("Once", " upon"), ("", "Once")])
    assert found == [(each.log_likelihood, each.is_greedy) for each in want]
    assert model.cache_hook.remembered == [
        ("loglikelihood", ("Once", " upon"), found[0]),
        ("loglikelihood", ("", "Once"), found[1]),
    ]


def test_a_local_task_has_the_accuracy_that_eval_prints(scores):
    task = yaml.safe_load(TASK.read_text())
    questions = read_questions(TASK.parent / task["dataset_kwargs"]["data_files"])
    asked = [(each.context, task["target_delimiter"] + choice) for each in questions for choice in each.choices]
    found = iter(harness_model(scores).loglikelihood(requests(*asked)))
    right = 0
    for question in questions:
        likelihoods = [next(found)[0] for _ in question.choices]
        right += likelihoods.index(max(likelihoods)) == question.answer
    assert answer_questions(scores, questions).accuracy == right / len(questions)


def test_rolling_predicts_each_token_once_and_fills_the_last_window(scores):
    text = "Once upon a time there were ships, and each had a name; über alles. " * 3
    ids = [scores.tokenizer.eod, *scores.tokenizer.encode(text)]
    n = len(ids)
    assert n > 2 * LONGEST
    assert (n - 1) % LONGEST
    want = 0.0
    with torch.no_grad():
        for position in range(1, n):
            first = (position - 1) // LONGEST * LONGEST  # windows do not overlap
            if first + LONGEST >= n - 1:
                first = n - 1 - LONGEST  # except the last, which reads as many tokens as the model accepts
            logits = scores.model(torch.tensor([ids[first : first + LONGEST]]))[0]
            want += logits.log_softmax(-1)[position - 1 - first, ids[position]].item()
    found = harness_model(scores).loglikelihood_rolling(requests((text,), ("",), ("Once",)))
    assert found[0] == pytest.approx(want, rel=1e-9)
    [short] = score(scores.model, [([scores.tokenizer.eod], scores.tokenizer.encode("Once"))], longest=LONGEST)
    assert found[1:] == [0, pytest.approx(short.log_likelihood)]


def test_generation_is_greedy_up_to_the_first_stop_string(scores):
    model, tokenizer = harness_model(scores), scores.tokenizer
    [ids] = generate(scores.model, [tokenizer.encode("Once")], 12, sampling=Sampling(0.0), end_tokens={tokenizer.eod})
    text = tokenizer.decode(ids)
    [whole] = model.generate_until(requests(("Once", {"until": ["never there"], "max_gen_toks": 12})))
    assert whole == text
    stop = text[len(text) // 2 :][:2]
    [cut, alone] = model.generate_until(
        requests(*(("Once", {"until": until, "max_gen_toks": 12}) for until in (["~~~~", stop], stop)))
    )
    assert cut == alone == text[: text.index(stop)]


def test_a_long_context_leaves_room_for_what_is_generated(scores):
    model = harness_model(scores)
    long = "Once upon a time " * 20
    kept = scores.tokenizer.encode(long)[-(LONGEST - 8) :]
    [ids] = generate(scores.model, [kept], 8, sampling=Sampling(0.0), end_tokens={scores.tokenizer.eod})
    [text] = model.generate_until(requests((long, {"until": [], "max_gen_toks": 8})))
    assert text == scores.tokenizer.decode(ids)
    assert model.generate_until(requests(("Once", {})))  # a task without a limit gets as many tokens as fit
    with pytest.raises(ConfigError, match=r"max_gen_toks must be from 1 to 23, .*; got 24"):
        model.generate_until(requests(("Once", {"max_gen_toks": 24})))
    with pytest.raises(ConfigError, match="a task sets the unknown options num_beams; it may set"):
        model.generate_until(requests(("Once", {"max_gen_toks": 4, "num_beams": 4})))


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'megalith\[lm-eval\]'"):
        harness_model(scorer())
