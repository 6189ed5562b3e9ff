"""sampling: each option matches transformers' processor, in transformers' order; draws depend on the position."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megalith.errors import ConfigError
from megalith.models.sampling import Sampling, draw, processed, uniform_numbers

B, V = 5, 97


def logits_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(B, V, generator=torch.Generator().manual_seed(1))).to(dtype)


def texts() -> Tensor:
    return torch.randint(V, (B, 12), generator=torch.Generator().manual_seed(2))


def seen() -> Tensor:
    return torch.zeros(B, V, dtype=torch.bool).scatter(1, texts(), True)


def theirs(sampling: Sampling) -> LogitsProcessorList:
    """transformers' processors, in the order of its ``generate``."""
    made = {
        RepetitionPenaltyLogitsProcessor: sampling.repetition_penalty,
        TemperatureLogitsWarper: sampling.temperature,
        TopKLogitsWarper: sampling.top_k,
        TopPLogitsWarper: sampling.top_p,
        MinPLogitsWarper: sampling.min_p,
    }
    return LogitsProcessorList([processor(option) for processor, option in made.items() if option is not None])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=9),
        Sampling(1.0, top_k=V + 5),
        Sampling(1.0, top_p=0.6),
        Sampling(1.0, top_p=1e-6),
        Sampling(1.0, top_p=1.0),
        Sampling(1.0, min_p=0.1),
        Sampling(1.0, min_p=0.0),
        Sampling(1.0, min_p=1.0),
        Sampling(1.0, repetition_penalty=1.7),
        Sampling(1.0, repetition_penalty=0.5),
        Sampling(1.8, top_k=40, top_p=0.9, min_p=0.03, repetition_penalty=1.2),
        Sampling(0.4, top_k=7, top_p=0.95, min_p=0.2, repetition_penalty=2.0),
    ],
    ids=str,
)
def test_every_option_is_transformers_processor_and_all_come_in_its_order(sampling):
    got = processed(logits_of(), sampling, seen()).softmax(dim=-1)
    want = theirs(sampling)(texts(), logits_of()).softmax(dim=-1)
    assert torch.equal(got == 0, want == 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_the_greedy_choice_is_the_largest_after_the_penalty():
    sampling = Sampling(0.0, top_k=3, repetition_penalty=4.0)
    got = draw(logits_of(), sampling, seen(), torch.zeros(B).double())
    want = RepetitionPenaltyLogitsProcessor(4.0)(texts(), logits_of()).argmax(dim=-1)
    assert torch.equal(got, want)
    assert not torch.equal(got, logits_of().argmax(dim=-1)), "the penalty changes nothing here"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_in_float32_or_wider(dtype):
    kept = processed(logits_of(dtype), Sampling(0.5, top_p=0.8))
    assert kept.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(
        kept.softmax(-1), processed(logits_of(dtype).double(), Sampling(0.5, top_p=0.8)).softmax(-1).to(kept.dtype)
    )


def test_a_number_draws_the_token_whose_part_of_the_distribution_it_falls_in():
    logits = torch.tensor([0.5, 0.25, 0.0, 0.25]).log().expand(6, 4)
    numbers = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, Sampling(1.0), None, numbers).tolist() == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_give_a_token_that_there_is_not(temperature):
    logits = torch.tensor([[1.0, 2.0, float("nan"), 3.0], [1.0, 4.0, 2.0, 3.0], [float("nan")] * 4])
    found = draw(logits, Sampling(temperature), None, torch.full((3,), 0.5).double())
    assert [found[0].item(), found[2].item()] == [4, 4]
    assert found[1].item() < 4


def test_numbers_are_a_function_of_seed_and_position_alone():
    positions = torch.tensor([[3, 4, 5], [5, 2**40, 3]])
    numbers = uniform_numbers([7, 7], positions)
    assert numbers[0, 2] == numbers[1, 0]
    assert numbers[0, 0] == numbers[1, 2]
    assert len(set(numbers.flatten().tolist())) == 4
    assert torch.equal(uniform_numbers([1, 7], positions)[1], numbers[1])
    assert not torch.equal(uniform_numbers([1, 7], positions)[0], numbers[0])


def test_numbers_are_uniform():
    numbers = uniform_numbers([2**63 - 1], torch.arange(20_000).unsqueeze(0)).flatten()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers.numpy(), bins=20, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8, "19 degrees of freedom: one in a thousand is beyond"


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
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]; got -0\.1"),
        ({"min_p": float("nan")}, r"min_p must be in \[0, 1\]; got nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be positive and finite; got 0\.0"),
        ({"repetition_penalty": float("inf")}, "got inf"),
    ],
)
def test_sampling_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**fields)
