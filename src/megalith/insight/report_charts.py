"""Line charts of a report as inline SVG that uses the font and colours of the page.

matplotlib draws with placeholder colours that are replaced by the page's CSS variables, so that one drawing works in
light and dark mode. Only ``Figure`` is used, not pyplot, whose global state belongs to the caller.
"""

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalith import optional

__all__ = ["Chart", "Level", "Line", "Mark", "is_spread_out", "smoothed", "smoothing_window", "svg"]

# placeholder colour: CSS variable that replaces it
_VARIABLES = {
    "#000001": "--ink",
    "#000002": "--muted",
    "#000003": "--line",
    "#000004": "--training",
    "#000005": "--held-out",
    "#000006": "--measure",
}
_COLOURS = {variable: drawn for drawn, variable in _VARIABLES.items()}
_LABEL_ROOM = 130  # pixels between the labels of two marks


@dataclass(frozen=True)
class Line:
    """Values over steps; NaN leaves a gap."""

    steps: Sequence[int]
    values: Sequence[float]
    colour: str = "--training"
    width: float = 1.8
    opacity: float = 1.0
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A labelled horizontal line."""

    label: str
    value: float


@dataclass(frozen=True)
class Mark:
    """A vertical line at an event after a step; ``label`` may be ""."""

    step: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A chart to draw; ``name`` is unique on its page, ``describe`` is the text for screen readers.

    ``limits``: range of the value axis; values outside are clipped. ``from_step``: first step of the step axis.
    """

    name: str
    describe: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    format_value: Callable[[float], str] = "{:.3g}".format
    logarithmic: bool = False
    from_zero: bool = False
    limits: tuple[float, float] | None = None
    from_step: int = 0


def smoothing_window(num_values: int) -> int:
    """Window size of ``smoothed``: an odd number, about a thirtieth of the values."""
    return 2 * (num_values // 60) + 1


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average of ``values`` over ``smoothing_window`` of them; skips NaN and inf."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    # the window narrows at the beginning: an asymmetric one would distort the curve where it is steepest
    reach = np.minimum(places, smoothing_window(len(values)) // 2)
    first, after = places - reach, places + np.minimum(reach, places[::-1]) + 1
    with np.errstate(invalid="ignore"):
        means = (sums[after] - sums[first]) / (counts[after] - counts[first])
    return list(means.tolist())


def is_spread_out(values: Sequence[float]) -> bool:
    """Whether ``values`` are positive, with outliers so large that a logarithmic axis is needed."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 20 * float(np.median(finite))


def svg(chart: Chart, width: int, height: int) -> str:
    """``chart`` as an ``<svg>`` element that is legible from about ``width`` pixels up; "" if it has no finite value.

    Raises MissingDependencyError if matplotlib is not installed.
    """
    if not any(math.isfinite(value) for line in chart.lines for value in line.values):
        return ""
    drawn = io.StringIO()
    with _own_settings(chart.name):
        _figure(chart, width, height).savefig(drawn, format="svg", transparent=True)
    return _for_page(drawn.getvalue(), chart)


@contextmanager
def _own_settings(name: str) -> Iterator[None]:
    """Uses matplotlib's defaults instead of the user's settings, which are restored at the end."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # text as <text>, not as paths: it can be searched, and uses the page's font
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})
        yield


def _matplotlib() -> Any:
    optional.need("matplotlib.figure")  # also imports ticker; importing the package alone imports neither
    return optional.need("matplotlib")


