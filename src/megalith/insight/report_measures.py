"""Held-out measures other than the loss: accuracies and the mean reciprocal rank over steps; the confusion matrix."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from megalith.insight.report_charts import Chart, Line, svg
from megalith.insight.report_parts import card, num_steps
from megalith.insight.run_history import RunHistory

__all__ = ["held_out_measures"]

_SIZE = (310, 170)  # pixels
_ACCURACY, _CONFUSION, _MRR = "accuracy", "confusion", "mrr"
_TITLES = {
    "mlm_accuracy": "Accuracy on masked tokens",
    "sop_accuracy": "Accuracy on the order of sentences",
    "span_accuracy": "Accuracy on missing tokens",
    "top_1_accuracy": "Queries whose passage is the most similar",
    "top_5_accuracy": "Queries whose passage is among the first 5",
    "top_20_accuracy": "Queries whose passage is among the first 20",
    _MRR: "Mean reciprocal rank of a query's passage",
}


def held_out_measures(run: RunHistory) -> str:
    """The cards with held-out measures; "" if the run has none."""
    names = dict.fromkeys(name for _, means in run.measures for name in means)
    curves = "".join(_curve(run, name) for name in names if name.endswith(_ACCURACY) or name == _MRR)
    columns = f'<div class="columns">{curves}</div>' if curves else ""
    return columns + (_confusion(*run.measures[-1], run.classes) if run.measures else "")


def _curve(run: RunHistory, name: str) -> str:
    """The accuracy ``name``, or the mean reciprocal rank, over steps."""
    form = "{:.2f}" if name == _MRR else "{:.0%}"
    final = "{:.3f}" if name == _MRR else "{:.1%}"
    steps, values = zip(*((step, means[name]) for step, means in run.measures if name in means), strict=True)
    describe = f"{name} over {num_steps(steps[-1])}, ending at {final.format(values[-1])}"
    lines = [Line(steps, values, width=1.6, colour="--held-out", dots=True)]
    drawn = svg(Chart(name, describe, lines, (), (), form.format, from_zero=True), *_SIZE)
    return card(
        _TITLES.get(name, name.replace("_", " ").capitalize()),
        f"on held-out samples; final value {final.format(values[-1])}",
        drawn,
    )


def _confusion(step: int, means: Mapping[str, float], names: Sequence[str]) -> str:
    """The confusion matrix, with shares of each true class; "" if it was not measured.

    Classes are shown by ``names``, or by their numbers if an older run did not record names.
    """
    shares = {tuple(name.split("/")[1:]): mean for name, mean in means.items() if name.startswith(f"{_CONFUSION}/")}
    classes = sorted({label for pair in shares for label in pair}, key=int)
    if not classes:
        return ""
    shown = {str(number): name for number, name in enumerate(names)}
    titles = {label: escape(shown.get(label, label)) for label in classes}
    head = "".join(f"<th>{titles[label]}" for label in classes)
    rows = "".join(
        f"<tr><th>{titles[label]}" + "".join(_cell(shares.get((label, taken)), label == taken) for taken in classes)
        for label in classes
    )
    note = f"share of each true class (row) predicted as each class (column), at step {step:,}"
    return card("Confusion matrix", note, f"<table><tr><th>{head}{rows}</table>")


def _cell(share: float | None, is_right: bool) -> str:
    """``share`` is None for a class without held-out samples."""
    if share is None:
        return "<td>-"
    text = "" if not math.isfinite(share) or share == 0.0 else f"{share:.0%}"
    return f"<td>{f'<b>{text}</b>' if is_right and text else text}"
