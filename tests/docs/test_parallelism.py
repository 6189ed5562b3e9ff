"""docs/parallelism.md: its cost table matches Megalith's counts, and its program prints the output shown."""

import contextlib
import io
import re
from collections import Counter
from typing import Any

import pytest

from megalith.config import load_run
from megalith.training.tasks.choose import task_of
from megalith.training.traffic import step_traffic
from tests.docs.pages import page, python_blocks

PAGE = page("parallelism.md")
COSTS = re.findall(r"^\| (.*?) ?\| (\w+) \| `(.+?)` \| `(.+?)` \| .* \|$", PAGE, re.MULTILINE)
MODEL = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 96}
MODEL |= {"kv_channels": 16, "vocab_size": 128}
# the setting in a row of the table -> settings that have it, their number of ranks and the rank described
SETTINGS: dict[str, tuple[dict[str, Any], int, int]] = {
    "`tensor`": ({"tensor": 2}, 2, 0),
    "`tensor`, `sequence`": ({"tensor": 4, "sequence": True}, 4, 1),
    "`context`, ring": ({"tensor": 2, "context": 4}, 8, 0),
    "`context`, all_gather": ({"tensor": 2, "context": 4, "context_method": "all_gather"}, 8, 3),
    "`context`, all_to_all": ({"tensor": 2, "context": 2, "context_method": "all_to_all"}, 4, 0),
    "`pipeline`, inner rank": ({"pipeline": 3}, 3, 1),
    "`shard`": ({"shard": 4, "replicate": 2}, 8, 5),
    "`replicate`": ({"shard": 2, "replicate": 4}, 8, 0),
}


def rows() -> dict[str, Counter[tuple[str, str, str]]]:
    """For each setting, its rows of the table: (collective, how many, bytes of each)."""
    found: dict[str, Counter[tuple[str, str, str]]] = {}
    for setting, *row in COSTS:
        name = setting or name  # noqa: F821
        found.setdefault(name, Counter())[tuple(row)] += 1
    return found


def value(formula: str, letters: dict[str, int]) -> int:
    """``2 m (W - 1)`` for m=3 and W=2 is 6; products are written without an operator."""
    return int(eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula).replace("/", "//"), dict(letters)))


def test_the_table_has_a_row_for_every_setting():
    assert rows().keys() == SETTINGS.keys()


@pytest.mark.parametrize("setting", SETTINGS)
def test_its_formulas_are_what_is_counted(setting):
    parallel, world_size, rank = SETTINGS[setting]
    tree = {
        "model": MODEL,
        "data": {"train": "text", "seq_length": 32},
        "train": {"steps": 1, "global_batch_size": 48, "micro_batch_size": 2},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "precision": {"dtype": "bfloat16"},
        "parallel": parallel,
    }
    config = load_run(tree, world_size=world_size)
    layout, axis = config.parallel.layout(world_size), setting.strip("`").partition("`")[0]
    letters = {
        "L": 6, "H": 64, "A": 8, "G": 4, "D": 16, "e": 2, "tp": layout.tensor, "shard": layout.shard,
        "T": 32 // layout.context * 2, "m": 24 // layout.data_parallel, "W": getattr(layout, axis),
        "layer": 64 * (8 + 2 * 4) * 16 + 8 * 16 * 64 + 3 * 64 * 96 + 2 * 64, "rest": 2 * 128 * 64 + 64,
    }  # fmt: skip
    counted = step_traffic(config, task_of(config), world_size, rank)
    wanted = Counter[tuple[str, int]]()
    for kind, number, size in rows()[setting]:
        wanted[kind, value(size, letters)] += value(number, letters)
    assert wanted == {(each.kind, each.num_bytes): times for each, times in counted.items() if each.axis == axis}


def test_its_program_prints_what_it_shows():
    [program] = python_blocks("parallelism.md")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "docs/parallelism.md", "exec"), {})
    shown = PAGE.partition(program)[2].split("```")[2].strip("\n")
    assert output.getvalue().strip("\n") == shown
