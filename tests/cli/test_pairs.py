"""megalith data pairs and inspect: what they say of pairs, and that a mistake leaves nothing behind."""

import json

import pytest

from megalith.data.pairs.dataset import PairTexts
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from tests.data.pairs.examples import PAIRS, as_records, write_lines, write_tokenizer
from tests.program import here


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two files of pairs and a tokenizer; becomes the working folder."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "t.json")
    write_lines(tmp_path / "a.jsonl", as_records())
    write_lines(tmp_path / "b.jsonl", as_records(PAIRS[2:]))
    return tmp_path


def run(*arguments):
    found = here("data", *arguments)
    assert found.code == 0, found
    return found.out.splitlines()


def seq_length_of(line):
    assert line.endswith(" data.num_negatives=2")
    return int(line.split()[-2].removeprefix("data.seq_length="))


def test_it_says_what_there_is_and_what_comes_next(folder):
    train, held_out, rows, next_command = run(
        "pairs", "a.jsonl", "--valid", "b.jsonl", "--out", "d/x", "--tokenizer", "t.json", "--max-passage-tokens", 9
    )
    tokenizer = Tokenizer.load("t.json")
    ids = [[tokenizer.encode(text) for text in (query, positive, *negatives)] for query, positive, negatives in PAIRS]
    num_cut = [sum(len(text) > 9 for text in pair[1:]) for pair in ids]
    num_tokens = [len(pair[0]) + sum(min(9, len(text)) for text in pair[1:]) for pair in ids]
    assert train == (
        f"training  3 pairs, each with 2 to 5 negatives, {sum(num_cut)} passages cut, {sum(num_tokens)} tokens"
    )
    assert held_out == f"held out  1 pair, each with 5 negatives, {num_cut[2]} passage cut, {num_tokens[2]} tokens"
    lengths = [
        len(pair[0]) + sum(sorted([min(9, len(text)) for text in pair[2:]])[-2:]) + min(9, len(pair[1])) + 2 * 4
        for pair in ids
    ]
    assert (
        rows == f"rows      up to {max(lengths)} tokens of a query, a passage and 2 negatives, special tokens included"
    )
    start = "next: megalith train embedding-tiny --from RUN data.train=d/x data.valid=d/x-valid data.seq_length="
    assert next_command.startswith(start)


def test_rows_of_the_proposed_length_hold_every_pair_and_shorter_ones_do_not(folder):
    for out, limits in (("x", []), ("y", ["--max-query-tokens", 2]), ("z", ["--max-passage-tokens", 1])):
        lines = run("pairs", "a.jsonl", "--out", out, "--tokenizer", "t.json", *limits)
        proposed, tokenizer = seq_length_of(lines[-1]), Tokenizer.load("t.json")
        assert proposed % 16 == 0
        assert PairTexts(out, tokenizer, proposed).num_negatives == 2
        with pytest.raises(DataError, match="must have at most"):
            PairTexts(out, tokenizer, proposed - 16)


def test_held_out_pairs_count_for_the_length_of_rows(folder):
    long = [("why", "because of the tide " * 9, ["no", "yes"])]
    write_lines(folder / "b.jsonl", as_records(long))
    with_held_out = run("pairs", "a.jsonl", "--valid", "b.jsonl", "--out", "x", "--tokenizer", "t.json")[-1]
    assert PairTexts("x-valid", Tokenizer.load("t.json"), seq_length_of(with_held_out)).num_negatives == 2


def test_inspect_shows_the_texts_of_each_pair(folder):
    run("pairs", "a.jsonl", "--out", "x", "--tokenizer", "t.json")
    lines = run("inspect", "x", "--documents", 2)
    assert lines[1] == "pairs       3, each with 2 to 5 negatives"
    shown = lines.index("")
    tokenizer = Tokenizer.load("t.json")
    for query, positive, negatives in PAIRS[:2]:
        number = sum(len(tokenizer.encode(text)) for text in (query, positive, *negatives))
        assert lines[shown + 1].endswith(f", {number} tokens")
        assert lines[shown + 1].startswith("pair ")
        texts = [f"query     {query}", f"positive  {positive}", *(f"negative  {text}" for text in negatives)]
        assert lines[shown + 2 : shown + 2 + len(texts)] == [f"  | {text}" for text in texts]
        shown += 2 + len(texts)
    assert lines[shown] == ""


def test_inspect_shows_ids_and_cuts_a_long_pair_without_a_tokenizer(folder):
    write_lines(folder / "a.jsonl", as_records([("why", "far " * 300, ["no"])]))
    run("pairs", "a.jsonl", "--out", "x", "--tokenizer", "t.json")
    ids = Tokenizer.load("t.json").encode("why")
    (folder / "t.json").unlink()
    lines = run("inspect", "x")
    assert f"  | query     {' '.join(map(str, ids))}" in lines
    assert "  | ..." in lines
    assert not any("negative  " in line for line in lines)


@pytest.mark.parametrize(
    ("record", "options", "says"),
    [
        ({"text": "a"}, [], r"b.jsonl, line 4, must have a query and passages that answer it"),
        ({"query": "q", "pos": [""]}, [], r"b.jsonl, line 4, must have text as pos\[0\]; it is empty"),
        ({"query": "q", "pos": ["p"]}, ["--max-query-tokens", 0], "--max-query-tokens must be 1 or more; got 0"),
        ({"query": "q", "pos": ["p"]}, ["--eod", "<x>"], "must have an end-of-document token, '<x>'"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(record, options, says, folder):
    write_lines(folder / "b.jsonl", [*as_records(), record])
    before = sorted(path.name for path in folder.iterdir())
    found = here("data", "pairs", "a.jsonl", "--valid", "b.jsonl", "--out", "x", "--tokenizer", "t.json", *options)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("error: ")
    assert len(found.err.splitlines()) == 1
    assert says.replace("\\", "") in found.err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_file_that_is_one_list_gets_a_way_out(folder):
    (folder / "dpr.json").write_text(json.dumps([{"question": "q", "positive_ctxs": []}], indent=4))
    found = here("data", "pairs", "dpr.json", "--out", "x", "--tokenizer", "t.json")
    assert found.code == 2
    assert "dpr.json, line 1, must be one JSON object" in found.err
    assert "jq -c '.[]' dpr.json" in found.err
