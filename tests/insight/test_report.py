"""report.html: one valid, self-contained page, complete or with missing parts."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from megalith import optional
from megalith.errors import DataError, MissingDependencyError
from megalith.insight import report_curves
from megalith.insight.report import write_report, write_report_if_possible
from megalith.insight.report_measures import held_out_measures
from megalith.observe.metrics import MetricsWriter
from tests.insight.run_folder import record, write_run

VOID = {"meta", "br", "path", "rect", "use"}
IMPLIED = {"td", "tr", "dd"}  # HTML closes these itself


class Page(HTMLParser):
    """A parsed page: its tags, attributes, text, and the tags left open at the end."""

    def __init__(self, html):
        super().__init__()
        self.html, self.tags, self.attributes, self.text, self.open = html, [], [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID | IMPLIED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in VOID | IMPLIED:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + "\n"


def page_of(folder):
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert not page.open
    return page


def page_with(folder, *records):
    with MetricsWriter(folder, resumed_step=0) as metrics:
        for each in records:
            metrics.write(each)
    return page_of(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "stdlib")


def test_a_whole_run_shows_every_part(whole):
    page = page_of(whole)
    for part in (
        "stdlib", "Held-out loss", "2.243", "perplexity 9.4", "1.50M", "4.01M", "0.971 below an interpolated bigram",
        "Loss", "unigram 5.87", "interpolated bigram 3.21", "N-gram baselines", "Learning rate", "Gradient norm",
        "Throughput", "Time", "Layouts", "rank 1", "forward-backward", "optimizer", "other", "Samples", "import os",
        "Machine and versions", "2.13.0+cpu", "Resolved settings", "hidden_size: 256",
    ):  # fmt: skip
        assert part in page.text, part


def test_the_change_of_layout_is_marked_named_and_dated(whole):
    page = page_of(whole)
    assert "tp1 dp2 → tp2 dp1" in page.text
    assert "The layout changed from tp1 dp2 to tp2 dp1 after step 584." in page.text
    assert "steps 1 to 584" in page.text
    assert "steps 585 to 730" in page.text


def test_nothing_comes_from_outside_and_nothing_runs(whole):
    page = page_of(whole)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", page.html)
    assert {value[0] for name, value in page.attributes if name in ("src", "href", "xlink:href")} <= {"#"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_no_id_stands_twice(whole):
    ids = [value for name, value in page_of(whole).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_text_from_the_run_is_escaped_wherever_it_appears(tmp_path):
    evil = "</pre><script>alert('&')</script>\" onload=\"x"
    folder = tmp_path / "<b>run & co"
    folder.mkdir()
    for name, content in {
        "samples.json": [{"prompt": evil, "text": evil}],
        "about.json": {evil: evil},
        "evaluation.json": {"unigram_loss": evil, "bigram_loss": 3.0, "valid_loss": 2.0},
    }.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "config.yaml").write_text(f"run: {evil}\n", encoding="utf-8")
    page = page_with(folder, record(1, layout=evil, time={evil.replace("/", ""): 0.1}), record(2, layout=evil + "2"))
    assert "script" not in page.tags
    assert "<b>run" not in page.html
    assert not [name for name, _ in page.attributes if name == "onload"]
    assert page.text.count("<script>alert('&')</script>") >= 8


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("evaluation.json", "N-gram baselines"),
        ("samples.json", "Samples"),
        ("about.json", "Machine and versions"),
        ("config.yaml", "Resolved settings"),
    ],
)
def test_a_part_without_its_file_is_left_out(whole, tmp_path, missing, part):
    folder = shutil.copytree(whole, tmp_path / "run")
    assert part in page_of(folder).text
    (folder / missing).unlink()
    page = page_of(folder)
    assert part not in page.text
    assert "<pre></pre>" not in page.html
    assert 'class="card"><h2></h2>' not in page.html


def test_one_record_of_a_loss_alone_is_a_page(tmp_path):
    page = page_with(tmp_path / "run", {"step": 1, "loss": 7.6})
    assert "A model trained on 1 step." in page.text
    assert page.tags.count("section") == 1
    assert page.tags.count("svg") == 3  # for wide, medium and narrow windows
    assert "nan" not in page.text


def test_a_run_in_one_layout_speaks_of_no_change(tmp_path):
    page = page_with(tmp_path / "run", record(1), record(2))
    assert "change" not in page.text
    assert "Layouts" not in page.text
    assert "rank 1" in page.text


def test_many_changes_are_counted_and_more_spans_than_colours_become_other(tmp_path):
    time = {f"span {number}": 0.01 + number / 1000 for number in range(8)}
    records = [record(step, layout=f"tp1 dp{step}", step_seconds=0.5, time=time) for step in (1, 2, 3, 4)]
    page = page_with(tmp_path / "run", *records)
    assert "The layout changed 3 times." in page.text
    assert "span 2" in page.text
    assert "span 1" not in page.text
    assert "other" in page.text


def section(html, title):
    """The HTML of the card with this ``title``."""
    (found,) = re.findall(rf'<section class="card"><h2>{title}\b.*?</section>', html, flags=re.DOTALL)
    return found


def test_the_page_opens_with_recipe_model_date_and_command(whole):
    page = page_of(whole)
    assert "<title>stdlib · llama-4m · Megalith</title>" in page.html
    head = page.html[: page.html.index("</header>")]
    assert "recipe llama-4m · model llama-4m · 4,012,288 parameters · 2026-02-03 14:05 UTC" in head
    assert "megalith train llama-4m data.train=corpus &#x27;model.rope={base: 1e5}&#x27; --nproc 2</pre>" in head
    assert "corpus" not in section(page.html, "Machine and versions")


def test_without_a_command_the_settings_of_the_folder_are_what_runs_again(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "my run")
    (folder / "about.json").unlink()
    assert f"megalith train '{folder / 'config.yaml'}'".replace("'", "&#x27;") in page_of(folder).html


def test_numbers_of_a_step_are_medians_that_agree_with_each_other(whole, tmp_path):
    steps = range(1, 41)
    records = [record(step, step_seconds=0.5, tokens_per_second=4096.0, time={"forward": 0.5}) for step in steps]
    records[0] |= {"step_seconds": 48.6, "tokens_per_second": 42.1, "time": {"forward": 48.6}}  # as written by 0.1.0
    text = page_with(tmp_path / "run", *records).text
    assert "median step 500 ms" in text
    assert "steps 1 to 40, 500 ms each (median)" in text
    assert "4.10k" in text
    assert "1.2 s" not in text  # the mean step
    page = page_with(tmp_path / "even", *(record(step, tokens_per_second=1000.0 * step) for step in range(1, 5)))
    assert "Tokens per second\n2.50k" in page.text  # the mean of the two middle values

    text = page_of(whole).text
    assert "34 s of it waiting for the compiler" in text
    assert "waiting for the compiler\n34 s" in text
    assert "median step 322 ms" in text


def test_the_axis_of_the_throughput_is_that_of_settled_steps(tmp_path):
    speeds = {step: 30.0 if step <= 3 else 3000.0 + step for step in range(1, 101)}
    records = [record(step, layout="tp1 dp1", tokens_per_second=speed) for step, speed in speeds.items()]
    card = section(page_with(tmp_path / "run", *records).html, "Throughput")
    ticks = [float(text.replace(",", "")) for text in re.findall(r">([\d,]+)</text>", card)]
    assert min(tick for tick in ticks if tick > 100) >= 2700  # the others are steps
    assert "tokens per second; 3 steps off scale" in card


def test_both_layouts_are_on_the_axis_of_the_throughput(tmp_path):
    speeds = {step: 3000.0 if step <= 90 else 500.0 for step in range(1, 101)}
    records = [
        record(step, layout="tp1 dp2" if step <= 90 else "tp2 dp1", tokens_per_second=speed)
        for step, speed in speeds.items()
    ]
    assert "off scale" not in section(page_with(tmp_path / "run", *records).html, "Throughput")


def test_the_loss_says_how_it_is_smoothed_and_is_enlarged_after_its_fall(whole, tmp_path):
    text = page_of(whole).text
    assert "smoothed over 28 steps" in text  # 7 records of 184, 4 steps apart
    assert "From step 144 on, enlarged" in text
    assert "interpolated bigram 3.21" in section(page_of(whole).html, "Loss").partition("enlarged</h3>")[2]
    assert "unigram 5.87" not in section(page_of(whole).html, "Loss").partition("enlarged</h3>")[2].replace("inter", "")
    # a loss that has not fallen is not drawn twice, and short series are not smoothed
    flat = [record(step, loss=3.0 + step % 2) for step in range(1, 61)]
    assert "enlarged" not in page_with(tmp_path / "flat", *flat).text
    few = page_with(tmp_path / "few", *(record(step) for step in range(1, 11))).text
    assert "smoothed" not in few
    assert "enlarged" not in few


def test_a_colour_has_one_meaning(whole):
    html = page_of(whole).html
    style, body = html.split("</style>", 1)
    meanings = {
        "training": {"Loss", "Time"},
        "held-out": {"Loss", "N-gram baselines", "Time"},
        "measure": {"Learning rate", "Gradient norm", "Throughput"},
    }
    assert "var(--held-out)" in re.search(r"\.ours > i {[^}]*}", style)[0]
    for colour, places in meanings.items():
        found = {
            re.match(r'<section class="card"><h2>([^<]*?) ?<', card)[1]
            for card in re.findall(r'<section class="card">.*?</section>', body, flags=re.DOTALL)
            if re.search(rf'var\(--{colour}\)|class="?{colour}["> ]', card)
        }
        assert found - {"N-gram baselines"} == places - {"N-gram baselines"}, colour
    light, dark = re.findall(r":root {(.*?)}", style, flags=re.DOTALL)[:2]
    names = ("training", "held-out", "measure", "compile", "checkpoint", *(f"span-{n}" for n in range(1, 7)), "other")
    for scheme in (light, dark):
        values = [re.search(rf"--{name}: (#\w+);", scheme)[1] for name in names]
        assert len(set(values)) == len(names)
    assert {f".{name} {{" for name in names if name != "measure"} <= set(re.findall(r"\.[\w-]+ {", style))


def test_a_span_that_takes_nearly_all_of_a_step_leaves_the_others_readable(tmp_path):
    time = {"data": 0.004, "forward-backward": 0.98, "optimizer": 0.012}
    page = page_with(tmp_path / "run", *(record(n, step_seconds=1.0, time=time, between={}) for n in range(3, 9)))
    assert "the other 1.6%, without forward-backward, enlarged" in page.text
    assert "98.4%" in page.text  # of the measured time
    assert "0.4%" in page.text
    assert "1.2%" in page.text


def test_losses_that_are_not_finite_are_said(tmp_path):
    page = page_with(tmp_path / "run", record(1), record(2, loss=math.nan), record(3))
    assert "The loss was not finite in 1 of 3 records." in page.text
    page = page_with(tmp_path / "other", record(1, loss=math.nan))
    assert "Learning rate" in page.text
    assert "Loss" not in page.text.splitlines()


@pytest.mark.parametrize(
    ("loss", "tile"),
    [
        (math.nan, "Held-out loss\nnan\nTraining loss"),  # a perplexity would be wrong
        (2.0, "Held-out loss\n2.000\nperplexity 7.4"),
        (25.0, "Held-out loss\n25.000\nperplexity 7.2e+10"),
        (800.0, "Held-out loss\n800.000\nperplexity inf"),
    ],
)
def test_the_perplexity_is_that_of_the_held_out_loss_or_left_out(loss, tile, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evaluation.json").write_text('{"bigram_loss": 3.0}')
    page = page_with(tmp_path / "run", record(1), {"step": 1, "valid_loss": loss})
    assert tile in page.text
    assert "nan above" not in page.text


@pytest.mark.parametrize(("over", "unit"), [("texts", "nats per text"), ("masked tokens", "nats per masked token")])
def test_a_loss_that_is_no_mean_over_tokens_has_its_own_unit_and_no_perplexity(over, unit, tmp_path):
    (tmp_path / "about.json").write_text(json.dumps({"loss_over": over}))
    page = page_with(
        tmp_path, record(1), record(2), {"step": 1, "valid_loss": 2.0, "valid_sets": {"web": {"loss": 2.0}}}
    )
    assert f"Held-out loss: 2.000 {unit}." in page.text
    assert f"held-out loss, {unit}" in page.text
    assert f"{unit} by step" in page.text
    for absent in ("perplexity", "nats per token", "Machine and versions"):
        assert absent not in page.text


def test_energy_is_a_tile_where_it_was_measured(tmp_path):
    laps = [record(step, energy={"joules": 6e5}) for step in (1, 2)]
    assert (
        "Energy\n1.20 MJ\nof the training steps, as far as counters were read"
        in page_with(tmp_path / "with", *laps).text
    )
    assert "Energy" not in page_with(tmp_path / "without", record(1)).text


def test_damaged_counts_of_datasets_leave_their_rows_out(tmp_path):
    read = {"web": {"samples": 3, "epochs": 0.5}, "co<de": {"samples": 1, "epochs": 2}, "a": {"samples": "x"}, "b": 3}
    text = page_with(tmp_path / "some", record(1, datasets=read)).text
    assert "read up to the last step\nweb\n3 samples\n75.0%\n0.5 epochs\nco<de\n" in text
    for damaged in ({}, 3, {"a": None}):
        assert "Training data" not in page_with(tmp_path / f"none {damaged}", record(1, datasets=damaged)).text


def test_named_validation_sets_are_a_table_of_last_and_lowest_losses(tmp_path):
    losses = {1: {"web": 2.0, "co<de": 1.0}, 2: {"web": 2.5, "co<de": math.nan}}
    records = [
        {"step": step, "valid_sets": {name: {"loss": loss} for name, loss in sets.items()}}
        for step, sets in losses.items()
    ]
    page = page_with(tmp_path, record(1), record(2), *records)
    assert "web\n2.500\nperplexity 12.2\nlowest 2.000 at step 1" in page.text
    assert "co<de\nnan\nlowest 1.000 at step 1" in page.text
    assert "Validation sets" not in page_with(tmp_path, record(1), {"step": 1, "valid_loss": 2.0}).text


def test_a_run_without_records_has_no_report(tmp_path):
    with pytest.raises(DataError, match=r"at least one training step; .*train for at least one step first"):
        page_with(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert write_report_if_possible(tmp_path) is None  # a run that was stopped before its first step
    (tmp_path / "metrics.jsonl").unlink()
    assert write_report_if_possible(tmp_path).startswith("no report: ")


def test_without_matplotlib_a_run_is_told_how_to_get_its_report(tmp_path, monkeypatch):
    def missing(package):
        raise MissingDependencyError(f"drawing needs {package}")

    page_with(tmp_path, record(1))
    assert write_report_if_possible(str(tmp_path)) == f"report: {tmp_path / 'report.html'}"
    monkeypatch.setattr(optional, "need", missing)
    assert write_report_if_possible(tmp_path) == "no report: drawing needs matplotlib.figure"


def test_a_page_that_cannot_be_written_or_drawn_is_one_line_and_no_error(tmp_path, monkeypatch):
    page_with(tmp_path, record(1))
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    assert write_report_if_possible(tmp_path).startswith("no report: cannot write ")

    def broken(chart, width, height):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(report_curves, "svg", broken)
    assert write_report_if_possible(tmp_path) == (
        f"no report: RuntimeError: no fonts; the run is complete, try: megalith report {tmp_path}"
    )


def test_loads_of_experts_are_a_heat_map_by_layer_and_over_time_of_the_worst(tmp_path):
    layers = [{"layer": 1, "load": [1.0, 1.0]}, {"layer": 3, "load": [0.0, 2.0]}]
    page = page_with(tmp_path, *(record(step, experts={"max_violation": 1.0, "layers": layers}) for step in (1, 2, 3)))
    assert "Layer 3, the least balanced, by step" in page.text
    assert page.html.count('class="heat"') == 6  # two, for three window widths
    assert 'class="load-none"' in page.html
    assert "Expert loads" not in page_with(tmp_path, record(1, experts={"layers": [{"layer": 0, "load": "x"}]})).text


def test_accuracies_of_encoders_are_curves_with_names_that_say_of_what():
    measures = [
        (step, {"mlm": 3.0, "mlm_accuracy": 0.25, "sop_accuracy": 0.5, "span_accuracy": 0.1}) for step in (5, 10)
    ]
    html = held_out_measures(SimpleNamespace(measures=measures, classes=()))
    titles = re.findall(r"<h2>([^<]*?) ?<", html)
    of = ("masked tokens", "the order of sentences", "missing tokens")
    assert titles == [f"Accuracy on {each}" for each in of]
    assert "final value 25.0%" in html
