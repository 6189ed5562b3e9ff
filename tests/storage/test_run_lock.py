"""One run per folder: the kernel holds the lock, and releases it however the process ends."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from megalith.errors import StorageError
from megalith.storage import RunLock, run_lock

HOLD = """
import sys, time
from pathlib import Path
from megalith.storage import RunLock
RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path/run, without a reference to it."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_by_name_of_the_first_until_kill_9_ends_that(tmp_path, holder):
    who = rf'is in use by another run: {{"pid": {holder.pid}, "host": "{re.escape(socket.gethostname())}"}}; wait'
    with pytest.raises(StorageError, match=who):
        RunLock(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path / "run"):
        pass


def test_a_refused_run_leaves_the_lock_as_it_is(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(StorageError, match=f'"pid": {holder.pid}'):
            RunLock(tmp_path / "run")


def test_a_lock_makes_the_folder_and_can_be_released(tmp_path):
    lock = RunLock(tmp_path / "runs" / "new")
    with pytest.raises(StorageError, match="is in use by another run"):
        RunLock(tmp_path / "runs" / "new")
    lock.release()
    lock.release()
    RunLock(tmp_path / "runs" / "new").release()


def test_a_file_system_without_locks_is_told_and_not_refused(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    RunLock(tmp_path).release()
    assert f"the file system of {tmp_path} has no locks: a second run there would not be detected" in caplog.text


def test_another_failure_of_the_lock_is_an_error_and_leaks_no_descriptor(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match=r"cannot lock .*\.lock: input/output error"):
        RunLock(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot lock .*File exists; move what is already there"):
        RunLock(tmp_path / "file")
