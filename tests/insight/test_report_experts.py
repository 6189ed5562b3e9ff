"""The heat maps of experts in the report of a run: well-formed, and each cell the number in metrics.jsonl."""

import re
from pathlib import Path
from xml.etree import ElementTree

from megalith.insight.report import write_report
from megalith.observe.metrics import read_metrics
from tests.insight.test_report import page_of
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.outcomes import run_here

E, STEPS = 8, 4
LEFT, ROW = 56.0, 16.0  # pixels: where cells begin, and the height of a row
CELL = re.compile(r"M([\d.]+) (\d+)h[\d.]+v\d+h-[\d.]+z")


def shade(load: float) -> str:
    """The class of a cell, by the legend of the card."""
    if load == 0:
        return "load-none"
    for limit, name in ((0.5, "low"), (0.9, "less"), (1.1, "even"), (2.0, "more"), (4.0, "high")):
        if load < limit:
            return f"load-{name}"
    return "load-most"


def cells(svg: ElementTree.Element, num_columns: int) -> dict[tuple[int, int], str]:
    """The shade of each cell by (row, column)."""
    width = float(svg.attrib["viewBox"].split()[2]) - LEFT
    found = {}
    for path in svg.iter("path"):
        drawn = CELL.findall(path.attrib["d"])
        assert CELL.sub("", path.attrib["d"]) == ""
        for x, y in drawn:
            column = (float(x) - LEFT) * num_columns / width
            assert abs(column - round(column)) < 0.05
            assert (int(y) // ROW, round(column)) not in found
            found[int(int(y) / ROW), round(column)] = path.attrib["class"]
    return found


def test_each_cell_of_the_heat_maps_is_the_load_in_metrics_jsonl(tmp_path):
    model = {"moe": {"num_experts": E, "layers": [False, True, True]}, "num_layers": 3, "init_method_std": 0.3}
    tree = settings(tmp_path, model=model, train={"steps": STEPS})
    ranks(1, run_here, tree, 1)
    run = Path(tree["run"])
    page_of(run)  # every tag is closed
    html = write_report(run).read_text(encoding="utf-8")
    svgs = [ElementTree.fromstring(text) for text in re.findall(r'<svg class="heat".*?</svg>', html, re.S)]
    records = [(record["step"], record["experts"]["layers"]) for record in read_metrics(run) if "experts" in record]
    step, last = records[-1]
    assert [layer["layer"] for layer in last] == [1, 2]
    worst = max(last, key=lambda layer: max(layer["load"]))["layer"]
    by_layer, over_time = svgs[:3], svgs[3:]  # in three widths of the window each
    assert len(over_time) == 3
    want = {(row, expert): shade(load) for row, layer in enumerate(last) for expert, load in enumerate(layer["load"])}
    assert len(set(want.values())) > 2
    for svg in by_layer:
        assert f"at step {step}" in svg.attrib["aria-label"]
        assert cells(svg, E) == want
    of_worst = [next(layer["load"] for layer in layers if layer["layer"] == worst) for _, layers in records]
    want = {(expert, column): shade(loads[expert]) for column, loads in enumerate(of_worst) for expert in range(E)}
    for svg in over_time:
        assert cells(svg, len(records)) == want
