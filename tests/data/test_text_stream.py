"""TextStream: the pieces add up to the text, and no piece splits a character."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.tokenizer import TextStream, Tokenizer, train_byte_level_bpe

BYTE_LEVEL = train_byte_level_bpe(["the cat sat on the mat, über alles, 日本語のテキスト 🙂🙂"] * 3, 300)


def with_byte_fallback() -> Tokenizer:
    """Like Llama 2's: a space is ▁, what has no entry is spelled in bytes, and a text loses its leading space."""
    words = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "a", "b"]
    content = {
        "version": "1.0", "truncation": None, "padding": None, "post_processor": None,
        "added_tokens": [{
            "id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True,
            "vocab": {word: id for id, word in enumerate(words)}, "merges": [],
        },
    }  # fmt: skip
    return Tokenizer(json.dumps(content).encode())


def streamed(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*(stream.add(id) for id in ids), stream.end()]


@settings(max_examples=60)
@given(before=st.text(max_size=30), text=st.text(max_size=60))
def test_the_pieces_are_the_text_and_cut_no_character(before, text):
    pieces = streamed(BYTE_LEVEL, BYTE_LEVEL.encode(before), BYTE_LEVEL.encode(text))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert all(text.startswith("".join(pieces[:end])) for end in range(len(pieces)))


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 299), max_size=60))
def test_bytes_that_make_no_character_are_the_text_of_decode(ids):
    assert "".join(streamed(BYTE_LEVEL, [], ids)) == BYTE_LEVEL.decode(ids)


def test_a_character_appears_with_its_last_byte():
    ids = [BYTE_LEVEL.encode(text) for text in ("𐍈", "x")]
    assert len(ids[0]) == 4
    assert streamed(BYTE_LEVEL, [], ids[0] + ids[1]) == ["", "", "", "𐍈", "x", ""]
    assert streamed(BYTE_LEVEL, [], ids[0][:2]) == ["", "", "\ufffd"]


@pytest.mark.parametrize("length", [1, 20, 90])
def test_a_space_at_the_front_and_characters_in_bytes_are_kept(length):
    tokenizer = with_byte_fallback()
    text = "日本語" * length + " the cat"
    ids = tokenizer.encode(text)
    for cut in (3, 9 * length - 3, 9 * length, 9 * length + 1):  # each just after a character
        before, after = ids[:cut], ids[cut:]
        pieces = streamed(tokenizer, before, after)
        assert tokenizer.decode(before) + "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
