"""A path, a URL or a store: each opens, and its contents are named in the same form."""

from pathlib import Path

import pytest

from megalith.errors import ConfigError, StorageError
from megalith.storage import LocalStore, child, open_store, sibling
from tests.storage.memory_store import MemoryStore, OwnBytes


def test_paths_and_file_urls_are_local_and_stores_are_themselves(tmp_path):
    store = MemoryStore(OwnBytes())
    assert open_store(tmp_path) == open_store(str(tmp_path)) == open_store(f"file://{tmp_path}") == LocalStore(tmp_path)
    assert open_store(store) is store


def test_a_url_without_a_store_is_refused_with_those_that_have_one():
    with pytest.raises(
        ConfigError, match=r"gopher://a/b must be a path, or a URL with a supported scheme \(file\); got gopher"
    ):
        open_store("gopher://a/b")


def test_what_lies_inside_and_beside_is_of_the_same_kind():
    store = MemoryStore(OwnBytes())
    assert (child("a/b/", "c"), sibling("a/b/", "c"), sibling("b", "c")) == ("a/b/c", "a/c", "c")
    assert (child("file:///a", "c"), sibling("file:///a/b", "c")) == ("file:///a/c", "file:///a/c")
    assert (child(Path("a/b"), "c"), sibling(Path("a/b"), "c")) == (Path("a/b/c"), Path("a/c"))
    assert (child(store / "b", "c"), sibling(store / "b", "c")) == (store / "b" / "c", store / "c")


def test_the_folder_around_a_path_is_found_from_inside_it(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for path in (".", "../b", "../../a/b/../../a/b/."):
        around, name = LocalStore(Path(path)).split()
        assert (around.path.resolve(), name) == (tmp_path / "a", "b")
    around, name = LocalStore(Path("..")).split()
    assert (around.path.resolve(), name) == (tmp_path, "a")
    assert LocalStore(Path("c")).split()[0].split() == (LocalStore(tmp_path / "a"), "b")


def test_a_file_that_ends_too_soon_is_an_error_and_not_a_short_answer(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    store = LocalStore(tmp_path)
    assert store.read("x", 1, 3) == b"bc"
    with pytest.raises(StorageError, match="x: it ends before byte 4"):
        store.read("x", 1, 4)
