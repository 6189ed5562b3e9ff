"""Hugging Face's Llama with fusions applied by the code in docs/use_only_the_fusions.md, as a reader would run it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["llama_of_its_own", "use_fusions"]

_PAGE = Path(__file__).parents[2] / "docs" / "use_only_the_fusions.md"
_LLAMA = "transformers.models.llama.modeling_llama"


def llama_of_its_own() -> ModuleType:
    """A second copy of Hugging Face's Llama module, because the code on the page modifies the classes of a module."""
    spec = importlib.util.find_spec(_LLAMA)
    assert spec is not None, "transformers is installed"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def use_fusions(llama: ModuleType, model: Any) -> None:
    """Runs the first Python block of the page on ``model``, whose classes come from ``llama``."""
    found = re.search(r"^```python\n(.*?)^```", _PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, "the page has a Python block"
    names: dict[str, Any] = {}
    exec(compile(found[1], str(_PAGE), "exec"), names)
    names["llama"] = llama
    names["use_fusions"](model)
