"""benchmarks/workers: a child process that fails, dies or hangs gives its parent one clear line."""

import os
import sys
from contextlib import closing

import pytest

from benchmarks import workers
from benchmarks.workers import Worker, WorkerError

CHILD = """
import os, sys, time
from benchmarks.workers import serve

def chatter():
    print("a library that prints")
    os.system("echo so does its child")
    return {"value": 7}

def fail():
    raise ValueError("first line\\nsecond line")

def die():
    print("out of luck", file=sys.stderr)
    os._exit(3)

serve({"chatter": chatter, "fail": fail, "die": die, "hang": lambda: time.sleep(60)})
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(workers, "COMMAND", [sys.executable, str(tmp_path / "child.py")])
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with closing(Worker([], environment, tmp_path / "log")) as started:
        yield started


def test_answers_come_back_whatever_else_is_printed(worker):
    for _ in range(2):
        answer = worker.ask("chatter", timeout=30)
        assert answer["value"] == 7
        assert 1 << 20 < answer["peak_rss"] < 1 << 40


def test_an_exception_is_a_reason_and_the_worker_lives_on(worker):
    with pytest.raises(WorkerError, match=r"^ValueError: first line$"):
        worker.ask("fail", timeout=30)
    assert worker.ask("chatter", timeout=30)["value"] == 7


def test_a_death_is_told_with_its_code_and_last_words(worker):
    with pytest.raises(WorkerError, match="ended with code 3: out of luck"):
        worker.ask("die", timeout=30)


def test_silence_ends_after_the_timeout(worker):
    worker.ask("chatter", timeout=30)
    with pytest.raises(WorkerError, match=r"no answer to 'hang' within 0\.2 s"):
        worker.ask("hang", timeout=0.2)
