"""Operating-system errors are reported with what was tried and what to do."""

from pathlib import Path

import pytest

from megalith.errors import StorageError
from megalith.storage import explained


def test_a_full_disk_is_named_with_the_way_out():
    full = Path("/dev/full")  # Linux: every write to it fails for lack of space
    with (
        pytest.raises(StorageError, match=r"cannot write /dev/full: No space left on device; free up space there, or"),
        explained("write", full),
    ):
        full.write_text("x")


def test_a_file_in_the_place_of_a_folder_is_named_with_the_way_out(tmp_path):
    (tmp_path / "runs").write_text("")
    with (
        pytest.raises(StorageError, match=r"Not a directory; expected a folder but found a file"),
        explained("write", tmp_path / "runs" / "a"),
    ):
        (tmp_path / "runs" / "a").mkdir()


@pytest.mark.parametrize("reason", ["File exists", "Directory not empty"])
def test_what_is_in_the_way_is_not_called_a_file(tmp_path, reason):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "new").mkdir()
    with (
        pytest.raises(StorageError, match=f"{reason}; move what is already there, or choose another folder"),
        explained("write", tmp_path / "a"),
    ):
        (tmp_path / "a").mkdir() if reason == "File exists" else (tmp_path / "new").rename(tmp_path / "a")


def test_an_explained_error_is_not_explained_again():
    with pytest.raises(StorageError, match=r"^ours$"), explained("write", Path("x")):
        raise StorageError("ours")


def test_other_errors_pass():
    with pytest.raises(KeyError), explained("write", Path("x")):
        raise KeyError
