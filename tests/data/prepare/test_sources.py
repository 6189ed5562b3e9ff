"""sources: which files are read, in which order, and what is refused before reading."""

import os
from pathlib import Path

import pytest

from megalith.data.prepare.sources import find_sources
from megalith.errors import DataError


@pytest.fixture
def tree(tmp_path):
    """A folder laid out like source code."""
    files = {
        "src/b.py": b"b = 1\n",
        "src/a/z.py": "naïve = 1\n".encode(),
        "src/a/empty.py": b"",
        "src/a/logo.png": b"\x89PNG\x0d",
        "src/a/utf16.txt": "text".encode("utf-16-le"),
        "src/a/cut.txt": "naï".encode()[:-1],
        "src/.git/config": b"hidden",
        "src/.hidden": b"hidden",
        "src/data.jsonl": b'{"is": "text here"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "src" / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "src" / "pipe")
    return tmp_path / "src"


def test_a_folder_gives_its_text_files_sorted_and_counts_the_binary_ones(tree):
    found = find_sources([tree])
    assert [source.name for source in found.files] == ["src/a/empty.py", "src/a/z.py", "src/b.py", "src/data.jsonl"]
    assert {source.format for source in found.files} == {"text"}
    assert (found.num_skipped, found.num_broken_links, found.num_special) == (3, 1, 1)
    assert found.num_lines_as_text == 1


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tree, tmp_path):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "note.txt").write_text("note")
    names = [source.name for source in find_sources([tree]).files]
    links = {"loop": tree, "above": tmp_path, "a2": tree / "a", "a/in": outside, "again": outside / "deep"}
    for name, target in {**links, "itself": "itself"}.items():
        (tree / name).symlink_to(target)
    found = find_sources([tree])
    assert len(found.files) == len({source.path.resolve() for source in found.files}) == len(names) + 1
    assert {source.name for source in found.files} > set(names)
    assert found.num_broken_links == 2  # broken, itself
    assert [source.name for source in find_sources([tree]).files] == [source.name for source in found.files]


def test_what_a_job_writes_is_left_out_through_a_link_too(tree, tmp_path):
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "x.txt").write_text("x")
    (tmp_path / "out.json").write_text("{}")
    names = [source.name for source in find_sources([tree]).files]
    (tree / "above").symlink_to(tmp_path)
    left_out = [tmp_path / "out.parts", tmp_path / "out.json"]
    assert [source.name for source in find_sources([tree], leave_out=left_out).files] == names


def test_a_subfolder_that_cannot_be_read_is_an_error(tree, monkeypatch):
    usual = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"src/a cannot be read: Permission denied; check its permissions"):
        find_sources([tree])


@pytest.mark.parametrize("name", ["link", "a"])
def test_what_cannot_be_examined_is_an_error(tree, tmp_path, monkeypatch, name):
    """As in a folder that may not be entered, to which a link leads or whose names can be read."""
    (tree / "link").symlink_to(tmp_path)
    usual = os.stat

    def stat(path, **how):
        if os.fspath(path).startswith(os.fspath(tree / name)):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return usual(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(DataError, match=rf"src/{name} cannot be read: Permission denied; check its permissions"):
        find_sources([tree])


def test_a_link_that_leads_nowhere_is_counted_whatever_the_reason(tree):
    for name, target in {"in a file": "b.py/x", "itself": "itself", "loop": "back", "back": "loop"}.items():
        (tree / name).symlink_to(target)
    found = find_sources([tree])
    assert (found.num_broken_links, found.num_special) == (5, 1)


def test_names_do_not_depend_on_where_the_folder_lies(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tree)
    names = [source.name for source in find_sources([tree]).files]
    assert [source.name for source in find_sources([Path()]).files] == names
    tree.rename(tmp_path / "elsewhere")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "elsewhere").rename(tmp_path / "deeper" / "src")
    assert [source.name for source in find_sources([tmp_path / "deeper" / "src"]).files] == names


def test_what_a_job_writes_into_its_own_input_is_left_out(tree):
    (tree / "out.parts").mkdir()
    (tree / "out.parts" / "x.txt").write_text("x")
    (tree / "out.json").write_text("{}")
    left_out = [tree / "out.parts", tree / "out.json"]
    assert find_sources([tree], leave_out=left_out).files == find_sources([tree], leave_out=left_out).files
    assert not any("out" in source.name for source in find_sources([tree], leave_out=left_out).files)


