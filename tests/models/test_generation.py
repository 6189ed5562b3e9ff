"""generation: greedy tokens match transformers and full forwards, and are the same in any batch and layout."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.errors import ConfigError, NonFiniteError
from megalith.models.generation import generate, stream
from megalith.models.gpt_model import GPTModel
from megalith.models.hf import GPT2, LLAMA
from megalith.models.sampling import Sampling
from megalith.parallel.build_options import BuildOptions
from megalith.topology.rank_grid import RankGrid
from megalith.topology.rank_groups import ParallelState
from megalith.transformer.layer_spec import LayerSpec, layer_specs
from tests.models.hf import peers
from tests.parallel.groups import collection
from tests.rank_pool import ranks
from tests.sampling import sampled
from tests.transformer.shapes import config, options

PROMPT = [3, 14, 15, 9, 2, 6]
RAGGED = [[5, 8, 9, 7, 9, 3, 2, 3, 8], [26], PROMPT, [4, 6, 2]]
GREEDY = Sampling(temperature=0.0)
EVERYTHING = Sampling(1.5, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.3)
PROBABILITIES = [0.5, 0.25, 0.125, 0.125]


def built(shape: str = "llama", **changes: Any) -> GPTModel:
    return GPTModel(config(shape, **changes), options(), seed=1)


def one(model: GPTModel, prompt: Sequence[int], max_new_tokens: int, *, seed: int = 1, **how: Any) -> list[int]:
    """The text of one prompt."""
    [text] = generate(model, [prompt], max_new_tokens, seeds=[seed], **how)
    return text


def greedy_without_cache(model: GPTModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    model.eval()
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def constant(probabilities: list[float]) -> GPTModel:
    """A model that gives the next token ``probabilities``, whatever came before."""
    model = built(vocab_size=len(probabilities), num_layers=1, normalization="LayerNorm")
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.bias.zero_()
        model.model.norm.bias[0] = 1.0  # always the last hidden state
        model.lm_head.weight[:, 0] = torch.tensor(probabilities).log()
    return model


def assert_frequencies(sampling: Sampling, want: list[float], seed: int = 1) -> None:
    num_tokens = 600
    drawn = Counter(one(constant(PROBABILITIES), [0], num_tokens, sampling=sampling, seed=seed))
    for token, probability in enumerate(want):
        deviation = (probability * (1 - probability) / num_tokens) ** 0.5
        assert drawn[token] / num_tokens == pytest.approx(probability, abs=5 * deviation), f"token {token}"


@pytest.mark.parametrize("shape", ["llama", "gpt2", "rope, exact gelu, biases", "latents"])
def test_greedy_tokens_are_the_likeliest_of_a_full_forward_without_cache(shape):
    model = built(shape)
    want = greedy_without_cache(model, PROMPT, 12)
    assert len(set(want)) > 3, "a model that repeats itself proves little"
    assert one(model, PROMPT, 12, sampling=GREEDY, seed=1) == want


def test_a_single_token_is_prompt_enough():
    model = built()
    assert one(model, PROMPT[:1], 5, sampling=GREEDY) == greedy_without_cache(model, PROMPT[:1], 5)


def options_set(drawn: tuple[Sampling, list[float]]) -> set[Hashable]:
    """What `make test` covers once: each set of non-default options."""
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
            (Sampling(1.0, top_p=0.5), [1.0, 0.0, 0.0, 0.0]),  # the first alone reaches it
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
    assert one(model, PROMPT, 8, sampling=sampling, seed=1) == one(model, PROMPT, 8, sampling=GREEDY, seed=2)


def test_it_ends_before_the_end_token():
    model = built()
    tokens = one(model, PROMPT, 12, sampling=GREEDY, seed=1)
    end = tokens[5]
    assert one(model, PROMPT, 12, sampling=GREEDY, seed=1, end_tokens={end}) == tokens[: tokens.index(end)]
    unused = next(token for token in range(31) if token not in tokens)
    assert one(model, PROMPT, 12, sampling=GREEDY, seed=1, end_tokens={unused, end + 31}) == tokens


@pytest.mark.parametrize("wanted", [0, 1, 7])
def test_it_ends_after_as_many_tokens_as_wanted(wanted):
    assert len(one(built(), PROMPT, wanted, sampling=Sampling(), seed=1)) == wanted


def test_learned_positions_end_it():
    model = built("gpt2", max_position_embeddings=10)
    tokens = one(model, PROMPT, 100, sampling=GREEDY, seed=1)
    assert tokens == greedy_without_cache(model, PROMPT, 4)


@pytest.mark.parametrize("length", [10, 11])
def test_a_prompt_that_fills_all_positions_is_refused(length):
    model = built("gpt2", max_position_embeddings=10)
    with pytest.raises(ConfigError, match=f"must be shorter than the model's 10 positions; got {length}; shorten it"):
        generate(model, [PROMPT, [1] * length], 1, sampling=GREEDY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -5}, "the number of new tokens must be 0 or more; got -5"),
        ({"seeds": [-1]}, r"the seed must be 0 or more and below 2\^63; got -1"),
        ({"seeds": [2**63]}, "got 9223372036854775808"),
        ({"seeds": [1, 2]}, "one seed per prompt; got 1 prompts and 2 seeds"),
        ({"prompts": []}, "needs at least one prompt, and one seed per prompt; got 0 prompts and 1 seeds"),
        ({"prompts": [[]]}, "the prompt has no tokens; provide some text to continue"),
        ({"prompts": [[1], [30, 31]], "seeds": [1, 2]}, "token ids must be from 0 to 30; prompt 1 has 31; encode it"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_at_the_call(arguments, message):
    with pytest.raises(ConfigError, match=message):
        stream(built(), **{"prompts": [PROMPT], "max_new_tokens": 1, "sampling": GREEDY, "seeds": [1], **arguments})


def test_tokens_can_be_taken_one_by_one():
    model = built(hidden_dropout=0.5).train()
    tokens = stream(model, [PROMPT], 8, sampling=Sampling(1.0), seeds=[1])
    first = next(tokens)
    assert model.training
    assert torch.is_grad_enabled()
    assert [first, *tokens] == [[token] for token in one(model, PROMPT, 8, sampling=Sampling(1.0))]


def test_texts_of_a_model_in_training_that_are_drawn_at_the_same_time_have_no_dropout():
    model = built(hidden_dropout=0.5, attention_dropout=0.5)
    want = [[token] for token in greedy_without_cache(model, PROMPT, 8)]
    model.train().model.layers["0"].eval()  # a user has frozen a layer
    modes = [module.training for module in model.modules()]
    first, second = (stream(model, [PROMPT], number, sampling=GREEDY) for number in (3, 8))
    assert [next(second), *(pair for _, pair in zip(first, second, strict=False)), *second] == want
    assert [module.training for module in model.modules()] == modes


def test_a_seed_decides_and_torchs_generator_is_left_alone():
    model = built()
    state = torch.get_rng_state()
    first, again, other = (one(model, PROMPT, 20, sampling=Sampling(1.0), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_generates_without_dropout_and_is_left_in_its_mode(training, monkeypatch):
    model = built(hidden_dropout=0.5, attention_dropout=0.5).train(training)
    tokens = one(model, PROMPT, 5, sampling=GREEDY, seed=1)
    assert model.training == training
    assert tokens == greedy_without_cache(model, PROMPT, 5)
    monkeypatch.delattr(GPTModel, "forward")
    with pytest.raises(TypeError):
        generate(model.train(training), [PROMPT], 5, sampling=GREEDY)
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())


def windowed(shape: str) -> GPTModel:
    """A model whose second layer sees three keys."""
    shapes = config(shape)
    return GPTModel(shapes, options(), spec_of=lambda index: _narrow(layer_specs(shapes)(index), index), seed=1)


def _narrow(spec: LayerSpec, index: int) -> LayerSpec:
    return spec if index == 0 else replace(spec, attention=partial(spec.attention, window=3))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), EVERYTHING], ids=["greedy", "sampled", "everything"])
@pytest.mark.parametrize("build", [built, windowed])
@pytest.mark.parametrize("shape", ["llama", "gpt2", "latents"])
def test_a_text_is_the_same_alone_and_in_any_batch(shape, build, sampling):
    model, seeds = build(shape), [3, 1, 4, 1]
    together = generate(model, RAGGED, 14, sampling=sampling, seeds=seeds)
    alone = [one(model, prompt, 14, sampling=sampling, seed=seed) for prompt, seed in zip(RAGGED, seeds, strict=True)]
    assert together == alone
    backwards = generate(model, RAGGED[::-1], 14, sampling=sampling, seeds=seeds[::-1])
    assert backwards[::-1] == alone
    if sampling == GREEDY:
        assert together == [greedy_without_cache(model, prompt, 14) for prompt in RAGGED]


ATTENTION: dict[str, dict[str, Any]] = {
    "a window": {"attention": {"window": 3}},
    "windows in some layers": {"attention": {"window": 3, "window_layers": [False, True]}},
    "a learned sink": {"attention": {"softmax": "learnable", "window": 5}},
    "softmax off by one": {"attention": {"softmax": "off_by_one"}},
    "capped scores": {"attention": {"logit_softcap": 2.0}},
    "a gate and norms of heads": {"attention": {"output_gate": True, "qk_norm": "RMSNorm"}},
    "yarn": {"rope": {"scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}},
    "Gemma 3": {
        "rope": {"base": 500.0, "local_base": 10.0, "scaling": {"type": "linear", "factor": 8.0}},
        "attention": {"window": 3, "window_layers": [True, False]},
    },
    "capped logits": {"multipliers": {"logits": 2.0, "logit_softcap": 1.5}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # torch's kernels, and the reference
@pytest.mark.parametrize("settings", ATTENTION.values(), ids=ATTENTION)
def test_windows_sinks_caps_and_scaled_positions_hold_in_ragged_batches(settings, dtype):
    model = GPTModel(config(init_method_std=0.5, **settings), options(dtype=dtype), seed=1)
    want = [greedy_without_cache(model, prompt, 10) for prompt in RAGGED]
    assert len({token for text in want for token in text}) > 8, "models that repeat themselves prove little"
    assert generate(model, RAGGED, 10, sampling=GREEDY) == want


def test_by_default_texts_have_the_seeds_0_1_2():
    model, sampling = built(), Sampling(1.0)
    got = generate(model, [PROMPT] * 3, 9, sampling=sampling)
    assert got == generate(model, [PROMPT] * 3, 9, sampling=sampling, seeds=[0, 1, 2])
    assert len({tuple(text) for text in got}) == 3


@pytest.mark.parametrize("penalty", [None, 1.4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_texts_are_those_of_transformers_with_a_cache_and_without(family, penalty):
    torch.manual_seed(0)  # of theirs' weights. If smaller, GPT-2's tied ones make it repeat its last token
    theirs, architecture = (peers.llama(), LLAMA) if family == "llama" else (peers.gpt2(initializer_range=0.4), GPT2)
    theirs.eval()
    ours = peers.same_as_ours(theirs, architecture)
    sampling = Sampling(0.0, repetition_penalty=penalty)
    got = generate(ours, RAGGED, 12, sampling=sampling)
    pad, longest = 60, max(map(len, RAGGED))  # a token that is in no prompt
    padded = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in RAGGED])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in RAGGED])
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": pad, "repetition_penalty": penalty}
    for use_cache in (True, False):
        for prompt, text in zip(RAGGED, got, strict=True):
            assert [*prompt, *text] == theirs.generate(torch.tensor([prompt]), use_cache=use_cache, **how)[0].tolist()
        if penalty is None:  # theirs treats the padding as text
            together = theirs.generate(padded, attention_mask=mask, use_cache=use_cache, **how)
            assert together[:, longest:].tolist() == got
    assert len({token for text in got for token in text}) > 5, "models that repeat themselves prove little"


def test_each_text_ends_where_its_own_learned_positions_end():
    model = built("gpt2", max_position_embeddings=12)
    texts = generate(model, RAGGED, 100, sampling=GREEDY)
    assert [len(text) for text in texts] == [12 - len(prompt) for prompt in RAGGED]
    assert texts == [greedy_without_cache(model, prompt, 12 - len(prompt)) for prompt in RAGGED]


def test_texts_that_have_ended_are_none_and_the_batch_ends_with_the_last():
    model = built()
    whole = generate(model, RAGGED, 30, sampling=GREEDY)
    ends = {row: text[3 + row] for row, text in enumerate(whole)}
    want = [text[: text.index(ends[row]) + 1] for row, text in enumerate(whole)]
    num_forwards: list[int] = []
    model.register_forward_hook(lambda *_: num_forwards.append(1))
    steps = list(stream(model, RAGGED, 30, sampling=GREEDY, stop=lambda row, token: token == ends[row]))
    assert len(steps) == len(num_forwards) == max(map(len, want)) < 30
    assert [[step[row] for step in steps if step[row] is not None] for row in range(4)] == want
    for row, text in enumerate(want):
        assert all(step[row] is None for step in steps[len(text) :])


def test_one_token_costs_one_column():
    model, seen = built(), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    generate(model, RAGGED, 4, sampling=GREEDY)
    assert seen == [(4, 9), (4, 1), (4, 1), (4, 1)]


def drawn_with_little_room(shape: str, room: int, *layout: Any) -> list[list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.models.generation.FIRST_ROOM", room)
        return drawn_on_ranks(shape, *layout)


@pytest.mark.parametrize(
    ("shape", "tensor", "context"),
    [("llama", 1, 1), ("latents", 1, 1), ("llama", 1, 2), ("llama", 2, 1), ("gpt2", 2, 1)],
)
@pytest.mark.parametrize("room", [1, 3])
def test_memory_that_grows_with_the_text_does_not_change_it(shape, tensor, context, room):
    model = built(shape)
    want = [generate(model, RAGGED, 10, sampling=sampling, seeds=[3, 1, 4, 1]) for sampling in (GREEDY, EVERYTHING)]
    for got in ranks(tensor * context, drawn_with_little_room, shape, room, tensor, context, shape == "gpt2"):
        assert got == want  # GPT-2 with sequence parallelism


def test_a_text_may_be_as_long_as_it_likes():
    texts = [[], []]
    for step, tokens in enumerate(stream(constant([0.0, 1.0]), [[0], [1, 1]], 10**12, sampling=Sampling(1.0))):
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        if step == 2:
            break
    assert texts == [[1, 1, 1], [1, 1, 1]]


def test_logits_that_are_nan_are_an_error():
    model = built()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="logits contain NaN, so no token can be sampled"):
        generate(model, RAGGED, 3, sampling=GREEDY)


def drawn_on_ranks(shape: str, tensor: int, context: int, sequence_parallel: bool) -> list[list[list[int]]]:
    groups = collection(tensor, context=context)
    split = options(pg_collection=groups, sequence_parallel=sequence_parallel)
    model = GPTModel(config(shape), split, seed=1)
    return [generate(model, RAGGED, 10, sampling=sampling, seeds=[3, 1, 4, 1]) for sampling in (GREEDY, EVERYTHING)]


@pytest.mark.parametrize(
    ("shape", "tensor", "context", "sequence_parallel"),
    [
        ("llama", 2, 1, False),
        ("gpt2", 2, 1, True),
        ("llama", 1, 2, False),
        ("latents", 2, 1, False),
        pytest.param("latents", 2, 1, True, marks=pytest.mark.slow),
        pytest.param("latents", 1, 2, False, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, 1, False, marks=pytest.mark.slow),
        pytest.param("llama", 2, 1, True, marks=pytest.mark.slow),
        pytest.param("gpt2", 1, 2, False, marks=pytest.mark.slow),
        pytest.param("llama", 2, 2, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_split_a_model_draw_the_texts_of_one_process(shape, tensor, context, sequence_parallel):
    model = built(shape)
    want = [generate(model, RAGGED, 10, sampling=sampling, seeds=[3, 1, 4, 1]) for sampling in (GREEDY, EVERYTHING)]
    for got in ranks(tensor * context, drawn_on_ranks, shape, tensor, context, sequence_parallel):
        assert got == want


def refuse_to_compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    raise AssertionError("a compiled layer was called")


def test_compiled_layers_are_not_compiled_again_for_every_token():
    model = built()
    want = generate(model, RAGGED, 5, sampling=GREEDY)
    for layer in model.layers():
        layer.compile(backend=refuse_to_compile)
    assert generate(model, RAGGED, 5, sampling=GREEDY) == want
    with pytest.raises(Exception, match="a compiled layer was called"):
        model(torch.tensor([PROMPT]))


def of_a_job_of_its_own() -> list[int]:
    """What this rank's own model, one of two that share the world, adds to a prompt."""
    groups = ParallelState(RankGrid(1), rank_offset=dist.get_rank()).collection()
    model = GPTModel(config("llama"), BuildOptions(groups, torch.float64), seed=1 + dist.get_rank())
    return one(model, PROMPT, 6, sampling=GREEDY)


def test_jobs_that_share_a_world_write_their_own_texts():
    alone = [one(GPTModel(config("llama"), options(), seed=seed), PROMPT, 6, sampling=GREEDY) for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert ranks(2, of_a_job_of_its_own) == alone
