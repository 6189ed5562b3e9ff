"""run_log: printed and logged lines are in the file, in order, with timestamps."""

import logging
import re

import pytest

from megalith.errors import StorageError
from megalith.observe.run_log import RunLog

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)")


def kept(path) -> list[str]:
    return [LINE.fullmatch(line).group(1) for line in path.read_text().splitlines()]


def test_lines_are_shown_and_kept_with_the_warnings_between_them(tmp_path):
    shown: list[str] = []
    path = tmp_path / "logs" / "run.log"
    with RunLog(path) as run_log:
        show = run_log.kept(shown.append)
        show("started")
        logging.getLogger("megalith.data").warning("%d files are empty", 2)
        show("step 1\ud800")  # not a character: an invalid file name may contain it
    logging.getLogger("megalith.data").warning("later")
    assert shown == ["started", "step 1\ud800"]
    assert kept(path) == ["started", "2 files are empty", "step 1\\ud800"]


def test_a_run_that_goes_on_adds_to_its_log(tmp_path):
    for line in ("first", "second"):
        with RunLog(tmp_path / "run.log") as run_log:
            run_log.kept(str)(line)
    assert kept(tmp_path / "run.log") == ["first", "second"]


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path):
    (tmp_path / "run.log").symlink_to("/dev/full")
    shown: list[str] = []
    with RunLog(tmp_path / "run.log") as run_log:
        run_log.kept(shown.append)("a line")
    assert shown == ["a line"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(StorageError, match=r"run\.log"):
        RunLog(tmp_path / "logs" / "run.log")
