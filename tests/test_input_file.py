"""input_file: the kind of file is known before it is opened."""

import os

import pytest

from megalith.input_file import read_regular_file, regular_file_size


def test_a_regular_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert regular_file_size(tmp_path / "link") == 5
    assert read_regular_file(str(path), 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes; the limit is 4"):
        read_regular_file(path, 4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, FileNotFoundError, "No such file"),
        (lambda path: path.mkdir(), IsADirectoryError, "Is a directory"),
        (os.mkfifo, OSError, "it is a FIFO, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), OSError, "it is a device, not a regular file"),
        (lambda path: path.symlink_to(path.name), OSError, "symbolic links"),
    ],
)
def test_anything_else_is_an_error_of_the_system_and_is_never_opened(make, error, message, tmp_path):
    make(tmp_path / "file")
    for read in (regular_file_size, lambda path: read_regular_file(path, 10)):
        with pytest.raises(error, match=message):
            read(tmp_path / "file")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_name_that_no_file_can_have_is_one_too(name):
    with pytest.raises(OSError, match="not a valid file name"):
        regular_file_size(name)
