"""generation: keys and values are freed when it ends, not when Python next collects reference cycles."""

import gc
from collections.abc import Callable, Iterator

import pytest

from megalith.fusions import use
from megalith.models import generation, t5_generation
from megalith.models.gpt_model import GPTModel
from megalith.models.sampling import Sampling
from megalith.transformer.layer_context import KVCache
from tests.models import test_t5_model as t5
from tests.transformer.shapes import config, options

PROMPTS = [[5, 8, 9, 7, 9], [26], [3, 14, 15]]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    generation.generate(gpt(), PROMPTS, 8, sampling=GREEDY)


def called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with use("reference"):
        generation.generate(gpt(), PROMPTS, 8, sampling=GREEDY)


def grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FIRST_ROOM", 3)
    generation.generate(gpt(), PROMPTS, 16, sampling=GREEDY)


def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = generation.stream(gpt(), PROMPTS, 8, sampling=GREEDY)
    for _ in range(5):
        next(tokens)
    tokens.close()


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    next(generation.stream(gpt(), PROMPTS, 8, sampling=GREEDY))


def of_an_encoder_and_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    t5_generation.generate(t5.built(t5.config()), PROMPTS, 8, start_token=0, sampling=GREEDY)


def of_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    t5_generation.beam_search(t5.built(t5.config()), PROMPTS, 8, start_token=0, num_beams=2)


def gpt() -> GPTModel:
    return GPTModel(config("llama"), options(), seed=1)


@pytest.mark.parametrize(
    "generates", [replayed, called_as_it_is, grown, closed, forgotten, of_an_encoder_and_decoder, of_beams]
)
def test_no_cache_outlives_generation(generates: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    generates(monkeypatch)
    assert not [x for x in gc.get_objects() if type(x) is KVCache]
