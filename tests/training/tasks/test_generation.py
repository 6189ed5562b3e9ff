"""in_order: texts generated side by side are shown one after the other; and answers as texts."""

import tokenizers
from tokenizers import decoders, models

from megalith.data.tokenizer import Tokenizer
from megalith.models.sampling import Sampling
from megalith.models.t5_generation import generate
from megalith.training.tasks.generation import in_order, stream_text
from tests.models.test_t5_model import built, config


def test_the_first_text_grows_as_it_is_drawn_and_others_wait_for_it():
    pieces = [["a", "x"], ["b", ""], ["c", None], [None, None]]
    shown = in_order(["1:", "2:"], iter(pieces))
    assert next(shown) == "1:"
    assert [next(shown) for _ in range(3)] == ["a", "b", "c"]
    assert list(shown) == ["\n2:", "x", "\n"]


def test_a_text_that_has_grown_behind_another_goes_on_as_it_is_drawn():
    pieces = [["a", "x", "q"], [None, "y", None], [None, "z", None], [None, "!", None]]
    shown = in_order(["1:", "2:", "3:"], iter(pieces))
    assert list(shown) == ["1:", "a", "\n2:", "xy", "z", "!", "\n3:q", "\n"]


def test_texts_of_nothing_are_their_openings():
    assert "".join(in_order(["1:", "2:"], iter([["", ""]]))) == "1:\n2:\n"


def test_an_answer_begins_as_a_text_of_its_own_does():
    # a decoder that drops the space at the beginning of a text, like T5's; after a prompt it would not
    entries = {"</s>": 0, "<pad>": 1, "<extra_id_0>": 2} | {f"▁w{number}": number for number in range(3, 61)}
    made = tokenizers.Tokenizer(models.WordLevel(entries, unk_token="</s>"))
    made.decoder = decoders.Metaspace()
    tokenizer, model = Tokenizer(made.to_str().encode()), built(config())
    prompt, sampling = [5, 6, 7], Sampling(2.0)
    [tokens] = generate(model, [prompt], 6, start_token=1, sampling=sampling, seeds=[4], end_tokens=[0])
    assert min(tokens) > 2
    pieces = list(stream_text(model, tokenizer, [prompt], 6, sampling=sampling, seeds=[4]))
    assert "".join(piece or "" for [piece] in pieces) == " ".join(f"w{token}" for token in tokens)
