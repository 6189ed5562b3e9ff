"""The pages of the fused operations: one for each module, and every example on them runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = sorted(file.stem for file in (ROOT / "src/megalith/fusions").glob("fused_*.py"))
PAGES = [DOCS / "fusions.md", *sorted((DOCS / "fusions").glob("*.md"))]


def test_every_module_has_a_page_and_every_page_is_in_the_list():
    assert [page.stem for page in PAGES[1:]] == MODULES
    assert re.findall(r"^\| \[`(\w+)`\]\(fusions/\1\.md\)", PAGES[0].read_text(), re.MULTILINE) == MODULES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run(page):
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert examples
    namespace: dict[str, object] = {"__name__": "example"}
    for example in examples:
        exec(compile(example, page.name, "exec"), namespace)
