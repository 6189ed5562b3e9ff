"""The drawing of a layout: every rank is where the rank grid puts it."""

import re
from xml.etree import ElementTree

import pytest

from megalith.insight.report_layout import layout_svg


def boxes(drawn):
    """(rank, tp, dp, x, y) of each box, read back from the drawing."""
    root = ElementTree.fromstring(drawn)
    found = []
    for group in root.iter("g"):
        numbers = [int(number) for text in group.iter("text") for number in re.findall(r"\d+", text.text)]
        x, y = map(int, re.findall(r"\d+", group.get("transform")))
        found.append((*numbers, x, y))
    return found


def test_ranks_of_a_tensor_parallel_group_stand_in_a_row():
    # Megatron's order: tensor parallel varies fastest
    found = boxes(layout_svg("tp2 sp dp3"))
    assert [box[:3] for box in found] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 1, 2)]
    for _, tp, dp, x, y in found:
        assert (x, y) == (tp * (found[1][3]), dp * (found[2][4]))


def test_parts_of_a_sequence_stand_below_each_other():
    # Megatron's order: tensor parallel varies fastest, then context parallel
    found = boxes(layout_svg("tp2 cp2 dp2"))
    assert [box[:4] for box in found][:5] == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 1, 0), (3, 1, 1, 0), (4, 0, 0, 1)]
    assert len({box[4:] for box in found}) == 8


def test_of_a_pipeline_the_first_stage_is_drawn():
    drawn = layout_svg("tp2 pp2 dp2")
    assert [box[:3] for box in boxes(drawn)] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert "8 ranks: tensor parallel 2, pipeline parallel 2, data parallel 2" in drawn
    assert "and 4 more ranks, in 2 pipeline stages" in drawn
    large = layout_svg("tp16 cp2 pp4 dp128")
    assert "16,384 ranks: " not in large  # as in other labels, without separators
    assert "16384 ranks: tensor parallel 16, context parallel 2, pipeline parallel 4, data parallel 128" in large
    assert "and 16,352 more ranks, in 4 pipeline stages" in large


def test_of_a_large_world_the_first_ranks_are_drawn_and_the_rest_is_counted():
    drawn = layout_svg("tp16 dp128")
    assert len(boxes(drawn)) == 8 * 4
    assert "and 2,016 more ranks" in drawn
    assert max(box[0] for box in boxes(drawn)) == 3 * 16 + 7
    assert "more ranks" not in layout_svg("tp8 dp4")


@pytest.mark.parametrize("layout", ["", "tp2", "dp4", "tp0 dp2", "whatever"])
def test_a_layout_that_does_not_name_both_axes_is_not_drawn(layout):
    assert layout_svg(layout) == ""
