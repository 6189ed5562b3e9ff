"""Hugging Face's Llama with fusions put in by the lines of docs/use_only_the_fusions.md, as its reader has them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["llama_of_its_own", "use_fusions"]

_PAGE = Path(__file__).parents[2] / "docs" / "use_only_the_fusions.md"
_LLAMA = "transformers.models.llama.modeling_llama"


def llama_of_its_own() -> ModuleType:
    """A second copy of the module of Hugging Face's Llama: the lines of the page change the classes of a module."""
    spec = importlib.util.find_spec(_LLAMA)
    assert spec is not None, "transformers is installed"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_fusions(llama: ModuleType, model: Any) -> None:
    """Runs the first lines of Python of the page on ``model``, whose classes are those of ``llama``."""
    found = re.search(r"^```python\n(.*?)^```", _PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, "the page begins with them"
    names: dict[str, Any] = {}
    exec(compile(found[1], str(_PAGE), "exec"), names)
    names["llama"] = llama
    names["use_fusions"](model)
