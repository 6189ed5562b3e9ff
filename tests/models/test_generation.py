"""generation: greedy tokens without a cache, sampled ones by their frequencies, and where it ends."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import fields
from typing import Any

import pytest
import torch

from megalith.errors import ConfigError
from megalith.models.generation import Sampling, generate, stream
from megalith.models.gpt_model import GPTModel
from tests.sampling import sampled
from tests.transformer.shapes import config, options

PROMPT = [3, 14, 15, 9, 2, 6]
GREEDY = Sampling(temperature=0.0)
PROBABILITIES = [0.5, 0.25, 0.125, 0.125]


def built(shape: str = "llama", **changes: Any) -> GPTModel:
    return GPTModel(config(shape, **changes), options(), seed=1)


def greedy_without_cache(model: GPTModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    model.eval()
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def constant(probabilities: list[float]) -> GPTModel:
    """A model that gives ``probabilities`` to the next token whatever came before."""
    model = built(vocab_size=len(probabilities), num_layers=1, normalization="LayerNorm")
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.bias.zero_()
        model.model.norm.bias[0] = 1.0  # the last hidden state, always
        model.lm_head.weight[:, 0] = torch.tensor(probabilities).log()
    return model


def assert_frequencies(sampling: Sampling, want: list[float], seed: int = 1) -> None:
    num_tokens = 600
    drawn = Counter(generate(constant(PROBABILITIES), [0], num_tokens, sampling=sampling, seed=seed))
    for token, probability in enumerate(want):
        deviation = (probability * (1 - probability) / num_tokens) ** 0.5
        assert drawn[token] / num_tokens == pytest.approx(probability, abs=5 * deviation), f"token {token}"


@pytest.mark.parametrize("shape", ["llama", "gpt2", "rope, exact gelu, biases"])
def test_greedy_tokens_are_the_likeliest_of_a_full_forward_without_cache(shape):
    model = built(shape)
    want = greedy_without_cache(model, PROMPT, 12)
    assert len(set(want)) > 3, "a model that repeats itself proves little"
    assert generate(model, PROMPT, 12, sampling=GREEDY, seed=1) == want


def test_a_single_token_is_prompt_enough():
    model = built()
    assert generate(model, PROMPT[:1], 5, sampling=GREEDY, seed=1) == greedy_without_cache(model, PROMPT[:1], 5)


def options_set(drawn: tuple[Sampling, list[float]]) -> set[Hashable]:
    """What `make test` shows once: each set of options that are not their defaults."""
    return {frozenset(field.name for field in fields(Sampling) if getattr(drawn[0], field.name) not in (None, 1.0))}


@pytest.mark.parametrize(
    ("sampling", "want"),
    sampled(
        [
            (Sampling(1.0), PROBABILITIES),
            (Sampling(2.0), [0.7071 / 1.9142, 0.5 / 1.9142, 0.3536 / 1.9142, 0.3536 / 1.9142]),  # square roots
            (Sampling(0.5), [0.25 / 0.34375, 0.0625 / 0.34375, 0.015625 / 0.34375, 0.015625 / 0.34375]),  # squares
            (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0.0, 0.0]),
            (Sampling(1.0, top_k=4), PROBABILITIES),
            (Sampling(1.0, top_k=99), PROBABILITIES),
            (Sampling(1.0, top_p=0.5), [1.0, 0.0, 0.0, 0.0]),  # the first alone adds up to it
            (Sampling(1.0, top_p=0.51), [2 / 3, 1 / 3, 0.0, 0.0]),
            (Sampling(1.0, top_p=1.0), PROBABILITIES),
            (Sampling(1.0, top_k=3, top_p=0.6), [2 / 3, 1 / 3, 0.0, 0.0]),
        ],
        options_set,
    ),
)
def test_tokens_come_as_often_as_their_probability_says(sampling, want):
    assert_frequencies(sampling, want)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1e-40), Sampling(1e-320)], ids=str
)
def test_at_their_limits_all_are_greedy(sampling):
    model = GPTModel(config(), seed=1)  # float32: a logit divided by 1e-40 is infinite
    assert generate(model, PROMPT, 8, sampling=sampling, seed=1) == generate(model, PROMPT, 8, sampling=GREEDY, seed=2)


def test_it_ends_before_the_end_token():
    model = built()
    tokens = generate(model, PROMPT, 12, sampling=GREEDY, seed=1)
    end = tokens[5]
    assert generate(model, PROMPT, 12, sampling=GREEDY, seed=1, end_token=end) == tokens[: tokens.index(end)]
    unused = next(token for token in range(31) if token not in tokens)
    assert generate(model, PROMPT, 12, sampling=GREEDY, seed=1, end_token=unused) == tokens


@pytest.mark.parametrize("wanted", [0, 1, 7])
def test_it_ends_after_as_many_tokens_as_wanted(wanted):
    assert len(generate(built(), PROMPT, wanted, sampling=Sampling(), seed=1)) == wanted


def test_learned_positions_end_it():
    model = built("gpt2", max_position_embeddings=10)
    tokens = generate(model, PROMPT, 100, sampling=GREEDY, seed=1)
    assert tokens == greedy_without_cache(model, PROMPT, 4)


@pytest.mark.parametrize("length", [10, 11])
def test_a_prompt_that_fills_all_positions_is_refused(length):
    model = built("gpt2", max_position_embeddings=10)
    with pytest.raises(ConfigError, match=rf"has {length} tokens and the model 10 positions; shorten the prompt"):
        generate(model, [1] * length, 1, sampling=GREEDY, seed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -5}, "the number of new tokens must be 0 or more; got -5"),
        ({"seed": -1}, r"the seed must be 0 or more and below 2\^63; got -1"),
        ({"seed": 2**63}, "got 9223372036854775808"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_at_the_call(arguments, message):
    with pytest.raises(ConfigError, match=message):
        stream(built(), PROMPT, **{"max_new_tokens": 1, "sampling": GREEDY, "seed": 1, **arguments})


def test_tokens_can_be_taken_one_by_one():
    model = built(hidden_dropout=0.5).train()
    tokens = stream(model, PROMPT, 8, sampling=Sampling(1.0), seed=1)
    first = next(tokens)
    assert not model.training
    assert torch.is_grad_enabled()
    assert [first, *tokens] == generate(model, PROMPT, 8, sampling=Sampling(1.0), seed=1)
    assert model.training
    abandoned = stream(model, PROMPT, 8, sampling=GREEDY, seed=1)
    next(abandoned)
    abandoned.close()
    assert model.training


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="the prompt has no tokens; give some text"):
        generate(built(), [], 1, sampling=GREEDY, seed=1)


def test_a_seed_decides_and_torchs_generator_is_left_alone():
    model = built()
    state = torch.get_rng_state()
    first, again, other = (generate(model, PROMPT, 20, sampling=Sampling(1.0), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_generates_without_dropout_and_is_left_in_its_mode(training):
    model = built(hidden_dropout=0.5, attention_dropout=0.5).train(training)
    tokens = generate(model, PROMPT, 5, sampling=GREEDY, seed=1)
    assert model.training == training
    assert tokens == greedy_without_cache(model, PROMPT, 5)
    model.train(training)
    with pytest.raises(IndexError):
        generate(model, [10**6], 5, sampling=GREEDY, seed=1)
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 .* or more, and finite; got -0\.1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"top_k": 0}, r"top_k must be 1 or more; got 0; leave it out"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0\.0"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\]; got nan"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\]; got 1\.01"),
    ],
)
def test_sampling_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**fields)
