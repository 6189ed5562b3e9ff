"""metrics.jsonl: what was written is read back, at whatever instant a run dies."""

import json
import math
import os
from pathlib import Path

import pytest

from megalith.errors import DataError, StorageError
from megalith.observe.metrics import MetricsWriter, read_metrics


def write(folder, *records, resumed_step=0):
    with MetricsWriter(folder, resumed_step=resumed_step) as metrics:
        for record in records:
            metrics.write(record)


def steps(folder):
    return [record["step"] for record in read_metrics(folder)]


def test_records_come_back_as_written_and_a_negative_loss_is_one_of_them(tmp_path):
    records = [
        {"step": 1, "loss": -0.25, "mfu": None, "layout": "tp2 dp1", "time": {"data": 0.5, "optimizer/clip": 1e-9}},
        {"step": 1, "valid_loss": 2.5},
    ]
    write(tmp_path / "run", *records)
    assert read_metrics(tmp_path / "run") == records
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records


def test_a_record_is_on_file_before_the_next_is_written(tmp_path):
    metrics = MetricsWriter(tmp_path, resumed_step=0)
    metrics.write({"step": 1, "loss": 2.0})
    assert steps(tmp_path) == [1]  # as another process would see it
    metrics.close()


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    write(tmp_path, {"step": 3, "loss": math.nan, "grad_norm": math.inf, "time": {"a/b": -math.inf, "c": 1.0}})

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "time": {"a/b": None, "c": 1.0, "nonfinite": {"a/b": "-inf"}},
        "nonfinite": {"loss": "nan", "grad_norm": "inf"},
    }
    (record,) = read_metrics(tmp_path)
    assert str(record) == "{'step': 3, 'loss': nan, 'grad_norm': inf, 'time': {'a/b': -inf, 'c': 1.0}}"


def test_a_nan_where_it_cannot_be_named_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path, {"step": 1, "losses": [math.nan]})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_resuming_drops_the_steps_that_will_be_done_again(tmp_path):
    write(tmp_path, *({"step": step, "loss": 1.0} for step in (1, 2, 3, 4)), {"step": 2, "valid_loss": 1.0})
    write(tmp_path, {"step": 3, "loss": 9.0}, resumed_step=2)
    assert read_metrics(tmp_path)[2:] == [{"step": 2, "valid_loss": 1.0}, {"step": 3, "loss": 9.0}]
    assert steps(tmp_path) == [1, 2, 2, 3]


def test_a_last_line_torn_at_any_byte_is_healed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole, last = b'{"step": 1, "loss": 2.5}\n', b'{"step": 2, "loss": 2.25}'
    for length in range(len(last) + 1):
        path.write_bytes(whole + last[:length])
        survivors = [1, 2] if length == len(last) else [1]  # a whole record, except for its line feed
        assert steps(tmp_path) == survivors
        write(tmp_path, {"step": 3}, resumed_step=2)
        assert steps(tmp_path) == [*survivors, 3]
        assert path.read_bytes().endswith(b'}\n{"step": 3}\n')


def test_a_damaged_line_before_the_last_is_refused_by_number(tmp_path):
    fields = (
        b'"nonfinite": 3', b'"nonfinite": {"loss": "abc"}', b'"nonfinite": {"loss": []}', b'"time": {"nonfinite": 3}',
        b'"valid_loss": "abc"', b'"valid_loss": true', b'"valid_loss": [1.0]',
        b'"valid_sets": 3', b'"valid_sets": {"web": 3}', b'"valid_sets": {"web": {"loss": "abc"}}',
        b'"loss": ' + b"9" * 400, b'"time": {"data": -' + b"9" * 400 + b"}",
    )  # fmt: skip
    not_records = (b"\xff\x00", b"[1]", b'{"loss": 1}', b'{"step": 1', b'{"step": true}', b"", b"[" * 100_000)
    for damaged in (*not_records, *(b'{"step": 2, ' + field + b"}" for field in fields)):
        content = b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n'
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"metrics\.jsonl must be .*; line 2 is .*; remove that line"):
            read_metrics(tmp_path)
        with pytest.raises(DataError, match="line 2"):
            MetricsWriter(tmp_path, resumed_step=9)
        assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.observe.metrics._LONGEST_LINE", 64)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bytes(64))
    with pytest.raises(DataError, match="line 2 is"):
        read_metrics(tmp_path)


def test_a_rewrite_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, {"step": 1}, {"step": 2})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: No space left"):
        MetricsWriter(tmp_path, resumed_step=1)
    assert steps(tmp_path) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_a_storage_error(tmp_path):
    metrics = MetricsWriter(tmp_path, resumed_step=0)
    metrics.close()
    refused = pytest.raises(StorageError, match=r"metrics\.jsonl: No space left")
    with Path("/dev/full").open("ab", buffering=0) as metrics._file, refused:
        metrics.write({"step": 1})


def test_a_folder_without_metrics_says_what_was_wanted(tmp_path):
    with pytest.raises(DataError, match=r"has no metrics\.jsonl, so it is not the folder of a run; give the folder"):
        read_metrics(tmp_path)
