"""docs/coming_from_megatron.md: the modules and settings it names exist, and each Megatron module is listed once."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from megalith.config.settings_tree import FIELDS
from tests.docs.pages import page

PAGE = page("coming_from_megatron.md")
OURS = sorted(set(re.findall(r"`(megalith(?:\.\w+)+)`", PAGE)))
THEIRS = re.findall(r"`((?:core|training|legacy)/[\w/]*(?:\.py|/))`", PAGE)
FLAGS = PAGE.partition("\n## Flags\n")[2].partition("\n## ")[0]
GROUPS = {name.partition(".")[0] for name in FIELDS if "." in name}
SETTINGS = sorted({name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", PAGE) if name.partition(".")[0] in GROUPS})
MODULES = [
    line
    for line in (Path(__file__).parent / "megatron_modules.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


def resolve(name: str) -> object:
    """The module or attribute with the dotted ``name``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", OURS)
def test_every_name_of_ours_can_be_imported(name):
    found = resolve(name)
    module, _, attribute = name.rpartition(".")
    public = getattr(resolve(module), "__all__", None)
    assert public is None or attribute in public or isinstance(found, ModuleType)


def test_no_module_of_theirs_is_listed_twice():
    assert sorted(module for module in set(THEIRS) if THEIRS.count(module) > 1) == []


def test_every_module_of_theirs_is_listed_or_in_a_folder_that_is():
    folders = tuple(module for module in THEIRS if module.endswith("/"))
    assert [module for module in MODULES if module not in THEIRS and not module.startswith(folders)] == []


def test_every_module_that_is_listed_is_theirs():
    assert [module for module in THEIRS if not any(name.startswith(module) for name in MODULES)] == []


def test_every_setting_that_is_named_exists():
    assert len(SETTINGS) > 50
    assert [name for name in SETTINGS if name not in FIELDS] == []


def test_every_setting_has_a_row_among_the_flags_or_is_ours_alone():
    ours_alone = {
        "model.preset",
        "train.compile",
        "train.compile_fusions",
        "checkpoint.keep",
        "checkpoint.keep_best",
        "optim.sgd.nesterov",
    }
    ours_alone |= {name for name in FIELDS if name.startswith("train.generation.")} | {"train.poison_buffers"}
    ours_alone |= {name for name in FIELDS if name.startswith("model.rope.scaling.")} | {
        "model.rope.local_base",
        "model.mla.norm_epsilon",
    }
    ours_alone |= {f"model.attention.{name}" for name in ("logit_softcap", "scale", "output_bias")}
    assert [name for name in FIELDS if f"`{name}`" not in FLAGS and name not in ours_alone] == []