def _figure(chart: Chart, width: int, height: int) -> Any:
    figure = _matplotlib().figure.Figure(figsize=(width / 72, height / 72), dpi=72)
    top = 26 if any(mark.label for mark in chart.marks) else 8
    axes = figure.add_axes((46 / width, 26 / height, 1 - 56 / width, 1 - (26 + top) / height))
    _style(axes, chart, width)
    for line in chart.lines:
        axes.plot(
            *_thinned(line, 4 * width),
            color=_COLOURS[line.colour],
            linewidth=line.width,
            alpha=line.opacity,
            marker="o" if line.dots or len(line.values) == 1 else "",
            markersize=4.5,
            solid_joinstyle="round",
        )
    last_step = max(line.steps[-1] for line in chart.lines if line.steps)
    axes.set_xlim(chart.from_step, last_step + 0.01 * (last_step - chart.from_step))
    if chart.limits is not None:
        axes.set_ylim(*chart.limits)
    elif chart.from_zero and not chart.logarithmic:
        axes.set_ylim(bottom=0)
    _annotate(axes, chart, last_step, width)
    return figure


def _thinned(line: Line, most: int) -> tuple[list[float], list[float]]:
    """Reduces the line to at most ``most`` points: the minimum and maximum of each group of adjacent values."""
    steps, values = np.asarray(line.steps, float), np.asarray(line.values, float)
    if len(values) > most:
        kept: list[int] = []
        for places in np.array_split(np.arange(len(values)), most // 2):
            finite = places[np.isfinite(values[places])]
            ends = {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {places[0]}
            kept += sorted(ends)
        steps, values = steps[kept], values[kept]
    return steps.tolist(), values.tolist()


def _style(axes: Any, chart: Chart, width: int) -> None:
    ticker = _matplotlib().ticker
    muted, line = _COLOURS["--muted"], _COLOURS["--line"]
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(line)
    axes.tick_params(which="both", length=0, labelsize=11.5, labelcolor=muted, pad=6)
    axes.grid(axis="y", color=line, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.08)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=max(3, width // 110), integer=True))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if chart.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: chart.format_value(value)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _annotate(axes: Any, chart: Chart, last_step: int, width: int) -> None:
    ink, muted = _COLOURS["--ink"], _COLOURS["--muted"]
    labelled_at = -math.inf
    for mark in chart.marks:
        axes.axvline(mark.step, color=ink, linewidth=1, linestyle=(0, (4, 3)))
        pixel = (mark.step - chart.from_step) / max(1, last_step - chart.from_step) * width
        if mark.label and pixel - labelled_at > _LABEL_ROOM:
            labelled_at = pixel
            _write(axes, mark.label, (mark.step, 1), ("data", "axes fraction"), 6, _side(pixel, width), ink)
    for level in chart.levels:
        axes.axhline(level.value, color=muted, linewidth=1.2, linestyle=(0, (1.5, 2.5)))
        text = f"{level.label} {chart.format_value(level.value)}"
        _write(axes, text, (1, level.value), ("axes fraction", "data"), 4, "right", muted)


def _write(
    axes: Any, text: str, place: tuple[float, float], units: tuple[str, str], above: int, side: str, colour: str
) -> None:
    """Writes ``text`` ``above`` pixels over ``place``, literally: a dollar sign does not begin a formula."""
    axes.annotate(
        text,
        place,
        xycoords=units,
        xytext=(0, above),
        textcoords="offset points",
        ha=side,
        va="bottom",
        color=colour,
        fontsize=11.5,
        parse_math=False,
    )


def _side(pixel: float, width: int) -> str:
    """Horizontal alignment of text at ``pixel`` that keeps it inside the chart."""
    return "left" if pixel < _LABEL_ROOM / 2 else "right" if pixel > width - _LABEL_ROOM / 2 else "center"


def _for_page(drawn: str, chart: Chart) -> str:
    """Converts the drawing to an element of an HTML page: no prologue, no global styles, unique ids."""
    text = drawn[drawn.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;?", "", text)
    text = re.sub(r'<g id="[^"]*"/>', "", text)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{chart.name}-", text).replace("xlink:href", "href")
    text = re.sub("|".join(_VARIABLES), lambda found: f"var({_VARIABLES[found[0]]})", text)
    (view_box,) = re.findall(r'viewBox="[^"]*"', text)[:1]
    label = html.escape(chart.describe)
    return re.sub(r"<svg[^>]*>", lambda _: f'<svg role="img" aria-label="{label}" {view_box}>', text, count=1)
