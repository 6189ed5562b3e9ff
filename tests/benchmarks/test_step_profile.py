"""The profile of a step: every event counts once, for the work that it belongs to."""

import torch

from benchmarks.step_profile import as_markdown, kind_of, milliseconds_by_kind


def test_an_event_belongs_to_what_surrounds_it():
    assert kind_of(["aten::mm", "MmBackward0"]) == "products of linear layers"
    assert kind_of(["aten::bmm", "megalith::attention_by_products"]) == "attention"
    assert kind_of(["aten::mm", "aten::scaled_dot_product_attention"]) == "attention"
    assert kind_of(["aten::sum", "megalith::rms_norm_compiled_backward"]) == "norms"
    assert kind_of(["aten::copy_", "FSDP::all_gather"]) == "FSDP2"
    assert kind_of(["aten::add_"]) == "other"


class Runner:
    def first(self):
        raise AssertionError("only steps are profiled")

    def run(self):
        x = torch.ones(64, 64)
        torch.mm(x, x).add_(1.0)


def test_a_steps_events_are_added_up_by_kind():
    found = milliseconds_by_kind(Runner(), 3)
    assert found.keys() == {"products of linear layers", "other"}
    assert all(spent > 0 for spent in found.values())


def test_the_table_gives_what_is_neither_products_nor_attention():
    found = {"products of linear layers": 60.0, "attention": 20.0, "norms": 15.0, "other": 5.0}
    table = as_markdown("ours", found, 90.0, {"cpu": "a"})
    assert table.startswith("## ours: a step of 90 ms, 100 ms with the profiler\n")
    assert "| norms | 15.0 | 15.0% |" in table
    assert "\nAll but products and attention: 20 ms, 20.0%.\n" in table
