"""Every setting is read by code that uses it, as shown by the source: an unread setting is a mistake."""

import ast
import functools
import textwrap
from pathlib import Path

import pytest
from pydantic import create_model

import megalith
from megalith.config import ParamGroupOverride, RunConfig
from megalith.config.settings_group import SettingsGroup
from megalith.config.settings_tree import GROUPS
from tests.config.setting_reads import Program

PACKAGE = Path(megalith.__file__).parent
CONFIG = PACKAGE / "config"
# translating or reporting a setting is not using it
REPORTS = {PACKAGE / "models" / "hf", PACKAGE / "insight", PACKAGE / "observe"}
REPORTS |= {PACKAGE / "training" / "dry_run.py", PACKAGE / "training" / "about.py"}

# every class of settings by its place in the tree
ALL: dict[str, type[SettingsGroup]] = {"": RunConfig, **GROUPS, "optim.overrides[]": ParamGroupOverride}

# setting -> why the analysis cannot see its reads
NOT_SEEN = {
    "model.preset": "loading puts the fields that it stands for beside it",
    "experimental": "config.experimental.require asks any object that has it",
}


@functools.cache
def reads_of_the_package(overlook: tuple[str, ...] = ()) -> frozenset[tuple[str, str]]:
    """What the package reads, with every occurrence of ``overlook`` in the source replaced by None."""
    trees, settings_trees = [], []
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text("utf-8")
        for part in overlook:
            text = text.replace(part, "None")
        if CONFIG in file.parents:
            settings_trees.append(ast.parse(text))
        elif not REPORTS & {file, *file.parents}:
            trees.append(ast.parse(text))
    class_names = frozenset(group.__name__ for group in ALL.values())
    return frozenset(Program(trees, settings_trees, class_names).find_reads())


def unread(groups: dict[str, type[SettingsGroup]], overlook: tuple[str, ...] = ()) -> set[str]:
    """Dotted names of the fields of ``groups``, except nested groups, that no code of the package reads."""
    reads = reads_of_the_package(overlook)
    return {
        f"{place}.{field}" if place else field
        for place, group in groups.items()
        for field in group.model_fields.keys() - group.nested_groups.keys()
        if (group.__name__, field) not in reads
    }


def test_every_setting_is_read_through_its_group():
    assert unread(ALL) == NOT_SEEN.keys()


def test_a_setting_that_is_no_longer_read_is_found():
    readers = (
        "run.config.checkpoint.every",
        "run.config.checkpoint.keep",
        "run.config.optim.clip_norm",
        "scale.window",
    )
    forgotten = {"checkpoint.every", "checkpoint.keep", "optim.clip_norm", "precision.loss_scale.window"}
    assert unread(ALL, readers) == NOT_SEEN.keys() | forgotten


# a name that does not exist, and two that are read through other groups
@pytest.mark.parametrize(
    ("place", "name"),
    [(p, n) for p, group in ALL.items() for n in ("surplus", "num_layers", "eps") if n not in group.model_fields],
)
def test_a_new_setting_that_nothing_reads_is_found(place, name):
    group = ALL[place]
    grown = create_model(group.__name__, __base__=group, **{name: (int, 1)})
    assert unread({place: grown}) - NOT_SEEN.keys() == {f"{place}.{name}" if place else name}


SETTINGS = """
class Inner:
    depth: int

class Outer:
    inner: Inner | None
    width: int
    entries: tuple[Inner, ...]

    def area(self):
        return self.width

def outside(outer: Outer):
    return outer.width
"""
WIDTH, DEPTH = ("Outer", "width"), ("Inner", "depth")


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("def f(outer: Outer): return outer.width", {WIDTH}),
        ("def f(outer: Outer): return outer.inner.depth", {DEPTH}),
        ("def f(outer: Outer | None): return outer.width", {WIDTH}),
        ("def f(outer: 'Outer'): return outer.width", {WIDTH}),
        ("def f(outer: Outer):\n    inner = outer.inner\n    return inner.depth", {DEPTH}),
        ("def f(outer: Outer):\n    o, i = outer, outer.inner\n    return o.width, i.depth", {WIDTH, DEPTH}),
        ("def f(outer: Outer):\n    if (inner := outer.inner): return inner.depth", {DEPTH}),
        ("def f(outer: Outer): return [entry.depth for entry in outer.entries]", {DEPTH}),
        ("def f(entries: Sequence[Inner]):\n    for entry in entries: print(entry.depth)", {DEPTH}),
        ("def f(outer: Outer): return (lambda: outer.width)()", {WIDTH}),
        ("def f() -> Outer: ...\ndef g(): return f().width", {WIDTH}),
        ("class C:\n    outer: Outer\ndef f(c: C): return c.outer.inner.depth", {DEPTH}),
        ("class C:\n    outer: Outer\nclass D(C): ...\ndef f(d: D): return d.outer.width", {WIDTH}),
        ("class C:\n    outer: Outer\nclass D(C[int]): ...\ndef f(d: D): return d.outer.width", {WIDTH}),
        (
            """
            class C:
                def __init__(self, outer: Outer): self.inner = outer.inner
                def f(self): return self.inner.depth
            """,
            {DEPTH},
        ),
        ("NAMES = ('width',)\ndef f(outer: Outer): return [getattr(outer, name) for name in NAMES]", {WIDTH}),
        ("def f(outer: Outer): return outer.area()", {WIDTH}),  # what is read by a method that others call
        ("def f(outer: Outer): return outside(outer)", {WIDTH}),
        ("def f(outer): return outer.width", set()),
        ("def f(other: Other): return other.width", set()),
        ("def f(outer: Outer): outer.width = 3", set()),
        ("def f(outer: Outer): return 'outer.width'", set()),
        ("def f(inner: Inner): return inner.width", set()),
        ("def f(outer: Outer): return getattr(outer, 'w' + 'idth')", set()),
    ],
)
def test_a_read_is_known_when_it_is_seen(code, reads):
    trees = [ast.parse(textwrap.dedent(code))]
    found = Program(trees, [ast.parse(SETTINGS)], frozenset({"Outer", "Inner"})).find_reads()
    assert found & {WIDTH, DEPTH} == reads
