"""The structure of ``fusions``: public modules, families and the core, and a catalogue of their functions."""

import ast
import importlib
import re
from pathlib import Path

import grimp

from megalith import fusions

ROOM = Path(fusions.__file__).parent
MOST_ROOMS, MOST_FLOORS = 16, 4
MOST_ANY = 4  # per 1,000 lines: the types of operands are in records
DOORS = sorted(ROOM.glob("fused_*.py"))
FOLDERS = sorted(folder.name for folder in ROOM.iterdir() if (folder / "__init__.py").exists())


def test_there_are_doors_families_and_the_core_and_nothing_else():
    files = {file.name for file in ROOM.glob("*.py")} - {file.name for file in DOORS}
    assert files == {"__init__.py"}
    assert "core" in FOLDERS
    assert len(FOLDERS) + 2 <= MOST_ROOMS  # the public modules count as one, and so does the package


def test_a_door_hands_on_what_one_family_offers_and_holds_nothing_else():
    for door in DOORS:
        says, imports, offers = ast.parse(door.read_text("utf-8")).body
        assert isinstance(says, ast.Expr), door.name
        assert isinstance(imports, ast.ImportFrom), door.name
        assert re.fullmatch(rf"megalith\.fusions\.({'|'.join(FOLDERS)})\.\w+", imports.module), door.name
        assert sorted(ast.literal_eval(offers.value)) == sorted(alias.name for alias in imports.names), door.name


def test_a_door_is_a_module_also_where_a_function_has_its_name():
    for door in DOORS:
        module = importlib.import_module(f"megalith.fusions.{door.stem}")
        assert getattr(fusions, door.stem) is module


def test_rooms_stand_on_four_floors():
    graph = grimp.build_graph("megalith")

    def room(module: str) -> str:
        return module.removeprefix("megalith.fusions").split(".")[1] if module != "megalith.fusions" else ""

    modules = [module for module in graph.modules if module == "megalith.fusions" or "megalith.fusions." in module]
    below = {room(module): set() for module in modules}
    for module in modules:
        imported = {room(other) for other in graph.find_modules_directly_imported_by(module) if other in modules}
        below[room(module)] |= imported - {room(module)}

    def floor(name: str) -> int:
        return 1 + max(map(floor, below[name]), default=0)

    assert max(map(floor, below)) <= MOST_FLOORS


def test_every_public_name_is_in_the_catalogue():
    words = set(re.findall(r"\w+", fusions.__doc__))
    backs = {name for name in fusions.__all__ if name.endswith("_back") and name.removesuffix("_back") in words}
    assert set(fusions.__all__) - words - backs == set()


def test_few_lines_are_of_any_type():
    lines = [line for file in ROOM.rglob("*.py") for line in file.read_text("utf-8").splitlines()]
    of_any = [line for line in lines if re.search(r"\bAny\b", line)]
    assert 1000 * len(of_any) <= MOST_ANY * len(lines)
