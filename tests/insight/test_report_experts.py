"""The heat maps of expert loads in a report: well-formed, and each cell shows the number in metrics.jsonl."""

import re
from pathlib import Path
from xml.etree import ElementTree

import torch

from megalith.insight.report import write_report
from megalith.observe.metrics import MetricsWriter, read_metrics
from megalith.training.expert_loads import experts_record
from megalith.training.routing import RoutingTotals
from tests.insight.test_report import page_of
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.outcomes import run_here

E, STEPS = 8, 4
LEFT, ROW = 56.0, 16.0  # pixels: left edge of the cells, height of a row
CELL = re.compile(r"M([\d.]+) (\d+)h[\d.]+v\d+h-[\d.]+z")


def shade(load: float) -> str:
    """The CSS class of a cell, from the legend of the card."""
    if load == 0:
        return "load-none"
    for limit, name in ((0.5, "low"), (0.9, "less"), (1.1, "even"), (2.0, "more"), (4.0, "high")):
        if load < limit:
            return f"load-{name}"
    return "load-most"


def cells(svg: ElementTree.Element, num_columns: int) -> dict[tuple[int | str, ...], str]:
    """The shade of each cell by (row, column), and that of its lower edge by (row, column, "edge")."""
    width = float(svg.attrib["viewBox"].split()[2]) - LEFT
    found = {}
    for path in svg.iter("path"):
        drawn = CELL.findall(path.attrib["d"])
        assert CELL.sub("", path.attrib["d"]) == ""
        for x, y in drawn:
            column = (float(x) - LEFT) * num_columns / width
            assert abs(column - round(column)) < 0.05
            at = (int(y) // ROW, round(column)) if int(y) % ROW == 0 else (int(y) // ROW, round(column), "edge")
            assert at not in found
            found[at] = path.attrib["class"]
    return found


def test_each_cell_of_the_heat_maps_is_the_load_in_metrics_jsonl(tmp_path):
    model = {"moe": {"num_experts": E, "layers": [False, True, True]}, "num_layers": 3, "init_method_std": 0.3}
    tree = settings(tmp_path, model=model, train={"steps": STEPS})
    ranks(1, run_here, tree, 1)
    run = Path(tree["run"])
    page_of(run)  # fails unless every tag is closed
    html = write_report(run).read_text(encoding="utf-8")
    svgs = [ElementTree.fromstring(text) for text in re.findall(r'<svg class="heat".*?</svg>', html, re.S)]
    records = [(record["step"], record["experts"]["layers"]) for record in read_metrics(run) if "experts" in record]
    step, last = records[-1]
    assert [layer["layer"] for layer in last] == [1, 2]
    worst = max(last, key=lambda layer: layer["max_violation"])["layer"]
    by_layer, over_time = svgs[:3], svgs[3:]  # each for three window widths
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


def test_a_dead_expert_is_seen_in_a_cell_of_several(tmp_path):
    load = torch.full((256,), 100)
    load[130], load[7] = 0, 1000  # in ranges of four neighbours: ranges 32 and 1
    experts = experts_record(RoutingTotals(loads={0: load}))
    with MetricsWriter(tmp_path, resumed_step=0) as metrics:
        metrics.write({"step": 1, "loss": 1.0, "experts": experts})
    html = write_report(tmp_path).read_text(encoding="utf-8")
    page = page_of(tmp_path)
    assert "a cell for several experts shows their mean, and the least loaded one along its lower edge" in page.text
    svgs = [ElementTree.fromstring(text) for text in re.findall(r'<svg class="heat".*?</svg>', html, re.S)]
    mean = 100 * 255 / 256 + 900 / 256
    for svg in svgs[:3]:
        found = cells(svg, 64)
        assert f"the highest is {1000 / mean:.2f} times the mean" in svg.attrib["aria-label"]
        # the mean of 0 and three times 100 would hide the 0
        assert (found[0, 32], found[0, 32, "edge"]) == ("load-less", "load-none")
        assert (found[0, 1], found[0, 1, "edge"]) == ("load-high", "load-even")
        assert len(found) == 2 * 64
        assert list(found.values()).count("load-none") == 1
    for svg in svgs[3:]:
        assert cells(svg, 1)[32, 0, "edge"] == "load-none"
