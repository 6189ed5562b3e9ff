"""docs/tour.md: every path exists, its layers are those of the import-linter contract, and additions need few files."""

import re
import tomllib

from tests.docs.pages import ROOT, page

TOUR = page("tour.md")
SOURCE = ROOT / "src" / "megalith"
PATH = re.compile(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below ``heading``, without its first two lines."""
    section = TOUR.partition(f"# {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_path_exists():
    paths = PATH.findall(TOUR)
    assert len(paths) > 60
    assert f"`{SOURCE.relative_to(ROOT)}/`" in TOUR
    beside = ("src/megalith/", "adamw.py", "local_store.py", "module.py")  # their folder is named next to them
    assert [path for path in paths if path not in beside and not (SOURCE / path).exists()] == []


def test_floors_are_those_of_import_linter():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    levels = [re.findall(r"\w+", level) for level in reversed(contract["layers"]) if level != "__main__"]
    want = {room: floor for floor, level in enumerate(levels) for room in level}
    found = {}
    for floor, room, _ in rows("The packages"):
        found |= {re.sub(r"/|\.py", "", path): int(floor) for path in PATH.findall(room)}
    assert found == want


def test_each_of_ten_additions_opens_at_most_three_files():
    additions = rows("I want to add ...")
    assert len(additions) == 10
    for what, files, _ in additions:
        assert 1 <= len(PATH.findall(files)) <= 3, what


def test_every_page_that_it_links_is_there():
    for link in re.findall(r"\]\(([^)]+)\)", TOUR):
        assert (ROOT / "docs" / link).exists(), link
