"""The pages of the fused operations: one per module, and every example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Megatron has no modules of these names: they have a page but no public module
WITHOUT_DOOR = ["fused_add_norm", "fused_attention", "fused_rope", "fused_topk_router", "grouped_matmul"]
MODULES = sorted([*(file.stem for file in (ROOT / "src/megalith/fusions").glob("fused_*.py")), *WITHOUT_DOOR])
PAGES = [DOCS / "fusions.md", *sorted((DOCS / "fusions").glob("*.md"))]


def test_every_module_has_a_page_and_every_page_is_in_the_list():
    assert [page.stem for page in PAGES[1:]] == MODULES
    assert re.findall(r"^\| \[`(\w+)`\]\(fusions/\1\.md\)", PAGES[0].read_text(), re.MULTILINE) == MODULES


def examples(page: Path) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run(page):
    namespace: dict[str, object] = {"__name__": "example"}
    for example in examples(page):
        exec(compile(example, page.name, "exec"), namespace)


def test_a_patched_llama_has_the_loss_and_the_gradients_of_hugging_faces():
    program = "\n".join(examples(DOCS / "use_only_the_fusions.md"))  # in its own process, because it patches a library
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_patch_is_ten_lines_long():
    patch, _ = examples(DOCS / "use_only_the_fusions.md")
    lines = [line for line in patch[patch.index("def rope") :].splitlines() if line.strip() not in ("", ")")]
    assert len(lines) <= 12  # ten, plus the two that define the functions
