"""storage/new_folder: a folder appears with all of its files or not at all, and never over another one."""

import os
import signal

import pytest

from megalith.errors import StorageError
from megalith.storage import RunLock, new_folder


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
    with pytest.raises(StorageError, match="new exists, and nothing is overwritten"), new_folder(tmp_path / "new"):
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
        with pytest.raises(StorageError, match="already has a run in it"), new_folder(tmp_path / "new"):
            pytest.fail("another one makes it")
        assert (tmp_path / ".new.tmp").exists()
