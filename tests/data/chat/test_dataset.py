"""Rows of conversations: whole, each once in an epoch, nearly full, and functions of the index."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.config import MaskingConfig
from megalith.data.chat.dataset import ChatDataset, HeldOutChats
from megalith.data.gpt_dataset import EvaluationDataset, GPTDataset, GPTSample
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.prepare import prepare
from megalith.data.row_packing import pack_rows
from megalith.data.t5_dataset import T5Dataset
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from tests.data.chat.examples import conversations, write_conversations

Chat = tuple[tuple[int, ...], tuple[bool, ...]]


def chats_of(sample: GPTSample) -> list[Chat]:
    """The conversations in a row: tokens, and whether each is learned; the first of a conversation never is."""
    found = []
    for number in range(int(sample.documents[-1]) + 1):
        own = sample.documents == number
        tokens, labels, learned = sample.tokens[own], sample.labels[own], sample.loss_mask[own]
        if not labels.any():  # padding; no token of the tests is 0
            assert not tokens.any()
            assert not learned.any()
            assert number == sample.documents[-1]
            continue
        assert tokens[1:].tolist() == labels[:-1].tolist()
        found.append(((*tokens.tolist(), int(labels[-1])), (False, *learned.tolist())))
    return found


def expected(prefix: str, most: int = 1 << 30) -> Counter[Chat]:
    """The conversations in the files, up to their first ``most`` tokens, in which something is learned."""
    pairs = ((tokens[:most], [False, *learned[1:most]]) for tokens, learned in conversations(prefix))
    return Counter((tuple(tokens), tuple(learned)) for tokens, learned in pairs if any(learned))


@settings(deadline=None, max_examples=30)
@given(num_chats=st.integers(1, 40), S=st.integers(13, 40), seed=st.integers(0, 3))
def test_every_epoch_has_each_conversation_whole_and_once(num_chats, S, seed, tmp_path_factory):
    prefix = write_conversations(tmp_path_factory.mktemp("x") / "x", num_chats, seed=seed)
    dataset = ChatDataset(prefix, S, seed)
    for epoch in range(2):
        rows = [dataset[epoch * dataset.num_samples + n] for n in range(dataset.num_samples)]
        assert all(len(row.tokens) == S and row.keeps_documents_apart for row in rows)
        assert Counter(chat for row in rows for chat in chats_of(row)) == expected(prefix)


def test_a_sample_is_a_function_of_its_index_and_epochs_differ_in_their_order(tmp_path):
    prefix = write_conversations(tmp_path / "x")
    dataset = ChatDataset(prefix, 20, 1)
    order = [tuple(dataset[n].tokens) for n in range(2 * dataset.num_samples)]
    again = ChatDataset(IndexedDataset(prefix), 20, 1)
    assert [tuple(again[n].tokens) for n in reversed(range(len(order)))] == order[::-1]
    first, second = order[: dataset.num_samples], order[dataset.num_samples :]
    assert first != second
    assert sorted(first) == sorted(second)
    assert [tuple(ChatDataset(prefix, 20, 2)[n].tokens) for n in range(dataset.num_samples)] != first
    with pytest.raises(IndexError, match="numbered from 0"):
        dataset[-1]


def best_fit(lengths: list[int], room: int) -> int:
    """The number of rows of best fit decreasing, by searching all rows for each item."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(rows)) if rows[row] >= length]
        if not fitting:
            rows.append(room)
            fitting = [len(rows) - 1]
        rows[min(fitting, key=rows.__getitem__)] -= length
    return len(rows)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 40))
