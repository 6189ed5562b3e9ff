"""Files of texts become an index, and queries find their passages: the same as comparing every text with the query."""

import gzip
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from megalith.config import as_tree, load_run
from megalith.errors import CheckpointError, ConfigError, DataError, StorageError
from megalith.training.tasks import passage_search
from megalith.training.tasks.passage_search import index_passages, read_queries, search_passages
from megalith.training.tasks.text_embeddings import EmbeddingSource, TextEmbedder
from tests.program import here, write_settings
from tests.tiny_masked import write_sentences
from tests.tiny_pairs import embedding_settings

LINES = ["the red house", "a river", "  ", "one two " * 40, "the tree sees the river", "a river"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps in ``run``, and files of passages beside it."""
    folder = tmp_path_factory.mktemp("trained")
    write_sentences(folder / "data")
    tree = embedding_settings(folder / "data", train={"steps": 3}) | {"run": str(folder / "run")}
    ended = here("train", write_settings(tree, folder))
    assert ended.code == 0, ended
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": line, "id": 7}) + "\n" for line in LINES))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "green trees\nfind the house"}) + "\n")
    (folder / "c.txt").write_text("two red trees and the river")
    return folder


def made(trained, out, **options):
    files = [trained / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]
    return index_passages(trained / "run", files, out, key="body", **options)


TEXTS = [line for line in LINES if line.strip()] + ["green trees\nfind the house", "two red trees and the river"]
PLACES = [
    ("a.jsonl", 0),
    ("a.jsonl", 1),
    ("a.jsonl", 3),
    ("a.jsonl", 4),
    ("a.jsonl", 5),
    ("b.jsonl.gz", 0),
    ("c.txt", 0),
]


@pytest.mark.parametrize("at_once", [1, 2, 2048])
def test_every_document_is_a_passage_with_the_embedding_of_its_text(at_once, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(passage_search, "_TEXTS_AT_ONCE", at_once)
    found = made(trained, tmp_path / "index", dtype="float32")
    assert (found.num_cut, found.num_empty, found.longest) == (1, 1, 32)
    passages = found.index.passages(range(found.index.num_passages))
    assert [passage.text for passage in passages] == TEXTS
    assert [(passage.source, passage.document) for passage in passages] == PLACES
    embedder = TextEmbedder.load(trained / "run")
    want = torch.cat([embedder.embed([text]) for text in TEXTS])
    [(_, stored)] = found.index.blocks(99, torch.float32)
    assert (stored - want).abs().max() < 1e-5  # float32


def test_a_query_finds_what_comparing_it_with_every_text_finds(trained, tmp_path):
    made(trained, tmp_path / "index", dtype="float32")
    queries = ["a river", "red trees", "two"]
    found = search_passages(tmp_path / "index", queries, 4)
    embedder = TextEmbedder.load(trained / "run")
    scores = (embedder.embed(queries) @ embedder.embed(TEXTS).t()).numpy()
    for hits, row in zip(found, scores, strict=True):
        assert [hit.id for hit in hits] == np.argsort(-row.round(5), kind="stable")[:4].tolist()
        np.testing.assert_allclose([hit.score for hit in hits], [row[hit.id] for hit in hits], atol=1e-5)
        assert [hit.passage.text for hit in hits] == [TEXTS[hit.id] for hit in hits]
    assert [hit.id for hit in found[0][:2]] == [1, 4]  # the text itself, twice


def test_half_precision_finds_the_same_within_its_rounding(trained, tmp_path):
    made(trained, tmp_path / "wide", dtype="float32")
    assert made(trained, tmp_path / "half").index.dtype == "float16"
    [wide], [half] = (search_passages(tmp_path / name, ["a river"], 7) for name in ("wide", "half"))
    by_id = {hit.id: hit.score for hit in wide}
    assert all(abs(hit.score - by_id[hit.id]) < 2**-11 for hit in half)  # of a cosine


def test_the_run_may_train_on_or_move_but_not_change(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    index_passages(run, [trained / "c.txt"], tmp_path / "index")
    want = search_passages(tmp_path / "index", ["a"], 1)
    run.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"was made by the model in .*run/checkpoints/step-00000003.*--model"):
        search_passages(tmp_path / "index", ["a"], 1)
    assert search_passages(tmp_path / "index", ["a"], 1, model=tmp_path / "moved") == want
    settings = tmp_path / "moved" / "config.yaml"
    settings.write_text(settings.read_text().replace("seq_length: 32", "seq_length: 31"))
    with pytest.raises(ConfigError, match=r"not the model that made .*they differ in seq_length; give a copy"):
        search_passages(tmp_path / "index", ["a"], 1, model=tmp_path / "moved")


@pytest.mark.parametrize(
    ("name", "value", "differs"),
    [
        ("layernorm_epsilon", 0.5, True),
        ("num_attention_heads", 1, True),
        ("hidden_dropout", 0.25, False),
        ("attention_dropout", 0.25, False),
        ("init_method_std", 0.5, False),
        ("similarity_temperature", 0.5, False),
    ],
)
def test_settings_that_change_embeddings_make_another_model_of_the_same_weights(name, value, differs, trained):
    config = EmbeddingSource.open(trained / "run").config
    tree = as_tree(config)
    group = tree["model"]["bert"] if name == "similarity_temperature" else tree["model"]
    assert group[name] != value
    group[name] = value
    if name == "num_attention_heads":
        tree["model"]["num_query_groups"] = value
        tree["model"]["kv_channels"] = tree["model"]["hidden_size"]
    source = EmbeddingSource.open(trained / "run")
    want, found = source.identity(), replace(source, config=load_run(tree)).identity()
    assert {key for key in want if want[key] != found[key]} == ({"model_settings_sha256"} if differs else set())


def test_another_run_is_not_the_model_of_the_index(trained, tmp_path):
    index_passages(trained / "run", [trained / "c.txt"], tmp_path / "index")
    tree = embedding_settings(trained / "data", train={"steps": 1, "seed": 5}) | {"run": str(tmp_path / "other")}
    assert here("train", write_settings(tree, tmp_path)).code == 0
    with pytest.raises(
        ConfigError, match=r"differ in checkpoint_sha256; .*make the index again with: megalith data index"
    ):
        search_passages(tmp_path / "index", ["a"], 1, model=tmp_path / "other")


def test_damage_is_found_before_the_search(trained, tmp_path):
    made(trained, tmp_path / "index")
    path = tmp_path / "index" / "embeddings-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="its content is not what was written"):
        search_passages(tmp_path / "index", ["a"], 1)
    with pytest.raises(DataError, match="must be an index of passages"):
        search_passages(trained / "run", ["a"], 1)


def test_a_document_is_kept_up_to_a_limit(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(passage_search, "_LONGEST_TEXT", 100_000)
    (tmp_path / "long.txt").write_text("the tree\n" * 20_000)
    (tmp_path / "next.txt").write_text("a river")
    found = index_passages(trained / "run", [tmp_path / "long.txt", tmp_path / "next.txt"], tmp_path / "index")
    long, other = found.index.passages([0, 1])
    assert 0 < len(long.text) <= 100_000
    assert (long.text in "the tree\n" * 20_000, other.text, found.num_cut) == (True, "a river", 1)


def test_progress_counts_passages_and_bytes(trained, tmp_path):
    seen: list[tuple[int, int, int]] = []
    made(trained, tmp_path / "index", batch_size=1, progress=lambda *at: seen.append(at))
    total = sum((trained / name).stat().st_size for name in ("a.jsonl", "b.jsonl.gz", "c.txt"))
    assert (seen[0], seen[-1]) == ((0, 0, total), (7, total, total))
    assert seen == sorted(seen)


def test_mistakes_leave_nothing(trained, tmp_path):
    with pytest.raises(ConfigError, match="float16 or float32; got 'int8'"):
        made(trained, tmp_path / "index", dtype="int8")
    with pytest.raises(DataError, match="at least one file"):
        index_passages(trained / "run", [], tmp_path / "index")
    with pytest.raises(DataError, match=r"a.jsonl, line 1, must have its text under 'text'.*set --key"):
        index_passages(trained / "run", [trained / "a.jsonl"], tmp_path / "index")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="the files have no text"):
        index_passages(trained / "run", [tmp_path / "empty.txt"], tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt"]
    made(trained, tmp_path / "index")
    with pytest.raises(StorageError, match="already exists"):
        made(trained, tmp_path / "index")
    for query in ("", " \n"):
        with pytest.raises(ConfigError, match="must not be empty"):
            search_passages(tmp_path / "index", [query], 1)
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        search_passages(tmp_path / "index", ["a\udcff"], 1)
    with pytest.raises(ConfigError, match="must be 1 or more; got 0"):
        search_passages(tmp_path / "index", ["a"], 0)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"query": "a"}', '{"text": "b"}'], r"line 2, must have a query.*the keys 'text'"),
        (['{"query": " "}'], r"line 1, must have a query, as text under 'query'; got ' '"),
        (['{"query": 3}'], r"line 1, must have a query.*got 3"),
        (['{"query": "a"}', r'{"query": "b\ud800"}'], r"line 2, must be text; character 1 of the query is an unpaired"),
        (["oops"], r"line 1, must be one JSON object"),
        ([], r"at least one query"),
    ],
)
def test_a_record_without_a_query_is_an_error(lines, says, tmp_path):
    (tmp_path / "q.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(DataError, match=says):
        read_queries(tmp_path / "q.jsonl")


def test_a_folder_is_no_file_of_queries(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("where")
    with pytest.raises(DataError, match=r"a\.txt must be \.jsonl or \.parquet"):
        read_queries(tmp_path)


def test_queries_are_read_from_pairs(tmp_path):
    with gzip.open(tmp_path / "q.jsonl.gz", "wt") as file:
        file.write('{"query": "where", "pos": ["here"]}\n\n{"query": "why"}\n')
    assert read_queries(tmp_path / "q.jsonl.gz") == ["where", "why"]
