"""t5_generation: tokens match transformers and full forwards, greedy, sampled and with beams, in any batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

from megalith.errors import ConfigError, NonFiniteError
from megalith.models.sampling import Sampling
from megalith.models.t5_generation import beam_search, generate, stream
from megalith.models.t5_model import T5Model
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.transformer.layer_context import KVCache
from tests.models.hf.test_t5 import CASES, ours_of, ours_with_own_head, with_own_head
from tests.models.test_t5_model import built, config
from tests.parallel.groups import collection
from tests.rank_pool import ranks
from tests.transformer.shapes import options

PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 8, 9, 7, 9, 3, 2, 3, 8], [26], [4, 6, 2]]
GREEDY = Sampling(temperature=0.0)
START, OWN_END = 0, 24


def full_forwards(model: T5Model, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy decoding, without caches and without padding."""
    tokens = [START]
    model.eval()
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([prompt]), torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def varied(theirs: T5ForConditionalGeneration, seed: int) -> T5ForConditionalGeneration:
    """Makes positions matter, and a token unlikely to follow itself: with fresh weights an answer is one token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for stack in (theirs.encoder, theirs.decoder):
            table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            table.normal_(std=2.0, generator=generator)
        theirs.decoder.final_layer_norm.weight.mul_(-3.0)  # logits of the token that was read become negative
    return theirs


def test_greedy_tokens_are_those_of_full_forwards_one_by_one():
    model = built(config())
    found = generate(model, PROMPTS, 12, start_token=START, sampling=GREEDY)
    assert found == [full_forwards(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(each) for each in found}) > 1


# seeds of position tables, and end tokens, with which answers vary and some of them end early
@pytest.mark.parametrize(("case", "seed", "end"), [("t5", 53, 6), ("t5, odd sizes", 13, 24), ("flan-t5", 2, 59)])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_tokens_are_those_of_transformers(case, seed, end, num_beams):
    theirs = varied(CASES[case].build(), seed)
    assert_same_tokens(theirs, ours_of(theirs, CASES[case].family), end, num_beams)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_tokens_are_those_of_transformers_with_a_head_of_its_own(num_beams):
    theirs = varied(with_own_head(CASES["flan-t5"].build()), 2)
    assert_same_tokens(theirs, ours_with_own_head(theirs), OWN_END, num_beams)


def assert_same_tokens(theirs: T5ForConditionalGeneration, ours: T5Model, end: int, num_beams: int) -> None:
    S = max(map(len, PROMPTS))
    tokens = torch.tensor([[*prompt, *[0] * (S - len(prompt))] for prompt in PROMPTS])
    theirs.config.decoder_start_token_id = theirs.generation_config.decoder_start_token_id = START
    want = theirs.generate(
        tokens,
        attention_mask=(torch.arange(S) < torch.tensor([[len(prompt)] for prompt in PROMPTS])).long(),
        max_new_tokens=14,
        num_beams=num_beams,
        do_sample=False,
        use_cache=False,  # theirs assumes as many decoder layers as encoder layers
        eos_token_id=end,
        pad_token_id=0,
    )
    asked: dict[str, Any] = {"start_token": START, "end_tokens": [end]}
    if num_beams == 1:
        found = generate(ours, PROMPTS, 14, sampling=GREEDY, **asked)
    else:
        found = beam_search(ours, PROMPTS, 14, num_beams=num_beams, **asked)
    for mine, row in zip(found, want[:, 1:].tolist(), strict=True):
        assert mine == row[: len(mine)]
        assert len(mine) == 14 or row[len(mine)] == end
        assert len(set(mine)) >= 4
        assert 0 not in mine  # as padding is
    assert {len(mine) < 14 for mine in found} == {True, False}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_memory_grows_with_a_text_and_changes_no_token(num_beams, monkeypatch):
    ours = ours_of(varied(CASES["t5"].build(), 2), CASES["t5"].family)

    def texts() -> list[list[int]]:
        if num_beams == 1:
            return generate(ours, PROMPTS, 14, sampling=GREEDY, start_token=START)
        return beam_search(ours, PROMPTS, 14, num_beams=num_beams, start_token=START, end_tokens=[2])

    want, sizes = texts(), []
    room_for = KVCache._room_for

    def noting(cache: KVCache, like: Tensor) -> Tensor:
        sizes.append(cache.capacity)
        return room_for(cache, like)

    monkeypatch.setattr(KVCache, "_room_for", noting)
    monkeypatch.setattr("megalith.models.t5_generation.FIRST_ROOM", 3)
    assert texts() == want
    assert list(dict.fromkeys(sizes)) == [3, 6, 12, 14]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_beams_that_end_at_several_lengths_are_those_of_transformers(num_beams, length_penalty):
    theirs = CASES["t5"].build()
    with torch.no_grad():
        theirs.shared.weight.mul_(0.3)  # flatter, so that the end token is likely at many lengths
    ours = ours_of(theirs, CASES["t5"].family)
    theirs.config.decoder_start_token_id = theirs.generation_config.decoder_start_token_id = START
    lengths = set()
    for end in range(2, 12):
        want = theirs.generate(
            torch.tensor(PROMPTS[:1]),
            max_new_tokens=9,
            num_beams=num_beams,
            do_sample=False,
            use_cache=False,  # theirs assumes as many decoder layers as encoder layers
            eos_token_id=[end, end + 20],
            pad_token_id=0,
            length_penalty=length_penalty,
        )
        [found] = beam_search(
            ours,
            PROMPTS[:1],
            9,
            start_token=START,
            num_beams=num_beams,
            end_tokens=[end, end + 20],
            length_penalty=length_penalty,
        )
        row = want[0, 1:].tolist()
        assert found == row[: len(found)], end
        assert len(found) == 9 or row[len(found)] in (end, end + 20)
        lengths.add(len(found))
    assert num_beams == 2 or length_penalty > 0 or len(lengths) > 1


def test_one_beam_is_greedy():
    model = built(config())
    want = generate(model, PROMPTS, 8, start_token=START, sampling=GREEDY)
    assert beam_search(model, PROMPTS, 8, start_token=START, num_beams=1) == want


def test_a_sampled_answer_is_the_same_alone_and_in_any_batch():
    model = built(config())
    how: dict[str, Any] = {"start_token": START, "sampling": Sampling(2.0, top_k=30, repetition_penalty=1.2)}
    found = generate(model, PROMPTS, 10, seeds=[4, 5, 6, 7], **how)
    alone = [generate(model, [prompt], 10, seeds=[4 + row], **how)[0] for row, prompt in enumerate(PROMPTS)]
    assert found == alone
    assert found != generate(model, PROMPTS, 10, seeds=[5, 6, 7, 8], **how)


def test_beams_are_the_same_alone_and_in_any_batch():
    model = built(config())
    how: dict[str, Any] = {"start_token": START, "num_beams": 3, "end_tokens": [5]}
    found = beam_search(model, PROMPTS, 8, **how)
    assert found == [beam_search(model, [prompt], 8, **how)[0] for prompt in PROMPTS]


def test_after_an_end_token_nothing_follows():
    model = built(config())
    [whole] = generate(model, PROMPTS[:1], 12, start_token=START, sampling=GREEDY)
    end = whole[5]
    [found] = generate(model, PROMPTS[:1], 12, start_token=START, sampling=GREEDY, end_tokens=[end])
    assert found == whole[: whole.index(end)]


def test_tokens_come_one_by_one_and_are_those_of_the_whole_answer():
    model, prompts = built(config()), [[3, 14, 15], [5, 8], [26]]
    how: dict[str, Any] = {"start_token": 0, "sampling": Sampling(2.0), "seeds": [1, 2, 3]}
    whole = generate(model, prompts, 10, **how)
    steps = list(stream(model, prompts, 10, stop=lambda row, token: row == 1 and token == whole[1][3], **how))
    assert len(steps) == 10
    columns = [[token for token in column if token is not None] for column in zip(*steps, strict=True)]
    first = whole[1].index(whole[1][3])
    assert columns == [whole[0], whole[1][: first + 1], whole[2]]
    assert torch.is_grad_enabled()
    assert model.training


def test_no_tokens_are_no_answer():
    model = built(config())
    assert generate(model, PROMPTS[:2], 0, start_token=START, sampling=GREEDY) == [[], []]
    assert beam_search(model, PROMPTS[:2], 0, start_token=START, num_beams=2) == [[], []]


@pytest.mark.parametrize("num_beams", [None, 3])
def test_the_encoder_reads_each_prompt_once(num_beams):
    model = built(config())
    calls: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda module, given, output: calls.append((name, given[0].shape[1]))  # of [S, B, H]

    model.model.encoder.layers["0"].register_forward_hook(note("layer"))
    for layer in model.model.decoder.layers.values():
        layer.cross_attn.k_proj.register_forward_hook(note("keys"))
    if num_beams is None:
        generate(model, PROMPTS, 6, start_token=START, sampling=GREEDY)
    else:
        beam_search(model, PROMPTS, 6, start_token=START, num_beams=num_beams)
    assert calls == [("layer", len(PROMPTS)), *[("keys", len(PROMPTS))] * 3]
    assert model.training


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_are_an_error(temperature):
    model = built(config())
    with torch.no_grad():
        model.model.decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="NaN"):
        generate(model, PROMPTS, 3, start_token=START, sampling=Sampling(temperature))
    with pytest.raises(NonFiniteError, match="NaN"):
        beam_search(model, PROMPTS, 3, start_token=START, num_beams=2)


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([], {}, "at least one prompt, and at least one token in each"),
        ([[1], []], {}, "at least one prompt, and at least one token in each"),
        ([[1]], {"seeds": [1, 2]}, "got 1 prompts and 2 seeds"),
        ([[1]], {"seeds": [-1]}, "the seed must be 0 or more"),
        ([[1], [2, -3]], {}, "token ids must be from 0 to .*; prompt 1 has -3"),
    ],
)
def test_what_cannot_be_answered_is_refused(prompts, how, message):
    with pytest.raises(ConfigError, match=message):
        generate(built(config()), prompts, 3, start_token=START, sampling=GREEDY, **how)


def test_a_search_without_beams_is_refused():
    with pytest.raises(ConfigError, match="num_beams must be 1 or more; got 0"):
        beam_search(built(config()), PROMPTS, 3, start_token=START, num_beams=0)


def answers_on_ranks(layout: dict[str, int]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Greedy, sampled and beam-search answers."""
    model = T5Model(config(), options(pg_collection=collection(**layout)))
    sampled = generate(model, PROMPTS, 6, start_token=START, sampling=Sampling(2.0))
    greedy = generate(model, PROMPTS, 6, start_token=START, sampling=GREEDY)
    return greedy, sampled, beam_search(model, PROMPTS, 6, start_token=START, num_beams=3, end_tokens=[5])


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"replicate": 2}], ids=str)
def test_answers_are_the_same_on_all_ranks(layout):
    [want] = ranks(1, answers_on_ranks, {})
    assert ranks(2, answers_on_ranks, layout) == [want] * 2


def refusal_on_ranks() -> str:
    model = T5Model(config(), options(pg_collection=collection(context=2)))
    with pytest.raises(ConfigError) as raised:
        generate(Pipeline([model]), PROMPTS, 6, start_token=START, sampling=GREEDY)
    return str(raised.value)


def test_a_model_that_splits_rows_is_refused():
    assert all("one token at a time, which cannot be split" in message for message in ranks(2, refusal_on_ranks))
