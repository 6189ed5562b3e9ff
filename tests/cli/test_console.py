"""The console: slow work is announced once, fast work is not, and lines that nobody reads are dropped."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from megalith.__main__ import main as megalith_main
from megalith.cli import console
from megalith.cli.console import Announcer, Console, ConsoleHandler, say_over


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


def test_what_has_begun_is_announced_where_its_lines_go(monkeypatch):
    monkeypatch.setattr(console, "_ANNOUNCED_AFTER", 0.0)
    shown = threading.Event()
    with Announcer(lambda line: shown.set() if line == "building ..." else None) as announcer:
        announcer.begin("building")
        assert shown.wait(20)


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
import logging
from megalith.cli.console import Console, ConsoleHandler, say
console = Console()
console.show("first")
console.show_progress("second")
say("third")
logging.basicConfig(level=logging.INFO, handlers=[ConsoleHandler(console)])
logging.info("fourth")
"""


@pytest.mark.parametrize("error_too", [False, True])
def test_a_pipe_whose_reader_has_ended_is_no_error(error_too):
    reader, writer = os.pipe()
    os.close(reader)
    error = writer if error_too else subprocess.PIPE
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=writer, stderr=error, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, None if error_too else "third\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(console.shutil, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    return Terminal()


def test_what_is_logged_ends_the_progress_line(narrow):
    shown = Console(narrow)
    shown.show_progress("step 1")
    logger = logging.Logger("test")
    logger.addHandler(ConsoleHandler(shown))
    logger.warning("saved %d", 1)
    assert narrow.getvalue() == "\rstep 1" + 13 * " " + "\nsaved 1\n"


def test_a_message_covers_the_progress_line_of_another_process(narrow, monkeypatch):
    monkeypatch.setattr(sys, "stderr", narrow)
    say_over("SIGINT: saving\nmore")
    assert narrow.getvalue() == "\rSIGINT: saving     \nmore\n"


def megalith(redirected: str) -> "subprocess.CompletedProcess[str]":
    """Runs ``megalith`` as part of a shell command line."""
    return subprocess.run(f"{sys.executable} -m megalith {redirected}", shell=True, capture_output=True, text=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_result_that_cannot_be_written_is_one_message():
    found = megalith("recipes list > /dev/full")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert found.stderr.startswith("error: cannot write to standard output: No space left on device; ")


def test_a_closed_standard_output_is_no_error():
    found = megalith("train --dry-run >&-")  # an error, reported on the other stream
    assert (found.returncode, found.stderr.splitlines()[0][:16]) == (2, "error: give a re")
    assert megalith("recipes list >&-").returncode == 0


def test_ctrl_c_while_commands_are_imported_ends_without_a_traceback(monkeypatch):
    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "megalith.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "megalith.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        megalith_main()
    assert end.value.code == 130