@pytest.mark.parametrize(
    ("name", "format", "is_compressed"),
    [
        ("a.txt", "text", False),
        ("a.txt.gz", "text", True),
        ("README", "text", False),
        ("v1.2", "text", False),
        ("a.jsonl", "jsonl", False),
        ("a.JSON", "jsonl", False),
        ("c4.00.json.gz", "jsonl", True),
        ("a.ndjson", "jsonl", False),
        ("a.parquet", "parquet", False),
    ],
)
def test_names_tell_the_format(name, format, is_compressed, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    (source,) = find_sources([tmp_path / name]).files
    assert (source.format, source.is_compressed, source.name, source.size) == (format, is_compressed, name, 1)


def test_records_count_the_files_of_each_input_and_set(tree, tmp_path):
    (tmp_path / "held.txt").write_text("held")
    found = find_sources([tree, tree / ".hidden"], [tmp_path / "held.txt"])
    assert [tuple(record.model_dump().values()) for record in found.records(held_out=False)] == [
        ("src", 4, 37),
        (".hidden", 1, 6),
    ]
    assert [tuple(record.model_dump().values()) for record in found.records(held_out=True)] == [("held.txt", 1, 4)]
    # a share of all of them is held out
    assert find_sources([tree]).records(held_out=True) == find_sources([tree]).records(held_out=False)


def test_a_name_that_is_not_utf8_is_a_name(tmp_path):
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    (odd / "x.txt").write_text("x")
    found = find_sources([odd])
    assert found.records(held_out=False)[0].name == "caf\ufffd"


def refusals(folder):
    """Inputs, and the expected messages."""
    for name in ("a.zst", "b.tar.gz", "c.parquet.gz", "locked.txt", "one.txt"):
        (folder / name).write_bytes(b"x")
    (folder / "shards").mkdir()
    (folder / "shards" / "0.jsonl").write_text("{}")
    (folder / "shards" / "1.parquet").write_text("")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "x.png").write_bytes(b"\x89")
    (folder / "nothing").mkdir()
    os.mkfifo(folder / "pipe")
    return {
        "gone.txt": r"gone\.txt cannot be read: No such file",
        "a.zst": r"packed as \.zst, which is not supported; unpack it, or compress it with gzip",
        "b.tar.gz": r"packed as \.tar",
        "c.parquet.gz": r"parquet file inside gzip; decompress it",
        "shards": r"give the files themselves: .*shards/\*\.",
        "pictures": r"pictures must contain UTF-8 text files; it has none \(binary files: 1; hidden files",
        "nothing": r"nothing must contain UTF-8 text files; it has none \(binary files: 0",
        "pipe": r"must be a regular file or a folder",
    }


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    for name, message in refusals(tmp_path).items():
        with pytest.raises(DataError, match=message):
            find_sources([tmp_path / "one.txt", tmp_path / name])


def test_a_file_given_twice_is_refused(tmp_path, tree):
    with pytest.raises(DataError, match=r"b\.py is given twice"):
        find_sources([tree, tree / "b.py"])
    with pytest.raises(DataError, match=r"b\.py is given twice"):
        find_sources([tree / "a" / ".." / "b.py"], [tree / "b.py"])


def test_a_file_that_several_inputs_lead_to_is_refused(tmp_path, tree):
    names = [source.name for source in find_sources([tree]).files]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("note")
    (tmp_path / "other" / "link").symlink_to(tree / "a")
    (tmp_path / "name.py").symlink_to(tree / "b.py")
    twice = r"{} and {} are the same file, which would count its text twice; give one of them, or remove the link to it"
    for inputs in ([tree, tmp_path / "other"], [tmp_path / "other", tree]):
        first, second = r"\S+/src/a/\w+\.py", r"\S+/other/link/\w+\.py"
        with pytest.raises(DataError, match=twice.format(*((first, second) if inputs[0] == tree else (second, first)))):
            find_sources(inputs)
    with pytest.raises(DataError, match=twice.format(r"\S+/src/b\.py", r"\S+/name\.py")):
        find_sources([tree, tmp_path / "name.py"])
    with pytest.raises(DataError, match=r"the same file, which would train on text that is held out; give one"):
        find_sources([tmp_path / "other"], held_out=[tree])
    (tree / "within").symlink_to(tree / "b.py")  # one input may name a file twice
    assert len(find_sources([tree, tmp_path / "other" / "note.txt"]).files) == len(names) + 2


def test_a_file_that_changes_meanwhile_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    (source,) = find_sources([path]).files
    with source.open() as file:
        assert file.read() == b"one"
    path.write_text("another")
    with pytest.raises(DataError, match=r"a\.txt changed while it was being read"):
        source.open()
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt can no longer be read"):
        source.open()
