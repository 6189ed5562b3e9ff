"""Step schedules of the batch size, in samples and in tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.config import BatchSizeStage, parse_batch_size_schedule
from megalith.config.batch_size_schedule import mend_batch_size_schedule, with_batch_sizes
from megalith.errors import ConfigError


def pairs(text: str, seq_length: int | None = None) -> list[tuple[int, int]]:
    stages = parse_batch_size_schedule(text, seq_length=seq_length)
    return [(stage.first_sample, stage.global_batch_size) for stage in stages]


def test_thresholds_have_decimal_suffixes():
    assert pairs("0:16 10K:32 1.5M:64 2B:128 1T:256") == [
        (0, 16),
        (10_000, 32),
        (1_500_000, 64),
        (2 * 10**9, 128),
        (10**12, 256),
    ]


def test_thresholds_in_tokens_are_rounded_down_to_samples():
    # Megatron's own example, at 4,096 tokens per sample
    assert pairs("0:768 250B:1536", 4096) == [(0, 768), (61_035_156, 1536)]


@pytest.mark.parametrize(
    ("text", "seq_length", "message"),
    [
        ("", None, "must begin at threshold 0"),
        ("5:16", None, "must begin at threshold 0"),
        ("0:16 10:16 10:32", None, "must increase; got 10 and then 10"),
        ("0:16 10:16 5:32", None, "must increase"),
        ("0:16 10:32", 64, "must increase; got samples 0 and then 0"),
        ("0:0", None, "must be at least 1; got '0:0'"),
        ("0:16,10:32", None, "must look like 10K:32"),
        ("0:-1", None, "must look like"),
        ("0:1.5", None, "must look like"),
        ("0:16 1.0005K:32", None, "must be integers; got '1.0005K:32'"),
        ("0:16 1G:32", None, "must look like"),
        ("0:\u0661", None, "must look like"),  # a digit, but not an ASCII one
    ],
)
def test_schedules_that_cannot_be_read_are_refused(text, seq_length, message):
    with pytest.raises(ConfigError, match=message):
        parse_batch_size_schedule(text, seq_length=seq_length)


def test_batch_sizes_are_replaced_and_thresholds_kept_as_written():
    assert with_batch_sizes("0:16 1.5M:32", [8, 24]) == "0:8 1.5M:24"


@given(st.text("0123456789KMB:=,; ", max_size=20), st.sampled_from([None, 8]))
def test_a_mended_schedule_can_be_read(text, seq_length):
    mended = mend_batch_size_schedule(text, seq_length=seq_length)
    assert mended is None or parse_batch_size_schedule(mended, seq_length=seq_length)[0] == BatchSizeStage(
        0, int(mended.split()[0].partition(":")[2])
    )
