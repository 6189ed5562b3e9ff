"""The probe for the fastest dtype: how it decides, and that it measures."""

from math import inf

import pytest
import torch

from megalith.config import TransformerConfig
from megalith.insight.probe import DtypeProbe, fastest, probe_dtype


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({"float32": 1.0, "bfloat16": 0.5}, "bfloat16"),
        ({"float32": 0.5, "bfloat16": 1.0}, "float32"),
        ({"float32": 1.0, "bfloat16": 0.96}, "float32"),  # too small a gain for the lost precision
        ({"float32": 4.0, "bfloat16": 3.0, "float16": 1.0}, "float16"),
    ],
)
def test_the_fastest_is_taken_unless_float32_is_nearly_as_fast(seconds, taken):
    assert fastest(seconds) == taken


def test_the_line_says_which_why_and_by_how_much():
    assert DtypeProbe("bfloat16", {"float32": 0.097, "bfloat16": 0.041}).line == (
        "dtype bfloat16, the fastest on this machine: a micro-batch takes 41 ms, compared with 97 ms in float32 "
        "(2.37x as long)"
    )
    assert DtypeProbe("float32", {"float32": 1.0, "bfloat16": 0.97}).line == (
        "dtype float32, no other is more than 5% faster on this machine: a micro-batch takes 1.0 s, compared with "
        "970 ms in bfloat16 (0.97x as long)"
    )


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_probe_measures_the_model_at_hand(activation):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, activation=activation
    )
    threads = torch.get_num_threads()
    probe = probe_dtype(config, vocab_size=64, seq_length=16, micro_batch_size=2, num_threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert list(probe.seconds) == ["float32", "bfloat16"]
    assert all(0 < seconds < inf for seconds in probe.seconds.values())
    assert probe.dtype == fastest(probe.seconds)


def test_layers_count_as_often_as_the_model_has_them(monkeypatch):
    monkeypatch.setattr("megalith.insight.probe._interleaved", lambda steps, device: dict.fromkeys(steps, 1.0))
    config = TransformerConfig(num_layers=6, hidden_size=32, num_attention_heads=4)
    assert probe_dtype(config, 64, 16, 2).seconds == {"float32": 7.0, "bfloat16": 7.0}
