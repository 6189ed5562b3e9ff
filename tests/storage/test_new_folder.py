"""storage/new_folder: a folder appears with all of its files or not at all, and never over another one."""

import importlib
import os
import signal

import pytest

from megalith.errors import StorageError
from megalith.storage import RunLock, new_folder

new_folder_module = importlib.import_module("megalith.storage.new_folder")  # in the package, this name is the function


def test_it_appears_at_the_end_with_everything_in_it(tmp_path):
    with new_folder(tmp_path / "deep" / "new") as made:
        (made / "inside").mkdir()
        (made / "inside" / "file").write_text("content")
        assert not (tmp_path / "deep" / "new").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "deep" / "new").rglob("*")] == ["inside", "file"]


def test_an_error_leaves_nothing(tmp_path):
    def interrupted():
        with new_folder(tmp_path / "new") as made:
            (made / "file").write_text("content")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [os.mkdir, lambda path: path.write_text("mine"), lambda path: path.symlink_to("none")])
def test_nothing_is_overwritten(make, tmp_path):
    make(tmp_path / "new")
    with (
        pytest.raises(StorageError, match="new already exists and will not be overwritten"),
        new_folder(tmp_path / "new"),
    ):
        pytest.fail("the folder is there")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    if (child := os.fork()) == 0:
        with new_folder(tmp_path / "new") as made:
            (made / "half").write_text("content")
            (made / "folder").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".new.tmp"]
    with new_folder(tmp_path / "new") as made:
        assert [path.name for path in made.iterdir()] == [".lock"]
    assert list((tmp_path / "new").iterdir()) == []


def test_of_two_processes_that_make_it_the_second_is_refused(tmp_path):
    with RunLock(tmp_path / ".new.tmp"):
        with pytest.raises(StorageError, match="is in use by another run"), new_folder(tmp_path / "new"):
            pytest.fail("another one makes it")
        assert (tmp_path / ".new.tmp").exists()


def test_what_is_not_left_by_a_killed_process_is_not_emptied(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (tmp_path / ".link.tmp").symlink_to("precious")
    (tmp_path / "precious").joinpath(".lock").write_text("")
    (tmp_path / ".folder.tmp").mkdir()
    (tmp_path / ".folder.tmp" / "file").write_text("mine")
    for name in ("link", "folder"):
        with (
            pytest.raises(StorageError, match="was not left by a killed run; move it away"),
            new_folder(tmp_path / name),
        ):
            pytest.fail("something else is there")
        assert (tmp_path / f".{name}.tmp" / "file").read_text() == "mine"


def test_a_folder_that_was_published_is_no_leftover_to_the_next(tmp_path, monkeypatch):
    publish = new_folder_module.publish_folder

    def and_another_comes(temporary, path):
        with pytest.raises(StorageError), new_folder(path):
            pytest.fail("it is being made")
        publish(temporary, path)

    monkeypatch.setattr(new_folder_module, "publish_folder", and_another_comes)
    with new_folder(tmp_path / "new") as made:
        (made / "file").write_text("content")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
