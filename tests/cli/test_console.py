"""The console: what takes long is announced once, what is fast is not, and lines that nobody reads are dropped."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from megalith.cli import console
from megalith.cli.console import Announcer


def test_what_has_begun_is_announced_until_it_ends(monkeypatch, capsys):
    monkeypatch.setattr(console, "_ANNOUNCED_AFTER", 0.0)
    with Announcer() as announcer:
        announcer.begin("loading")
        shown, deadline = "", time.monotonic() + 20
        while not shown:
            assert time.monotonic() < deadline
            shown = capsys.readouterr().err
            time.sleep(0.001)
    assert shown == "loading ...\n"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fails", [False, True])
def test_what_ends_before_is_not_announced(fails, monkeypatch, capsys):
    timers = []
    monkeypatch.setattr(console.threading.Timer, "start", lambda timer: timers.append(timer))
    with contextlib.suppress(ValueError), Announcer() as announcer:
        announcer.begin("loading")
        announcer.begin("computing")
        if fails:
            raise ValueError
    assert [timer.finished.is_set() for timer in timers] == [True, True]  # cancelled


PROGRAM = """
from megalith.cli.console import Console, say
console = Console()
console.show("first")
console.show_progress("second")
say("third")
"""


def test_a_pipe_whose_reader_has_ended_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 0
