"""The special tokens that end a turn of the assistant are found in the conversations themselves."""

import pytest

from megalith.data.chat.turn_ends import turn_ends
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.tokenizer import Tokenizer
from tests.data.chat.examples import CHATML, CHATS, INSTRUCTIONS, TURNS, assistant, prepare_chats, user, write_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BLOCKS = """{% for m in messages %}<turn>{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}</turn>{% endfor %}"""
CALLS = """{% for m in messages %}<turn>{{ m.content }}{{ '<|im_end|>' if m.call else '</turn>' }}{% endfor %}
{%- if add_generation_prompt %}<turn>{% endif %}"""


def ends(folder, template, records) -> list[str]:
    """The tokens that the sidecar records."""
    write_tokenizer(folder, template)
    dataset = IndexedDataset(prepare_chats(folder, records).prefix)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    assert turn_ends([dataset], tokenizer) == dataset.sidecar.chat.ends
    assert turn_ends([dataset, dataset], tokenizer) == dataset.sidecar.chat.ends
    return [tokenizer.decode([id]) for id in dataset.sidecar.chat.ends]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["<|im_end|>"]),  # with a line break after it
        (TURNS, ["</turn>"]),
        (INSTRUCTIONS, ["<|endoftext|>"]),
        (PLAIN, []),
        (BLOCKS, []),
        ("{% for m in messages %}{{ m.content }}</turn> \n\n \n{% endfor %}", ["</turn>"]),
    ],
    ids=["chatml", "turns", "instructions", "plain", "blocks without the end", "many blanks"],
)
def test_the_last_token_of_a_turn_ends_it_if_it_is_special(template, expected, tmp_path):
    assert ends(tmp_path, template, [{"messages": chat} for chat in CHATS]) == expected


def test_a_message_that_spells_the_token_does_not_count(tmp_path):
    assert ends(tmp_path, PLAIN, [{"messages": [user("one"), assistant("two<|im_end|>")]}]) == []


@pytest.mark.parametrize(("num_calls", "expected"), [(1, ["</turn>"]), (2, ["</turn>", "<|im_end|>"])])
def test_a_second_token_counts_if_it_ends_a_tenth_of_the_turns(num_calls, expected, tmp_path):
    chats = [[user("one"), assistant("two", call=number < num_calls)] for number in range(20)]
    assert ends(tmp_path, CALLS, [{"messages": chat} for chat in chats]) == expected


@pytest.mark.parametrize(("num_blanks", "is_found"), [(0, True), (8, True), (9, False)])
def test_at_most_eight_blank_tokens_may_follow(num_blanks, is_found, tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    [blank], end = tokenizer.encode("\n"), tokenizer.token_id("</turn>")
    with IndexedDatasetBuilder(tmp_path / "chats", "uint16") as builder:
        builder.add_document([1, 2, end, *[blank] * num_blanks], [1, 2 + num_blanks])
        builder.finalize(conversations=True)
    assert turn_ends([IndexedDataset(tmp_path / "chats")], tokenizer) == (end,) * is_found


def test_plain_completions_end_with_the_document(tmp_path):
    write_tokenizer(tmp_path)
    found = prepare_chats(tmp_path, [{"prompt": "one ", "completion": "two"}], use_template=False)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert found.train.chat.template is None
    assert found.train.chat.ends == (tokenizer.eod,)
