"""Worker: functions run in order beside the caller, and their errors are raised where they are waited for."""

import threading

import pytest

from megalith.storage.worker import Worker


def test_functions_run_in_order_in_another_thread_and_are_waited_for():
    found: list[int] = []
    threads: set[threading.Thread] = set()

    def note(number: int) -> None:
        threads.add(threading.current_thread())
        found.append(number)

    with Worker() as worker:
        for number in range(100):
            worker.submit(lambda number=number: note(number))
        worker.wait()
        assert found == [*range(100)]
        assert worker.is_idle()
        worker.submit(lambda: note(100))
    assert found[-1] == 100  # by the end of the block
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_it_is_idle_once_nothing_is_left_to_do():
    go = threading.Event()
    with Worker() as worker:
        assert worker.is_idle()
        worker.submit(lambda: go.wait(60))
        assert not worker.is_idle()
        go.set()
        worker.wait()
        assert worker.is_idle()


def fail() -> None:
    raise OSError("the disk is gone")


def test_an_error_is_raised_by_whoever_waits():
    with Worker() as worker:
        worker.submit(fail)
        with pytest.raises(OSError, match="the disk is gone"):
            worker.wait()
        worker.submit(lambda: None)
        worker.wait()
    with pytest.raises(OSError, match="the disk is gone"), Worker() as worker:
        worker.submit(fail)


def fail_in_the_block() -> None:
    with Worker() as worker:
        worker.submit(fail)
        raise KeyError


def test_an_error_of_the_block_is_not_replaced():
    with pytest.raises(KeyError):
        fail_in_the_block()


def test_without_work_there_is_no_thread():
    before = threading.active_count()
    with Worker() as worker:
        worker.wait()
        assert threading.active_count() == before


def refuse_to_start(self: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does


def test_without_a_thread_functions_run_in_the_caller(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    found: list[threading.Thread] = []
    with Worker() as worker:
        worker.submit(lambda: found.append(threading.current_thread()))
        assert worker.is_idle()
        worker.submit(fail)
        with pytest.raises(OSError, match="the disk is gone"):
            worker.wait()
    assert found == [threading.current_thread()]
    with pytest.raises(KeyError):
        fail_in_the_block()
