"""The page of each fused operation has the latest measurements, and every operation has a page."""

import json

import pytest

from benchmarks.fusions import pages
from benchmarks.fusions.contest import Contest, Figures
from benchmarks.fusions.report import Run, as_json, from_json
from megalith.fusions.core.registry import FUSIONS


def test_every_operation_is_on_a_page_and_every_page_about_one():
    assert {name for names in pages.FUSIONS_OF.values() for name in names} == FUSIONS.keys()
    assert {f"{page}.md" for page in pages.FUSIONS_OF} == {file.name for file in pages.PAGES.glob("*.md")}


@pytest.mark.parametrize("page", pages.FUSIONS_OF)
def test_a_page_ends_with_the_newest_table(page):
    assert (pages.PAGES / f"{page}.md").read_text().endswith(f"\n\n{pages.section(page, pages.newest())}")


def test_a_result_is_read_as_it_was_written():
    contest = Contest("op", "float32", 16, (1, 2), {"ours": Figures({0: 1.0}, {0: 2.0}, None, None)})
    runs = [Run([contest], [1e9])]
    written = json.loads(json.dumps(as_json(runs, {"device": "CPU"}, "today")))
    assert from_json(written) == [Run([Contest("op", "float32", 16, [1, 2], contest.figures)], [1e9])]
