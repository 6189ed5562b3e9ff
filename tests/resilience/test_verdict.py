"""verdict: which of several failed ranks is reported, and the exit code."""

import signal

import pytest

from megalith.resilience.rank_link import Failure
from megalith.resilience.verdict import Ended, judge

BROKEN = Failure("Traceback ...\nRuntimeError: Connection closed by peer", 1, foreseen=False, of_connection=True)
BUG = Failure("Traceback ...\nKeyError: 'x'", 1, foreseen=False)
OTHER = Failure("rank 1 failed with KeyError: 'x'", 1, foreseen=True, on_every_rank=True, second_hand=True)
DATA = Failure("text.bin is too short", 2, foreseen=True)
SHAPE = Failure("layers.2 is missing", 2, foreseen=True, on_every_rank=True)
NAN = Failure("loss nan at step 3", 1, foreseen=True, on_every_rank=True)
KILLED = -signal.SIGKILL
OUT_OF_MEMORY = "was killed by SIGKILL (9) (out of memory?)"


@pytest.mark.parametrize(
    ("ended", "code", "message", "goes_on"),
    [
        ([Ended(0, 0), Ended(1, 0)], 0, "", False),
        ([Ended(1, 75), Ended(0, 75)], 75, "", False),
        ([Ended(0, 1, BROKEN), Ended(1, KILLED)], 1, f"rank 1 {OUT_OF_MEMORY}", True),
        ([Ended(1, -signal.SIGSEGV)], 1, "rank 1 was killed by SIGSEGV (11)", True),
        ([Ended(1, -63)], 1, "rank 1 was killed by signal 63", True),
        (
            [Ended(0, KILLED), Ended(1, KILLED)],
            1,
            "rank 0 was killed by SIGKILL (9) (out of memory?); rank 1 was killed by SIGKILL",
            True,
        ),
        ([Ended(1, 1, BUG), Ended(0, 1, BROKEN)], 1, "rank 1 failed:\nTraceback ...\nKeyError: 'x'", True),
        ([Ended(0, 1, BROKEN), Ended(1, 1, BUG)], 1, "rank 1 failed:\nTraceback ...\nKeyError: 'x'", True),
        ([Ended(0, 1, OTHER), Ended(1, 1, BUG), Ended(2, 1, OTHER)], 1, "rank 1 failed:\nTraceback", True),
        ([Ended(0, 1, BROKEN), Ended(1, 2, DATA)], 2, "error: rank 1: text.bin is too short", False),
        ([Ended(1, 2, SHAPE), Ended(0, 2, SHAPE)], 2, "error: layers.2 is missing", False),
        ([Ended(0, 1, NAN), Ended(1, 1, NAN)], 1, "error: loss nan at step 3", False),
        ([Ended(1, 130), Ended(0, 1, BROKEN)], 130, "", True),
        ([Ended(1, 143)], 143, "", True),
        ([Ended(0, 255), Ended(1, 255)], 1, "the process that the ranks were forked from has died", True),
        ([Ended(0, 1, BROKEN), Ended(1, 200)], 1, "rank 0 failed:\nTraceback", True),
        ([Ended(0, 0), Ended(1, 200)], 200, "rank 1 ended with exit code 200", True),
        ([Ended(0, 0), Ended(1, 7)], 7, "rank 1 ended with exit code 7", True),
        ([Ended(0, 0), Ended(1, 75)], 75, "", False),
        ([Ended(0, 1, OTHER)], 1, "rank 0 ended with exit code 1", True),
    ],
)
def test_the_first_cause_is_told(ended, code, message, goes_on):
    found = judge(ended)
    assert (found.code, found.goes_on) == (code, goes_on)
    assert found.message.startswith(message), found
