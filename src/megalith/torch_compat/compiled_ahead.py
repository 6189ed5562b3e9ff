"""Functions that torch.compile builds ahead of their calls: they run without its checks, and are kept in files.

torch.compile(...).aot_compile                experimental; builds for given arguments
AOTCompiledFunction.guard_check, .fn          private; whether the code fits arguments, and the code itself
AOTCompiledFunction.save_compiled_function    experimental
torch.compiler.load_compiled_function         experimental
torch._inductor...cache_dir                   private; the folder of torch's compile cache
torch._inductor.config                        private; what code depends on besides the function
torch._dynamo.config.enable_aot_compile       private; whether the first of these exists
torch._dynamo.config.record_runtime_overhead  private; whether compiled code times what precedes it
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._inductor import config as inductor_config
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir

from megalith.torch_compat.compiler import FORMULA

__all__ = [
    "CompiledAhead",
    "InductorError",
    "cache_folder",
    "can_compile_ahead",
    "compile_ahead",
    "load_ahead",
    "settings_of_the_compiler",
]

R = TypeVar("R")
_TIMES_CALLS = "record_runtime_overhead"


class CompiledAhead(Generic[R]):
    """Code for one function and all arguments that satisfy what was assumed when it was built."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.run: Callable[..., R] = compiled.fn

    def fits(self, *arguments: object) -> bool:
        """Whether ``run`` computes the function for tensors like those in ``arguments``."""
        return bool(self._compiled.guard_check(*arguments))

    def save(self, path: Path) -> None:
        """Writes ``path``, in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        try:
            self._compiled.save_compiled_function(name)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def can_compile_ahead() -> bool:
    """Whether this torch has what the functions below need, and may use its compile cache."""
    exists = hasattr(torch.compiler, "load_compiled_function") and getattr(dynamo_config, "enable_aot_compile", True)
    return exists and inductor_config.fx_graph_cache and not inductor_config.force_disable_caches


def compile_ahead(function: Callable[..., R], arguments: tuple[object, ...]) -> CompiledAhead[R]:
    """Builds ``function`` for ``arguments`` with the options of a formula; other sizes fit where marked as dynamic.

    Of what is assumed, only dtypes, sizes and strides are checked by ``CompiledAhead.fits``: not constants, what
    closures hold otherwise, or torch's global state. ``torch_compat.compiler.watch_compiler`` is notified.
    """
    options = {**FORMULA, "guard_filter_fn": _keep_those_of_tensors}
    whole: Any = torch.compile(function, dynamic=False, fullgraph=True, options=options)
    quietly = {_TIMES_CALLS: False} if hasattr(dynamo_config, _TIMES_CALLS) else {}
    told = callback_handler.install_callbacks(CallbackTrigger.DYNAMO, function.__qualname__)
    with told, dynamo_config.patch(quietly):
        return CompiledAhead(whole.aot_compile((arguments, {})))


def _keep_those_of_tensors(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]


def load_ahead(path: Path, function: Callable[..., R]) -> CompiledAhead[R]:
    """Loads what ``CompiledAhead.save`` wrote for ``function``."""
    same = inductor_config.patch(FORMULA)  # otherwise torch would not find its machine code
    with path.open("rb") as file, same:
        return CompiledAhead(torch.compiler.load_compiled_function(file, f_globals=function.__globals__))


def cache_folder() -> Path:
    """The folder of torch's compile cache (``TORCHINDUCTOR_CACHE_DIR``)."""
    return Path(cache_dir())


def settings_of_the_compiler() -> str:
    """All settings of Inductor, which users may have changed."""
    return repr(sorted(inductor_config.save_config_portable().items()))
