"""A file has its old or its new content, complete, whatever fails."""

import errno
import json
import os

import pytest

from megalith.errors import StorageError
from megalith.storage import atomic
from megalith.storage.atomic import publish_file, publish_folder, write_json_atomic, write_text_atomic


@pytest.fixture
def calls(monkeypatch):
    """Records what is fsynced and renamed, in order: ("fsync" | "rename", name)."""
    seen = []
    replace, rename, fsync = os.replace, os.rename, os.fsync

    def noted(move):
        return lambda source, target: seen.append(("rename", os.path.basename(target))) or move(source, target)

    def fsync_noted(descriptor):
        seen.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", noted(replace))
    monkeypatch.setattr(os, "rename", noted(rename))
    monkeypatch.setattr(os, "fsync", fsync_noted)
    return seen


def test_content_is_on_disk_before_its_name_and_its_name_before_the_end(tmp_path, calls):
    write_json_atomic(tmp_path / "state.json", {"step": 3})
    (first, temporary), *rest = calls
    assert first == "fsync"
    assert temporary.startswith(".state.json.")
    assert rest == [("rename", "state.json"), ("fsync", tmp_path.name)]
    assert json.loads((tmp_path / "state.json").read_text()) == {"step": 3}


def test_a_folder_is_on_disk_before_its_name_and_its_name_before_the_end(tmp_path, calls):
    (tmp_path / "new").mkdir()
    publish_folder(tmp_path / "new", tmp_path / "step")
    assert calls == [("fsync", "new"), ("rename", "step"), ("fsync", tmp_path.name)]


def test_a_published_file_has_the_usual_rights(tmp_path):
    write_text_atomic(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_while_writing_leaves_the_old_content_and_no_litter(tmp_path):
    (tmp_path / "file").write_text("old")

    def write_half() -> None:
        with publish_file(tmp_path / "file") as temporary:
            temporary.write_text("ne")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failing_file_system_leaves_the_old_content_and_no_litter(tmp_path, monkeypatch, function):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(atomic.os, function, fail)
    with pytest.raises(StorageError, match=r"cannot write .*/file: Input/output error; check the disk"):
        write_text_atomic(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_two_writers_of_one_path_do_not_mix_their_content(tmp_path):
    with publish_file(tmp_path / "file") as first, publish_file(tmp_path / "file") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "file").read_text() == "first"


def test_a_folder_that_is_there_is_not_replaced(tmp_path):
    for name in ("step", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    with pytest.raises(StorageError, match=r"cannot write .*/step: Directory not empty"):
        publish_folder(tmp_path / "new", tmp_path / "step")
    assert (tmp_path / "step" / "content").read_text() == "step"
    assert (tmp_path / "new" / "content").read_text() == "new"