def test_the_packing_is_best_fit_decreasing(lengths, room):
    items, starts = pack_rows(np.array(lengths), room, np.arange(len(lengths)))
    assert sorted(items.tolist()) == list(range(len(lengths)))
    rows = [items[a:b].tolist() for a, b in pairwise(starts)]
    assert all(rows)
    assert all(sum(lengths[item] for item in row) <= room for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert len(rows) == best_fit(lengths, room)


def test_a_thousand_conversations_leave_little_padding_and_a_line_says_how_much(tmp_path, caplog):
    caplog.set_level("INFO", logger="megalith")
    prefix = write_conversations(tmp_path / "x", 1000, 60)
    dataset = ChatDataset(prefix, 256, 0)
    num_tokens = sum(len(tokens) - 1 for tokens, _ in expected(prefix).elements())
    padding = 1 - num_tokens / (dataset.num_samples * 256)
    assert padding < 0.01
    assert f"{dataset.num_samples} rows of 256 tokens; {padding:.1%} is padding" in caplog.text


def test_conversations_that_fit_exactly_fill_their_rows(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for first in (1, 4, 7):
            builder.add_document([first, first + 1, first + 2], [1, 2])
        builder.finalize(conversations=True)
    dataset = ChatDataset(tmp_path / "x", 2, 0)
    assert dataset.num_samples == 3
    assert all(
        sample.documents.tolist() == [0, 0] and sample.loss_mask.all() for sample in (dataset[n] for n in range(3))
    )
    whole = ChatDataset(tmp_path / "x", 6, 0)[0]
    assert whole.documents.tolist() == [0, 0, 1, 1, 2, 2]


def test_long_conversations_are_refused_cut_or_skipped(tmp_path, caplog):
    prefix = write_conversations(tmp_path / "x", 60, 30)
    lengths = [len(tokens) for tokens, _ in conversations(prefix)]
    num_long = sum(length > 13 for length in lengths)
    says = (
        rf"at most 13 tokens, one more than data.seq_length \(12\); longer: {num_long} of 60 conversations; the "
        rf"longest, document {lengths.index(max(lengths))}, has {max(lengths)}; use data.seq_length={max(lengths) - 1}"
        r", .*data.long_conversations=cut.*data.long_conversations=skip"
    )
    with pytest.raises(DataError, match=says):
        ChatDataset(prefix, 12, 0)
    assert ChatDataset(prefix, max(lengths) - 1, 0).num_samples
    cut = ChatDataset(prefix, 12, 0, long_conversations="cut")
    chats = Counter(chat for n in range(cut.num_samples) for chat in chats_of(cut[n]))
    assert chats == expected(prefix, 13)
    assert f"cut off the end of {num_long} of 60 conversations, those of more than 13 tokens" in caplog.text
    skipping = ChatDataset(prefix, 12, 0, long_conversations="skip")
    chats = Counter(chat for n in range(skipping.num_samples) for chat in chats_of(skipping[n]))
    assert chats == Counter({chat: count for chat, count in expected(prefix).items() if len(chat[0]) <= 13})
    assert f"left out {num_long} of 60 conversations" in caplog.text
    assert cut.identity() != skipping.identity()


def test_conversations_without_anything_to_learn_are_left_out(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([1, 2, 3], [3])
        builder.add_document([])
        builder.add_document([4], [0, 1])
        builder.add_document([5, 6, 7], [0, 1, 2])  # only the first token, which is no label
        builder.add_document([8, 9], [0, 2])
        builder.add_document([10, 11, 12, 13], [3, 1])
        builder.finalize(conversations=True)
    dataset = ChatDataset(tmp_path / "x", 8, 0)
    assert chats_of(dataset[0]) == [((8, 9), (False, True)), ((10, 11, 12, 13), (False, False, False, True))]
    cut = ChatDataset(tmp_path / "x", 2, 0, long_conversations="cut")  # of the last one, only the context is left
    assert [chats_of(cut[n]) for n in range(cut.num_samples)] == [[((8, 9), (False, True))]]


def test_held_out_rows_come_once(tmp_path):
    prefix = write_conversations(tmp_path / "x")
    held_out = HeldOutChats(ChatDataset(prefix, 20, 0))
    assert Counter(chat for n in range(len(held_out)) for chat in chats_of(held_out[n])) == expected(prefix)
    with pytest.raises(IndexError):
        held_out[len(held_out)]


def test_the_identity_tells_other_roles_apart(tmp_path):
    documents = [([1, 2, 3, 4], [2, 2]), ([5, 6], [1, 1])]
    others = [([1, 2, 3, 4], [1, 3]), ([5, 6], [1, 1])]
    for name, content in (("a", documents), ("b", others), ("c", documents)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for tokens, lengths in content:
                builder.add_document(tokens, lengths)
            builder.finalize(conversations=True)
    a, b, c = (ChatDataset(tmp_path / name, 8, 0).identity() for name in "abc")
    assert a == c
    assert a != b


def test_how_long_conversations_are_treated_is_part_of_the_identity_if_there_are_any(tmp_path):
    prefix = write_conversations(tmp_path / "x")
    longest = max(len(tokens) for tokens, _ in conversations(prefix))
    for S, differs in ((longest - 1, False), (longest - 2, True)):
        cut, skip = (ChatDataset(prefix, S, 0, long_conversations=how).identity() for how in ("cut", "skip"))
        assert (cut["samples"] != skip["samples"]) == differs


def test_the_packing_depends_on_the_seed(tmp_path):
    prefix = write_conversations(tmp_path / "x", 200)
    rows = [[ChatDataset(prefix, 64, seed).row(n, 0).tokens.tolist() for n in range(3)] for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_much_padding_is_told_with_a_better_length(tmp_path, caplog):
    prefix = write_conversations(tmp_path / "x", 3)
    longest = max(len(tokens) for tokens, _ in conversations(prefix)) - 1
    ChatDataset(prefix, 4096, 0)
    assert re.search(rf"[0-9.]+% is padding; data.seq_length={longest} has room for the longest", caplog.text)


def test_what_cannot_be_used_is_refused(tmp_path):
    prefix = write_conversations(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"data.seq_length must be at least 1"):
        ChatDataset(prefix, 0, 0)
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        builder.add_document([1, 2, 3])
        builder.finalize()
    with pytest.raises(DataError, match=r"must hold conversations; .*text.json does not say so; .*megalith data chat"):
        ChatDataset(tmp_path / "text", 8, 0)
    with IndexedDatasetBuilder(tmp_path / "context", np.uint16) as builder:
        builder.add_document([1, 2, 3])
        builder.finalize(conversations=True)
    with pytest.raises(DataError, match="must have conversations with tokens to learn in the first 9; it has none"):
        ChatDataset(tmp_path / "context", 8, 0)
    with pytest.raises(DataError, match=r"sample 0 cannot be used: token .* has id"):
        ChatDataset(prefix, 1000, 0, vocab_size=5)[0]


def test_datasets_of_texts_refuse_conversations(tmp_path):
    prefix = write_conversations(tmp_path / "x")
    for make in (lambda: GPTDataset(prefix, 8, 0), lambda: EvaluationDataset(prefix, 8)):
        with pytest.raises(DataError, match=r"must contain texts; it holds conversations \(megalith data chat\)"):
            make()
    (tmp_path / "a.txt").write_text("one two\nthree\n" * 50)
    words = prepare([tmp_path / "a.txt"], tmp_path / "a", vocab_size=400, special_tokens=["t5"])
    with pytest.raises(DataError, match="it holds conversations"):
        T5Dataset(prefix, Tokenizer.load(words.tokenizer), 64, 64, seed=0, masking=MaskingConfig())
