"""Charts as inline SVG: what is drawn, and that charts are independent of each other and of the network."""

import math
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from megalith import optional
from megalith.errors import MissingDependencyError
from megalith.insight.report_charts import Chart, Level, Line, Mark, is_spread_out, smoothed, svg

STEPS = [1, 2, 3, 4]


def chart(*lines, **fields):
    return Chart("loss", 'a "loss" < 3', lines or [Line(STEPS, [4.0, 3.0, 2.5, 2.0])], **fields)


def texts(drawn):
    return [element.text for element in ElementTree.fromstring(drawn).iter("text")]


def test_names_of_levels_and_marks_are_text_in_the_drawing():
    drawn = svg(chart(levels=[Level("unigram", 3.5)], marks=[Mark(2.5, "tp1 dp2 → tp2 <dp1>")]), 600, 300)
    assert "unigram 3.5" in texts(drawn)
    assert "tp1 dp2 → tp2 <dp1>" in texts(drawn)  # unescaped by the parser: escaped in the source
    assert ElementTree.fromstring(drawn).get("aria-label") == 'a "loss" < 3'


def test_a_drawing_is_one_element_with_the_pages_colours_and_fonts_and_no_address():
    drawn = svg(chart(Line(STEPS, STEPS, colour="--held-out", dots=True), marks=[Mark(2, "x")]), 600, 300)
    assert drawn.startswith('<svg role="img" ')
    assert "var(--held-out)" in drawn
    for foreign in ("http", "font-family", "<style", "<!DOCTYPE", "xmlns", "#00000"):
        assert foreign not in drawn, foreign


def test_the_drawing_scales_to_the_page():
    element = ElementTree.fromstring(svg(chart(), 600, 300))
    assert element.get("viewBox") == "0 0 600 300"
    assert element.get("width") is None


def test_two_charts_on_a_page_share_no_id_and_refer_to_their_own():
    first, second = (svg(Chart(name, "", [Line(STEPS, STEPS)]), 300, 200) for name in ("a", "b"))
    ids = [set(re.findall(r'\bid="([^"]*)"', drawn)) for drawn in (first, second)]
    assert ids[0]
    assert ids[1]
    assert not ids[0] & ids[1]
    for drawn, own in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', drawn)) <= own


def test_the_same_chart_is_drawn_to_the_same_bytes_whatever_the_user_has_set(monkeypatch):
    first = svg(chart(), 300, 200)
    monkeypatch.setitem(pytest.importorskip("matplotlib").rcParams, "axes.linewidth", 9.0)
    assert svg(chart(), 300, 200) == first


def test_dollar_signs_begin_no_formula():
    assert "tp$1$ dp2" in texts(svg(chart(marks=[Mark(2.0, "tp$1$ dp2")]), 600, 300))


def test_one_record_is_a_dot_and_nan_is_a_gap():
    assert "<use" in svg(chart(Line([7], [2.0])), 300, 200)
    gap = svg(chart(Line(STEPS, [1.0, math.nan, math.inf, 2.0])), 300, 200)
    assert "nan" not in gap
    assert svg(chart(Line(STEPS, [math.nan] * 4)), 300, 200) == ""


def test_of_many_points_the_extremes_are_kept():
    values = np.random.default_rng(0).normal(3, 0.1, 100_000)
    values[[777, 50_000]] = 9.0, -9.0
    values[30_000:40_000] = math.nan
    drawn = svg(chart(Line(range(100_000), values.tolist())), 300, 200)
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*var\(--training\)', drawn)
    points = [tuple(map(float, point)) for point in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert len(points) <= 4 * 300
    assert path.count("M") == 2  # NaN splits the line
    highest, lowest = (choose(points, key=lambda point: point[1])[0] for choose in (min, max))
    pixels_a_step = (300 - 46 - 10) / (99_999 * 1.01)
    assert highest == pytest.approx(46 + 777 * pixels_a_step, abs=0.01)
    assert lowest == pytest.approx(46 + 50_000 * pixels_a_step, abs=0.01)


def test_marks_close_together_are_drawn_and_the_first_is_named():
    drawn = svg(chart(marks=[Mark(2.0, "first"), Mark(2.1, "second"), Mark(4.0, "third")]), 600, 300)
    assert {"first", "third"} <= set(texts(drawn))
    assert "second" not in texts(drawn)
    assert drawn.count("stroke-dasharray") == 3


def test_the_figures_of_pyplot_and_its_settings_are_left_alone():
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    loaded = "matplotlib.pyplot" in sys.modules
    svg(chart(), 300, 200)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_smoothing_keeps_a_straight_line_and_passes_over_gaps():
    line = np.linspace(5.0, 1.0, 300)
    np.testing.assert_allclose(smoothed(line)[:-5], line[:-5], rtol=1e-12)
    assert smoothed(line)[-1] == pytest.approx(line[-6:].mean())  # the last window is one-sided
    holes = line.copy()
    holes[100:103] = [math.nan, math.inf, math.nan]
    np.testing.assert_allclose(smoothed(holes)[:-5], line[:-5], atol=0.03)
    # by hand: in the middle, each of 120 values is averaged with two on each side
    assert smoothed([0.0] * 60 + [5.0] + [0.0] * 59)[57:64] == [0, 1, 1, 1, 1, 1, 0]
    assert str(smoothed([math.nan])) == "[nan]"


def test_only_positive_values_with_towering_ones_are_spread_out():
    assert is_spread_out([1.0, 1.0, 30.0, math.nan])
    assert not is_spread_out([1.0, 2.0, 3.0])
    assert not is_spread_out([0.0, 1.0, 1.0, 30.0])
    assert not is_spread_out([math.nan])


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
    def missing(package):
        raise ImportError(f"No module named {package}")

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'megalith\[report\]'"):
        svg(chart(), 300, 200)
