"""megalith data index and search: what they say, and that a mistake is one message."""

import json
import os

import pytest

from tests.data.pairs.examples import PAIRS, as_records, write_lines, write_tokenizer
from tests.program import here
from tests.tiny_run import LLAMA, write_dataset

MODEL = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "bert": {"num_token_types": 0, "head": "embedding"},
}
TEXTS = ["Anna wrote it", "two miles", "", "the sea is far " * 30, "rain\x1b[31m and\tsea"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step, passages and queries."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tokenizer(folder / "t.json")
        write_lines(folder / "pairs.jsonl", as_records())
        prepared = here("data", "pairs", "pairs.jsonl", "--out", "pairs", "--tokenizer", "t.json")
        assert prepared.code == 0, prepared
        settings = {
            "model": MODEL,
            "data": {"train": "pairs", "seq_length": 96},
            "train": {"steps": 1, "global_batch_size": 3, "micro_batch_size": 3},
            "optim": {"lr": 1e-3},
            "precision": {"dtype": "float32"},
            "run": "run",
        }
        (folder / "settings.yaml").write_text(json.dumps(settings))
        ended = here("train", "settings.yaml")
        assert ended.code == 0, ended
        write_lines(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
        write_lines(folder / "queries.jsonl", [{"query": query, "pos": [positive]} for query, positive, _ in PAIRS])
        indexed = here("data", "index", "run", "texts.jsonl", "--out", "index", "--dtype", "float32")
        assert indexed.code == 0, indexed
        (folder / "said").write_text(indexed.out)
    return folder


@pytest.fixture
def folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def run(*arguments):
    found = here("data", *arguments)
    assert found.code == 0, found
    return found.out.splitlines()


def test_index_says_what_there_is_and_what_comes_next(folder):
    size = sum((folder / "index" / name).stat().st_size for name in ("offsets.safetensors", "passages.jsonl"))
    size += (folder / "index" / "embeddings-00000.safetensors").stat().st_size
    assert (folder / "said").read_text().splitlines() == [
        "passages   4, 1 of them truncated to 96 tokens",
        "left out   1 document without text",
        "embeddings 32 features each, in float32",
        f"index      index, {size:,} bytes",
        'next: megalith data search index --query "TEXT"',
    ]


def test_what_is_left_out_of_a_folder_or_read_as_plain_text_is_told(folder, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "src" / "pipe")
    (tmp_path / "src" / "a.txt").write_text("two miles")
    write_lines(tmp_path / "src" / "b.jsonl", [{"text": text} for text in TEXTS])
    lines = run("index", "run", tmp_path / "src", "--out", tmp_path / "index")
    assert lines[:3] == [
        "passages   2, 1 of them truncated to 96 tokens",
        "left out   1 broken link, 1 pipe, socket or device",
        "as text    1 .jsonl file in folders, each one document; give the files to read their lines",
    ]


def test_search_shows_passages_in_the_order_of_their_scores(folder):
    lines = run("search", "index", "--query", "two miles", "--k", 3)
    assert lines[0] == "query: two miles"
    assert lines[1] == "   1    1.0000  texts.jsonl 1  two miles"
    assert len(lines) == 4
    scores = [float(line.split()[1]) for line in lines[1:]]
    assert scores == sorted(scores, reverse=True)


def test_search_escapes_what_could_change_the_terminal_and_cuts_long_texts(folder):
    text = "\n".join(run("search", "index", "--query", "rain"))
    assert "rain\\x1b[31m and sea" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 140
    assert "the sea is far the sea is far" in text


def test_json_has_whole_passages_one_object_per_query(folder):
    lines = run("search", "index", "--queries", "queries.jsonl", "--json", "-k", 2)
    found = [json.loads(line) for line in lines]
    assert [each["query"] for each in found] == [query for query, _, _ in PAIRS]
    for each in found:
        assert len(each["passages"]) == 2
        for passage in each["passages"]:
            assert passage.keys() == {"id", "score", "text", "source", "document"}
            assert passage["text"] == TEXTS[passage["document"]]


def test_several_queries_are_answered_in_order(folder):
    lines = run("search", "index", "--query", "two miles", "--query", "Anna wrote it", "--k", 1)
    assert [line.split("  ")[-1] for line in lines[1::2]] == ["two miles", "Anna wrote it"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["search", "index"], "give either --query"),
        (["search", "index", "--query", "a", "--queries", "queries.jsonl"], "give either --query"),
        (["search", "index", "--query", ""], "a query must not be empty"),
        (["search", "index", "--query", "a", "--k", 0], "must be 1 or more; got 0"),
        (["search", "index", "--queries", "none.jsonl"], "none.jsonl cannot be read"),
        (["search", "index", "--queries", "texts.jsonl"], "texts.jsonl, line 1, must have a query"),
        (["search", "run", "--query", "a"], "run must be an index of passages"),
        (["search", "none", "--query", "a"], "none must be an index of passages"),
        (["search", "index", "--query", "a", "--model", "none"], "none does not exist"),
        (["index", "none", "texts.jsonl", "--out", "x"], "none does not exist"),
        (["index", "run", "none.jsonl", "--out", "x"], "none.jsonl cannot be read"),
        (["index", "run", "queries.jsonl", "--out", "x"], "set --key"),
        (["index", "run", "texts.jsonl", "--out", "index"], "index already exists"),
        (["index", "run", "texts.jsonl", "--out", "x", "--dtype", "int8"], "float16 or float32; got 'int8'"),
        (["index", "run", "texts.jsonl", "--out", "x", "--batch-size", 0], "must be 1 or more rows of 96 tokens"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(arguments, says, folder):
    before = sorted(path.name for path in folder.iterdir())
    found = here("data", *arguments)
    assert (found.code, found.out) == (2, "")
    message = found.err.splitlines()
    assert len([line for line in message if line.startswith("error: ")]) == 1, found
    assert says in message[-1]
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_model_that_embeds_nothing_is_refused(folder, tmp_path):
    settings = {
        "model": LLAMA,
        "data": {"train": str(tmp_path / "text"), "seq_length": 16},
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
        "optim": {"lr": 1e-3},
        "run": str(tmp_path / "gpt"),
    }
    write_dataset(tmp_path / "text")
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    assert here("train", tmp_path / "settings.yaml").code == 0
    found = here("data", "index", tmp_path / "gpt", "texts.jsonl", "--out", tmp_path / "x")
    assert found.code == 2
    assert "must be an embedding model, model.bert.head=embedding; it has model.gpt; give the run of one" in found.err
