"""docs/retrieval.md: its last block finds what the command finds; test_commands runs its commands."""

import json

from tests.docs.pages import python_blocks
from tests.program import here, write_settings
from tests.tiny_masked import write_sentences
from tests.tiny_pairs import embedding_settings


def test_the_block_finds_what_the_command_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sentences(tmp_path / "data")
    tree = embedding_settings(tmp_path / "data", train={"steps": 1}) | {"run": "runs/embedding"}
    assert here("train", write_settings(tree, tmp_path)).code == 0
    texts = [f"the {color} house has {number} rooms" for color in ("red", "green") for number in range(4)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert here("data", "index", "runs/embedding", "texts.jsonl", "--out", "indexes/my_texts").code == 0
    found = {}
    exec(compile(python_blocks("retrieval.md")[-1], "docs/retrieval.md", "exec"), found)
    arguments = ["--query", "ships that have a name", "--query", "an old house", "--k", 5, "--json"]
    lines = here("data", "search", "indexes/my_texts", *arguments).out.splitlines()
    passages = [json.loads(line)["passages"] for line in lines]
    assert found["ids"].tolist() == [[passage["id"] for passage in each] for each in passages]
    assert [passage.text for passage in found["passages"]] == [passage["text"] for passage in passages[0]]
    assert [passage["text"] for passage in passages[0]] == [texts[passage["id"]] for passage in passages[0]]
