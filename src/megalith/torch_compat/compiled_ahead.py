"""Functions that torch.compile builds ahead of their calls: they run without its checks, and are kept in files.

torch.compile(...).aot_compile                experimental; builds for given arguments
AOTCompiledFunction.guard_check, .fn          private; whether the code fits arguments, and the code itself
AOTCompiledFunction.save_compiled_function    experimental
torch.compiler.load_compiled_function         experimental
torch._inductor...cache_dir                   private; the folder of torch's compile cache
torch._inductor.config                        private; what code depends on besides the function
torch._dynamo.eval_frame._stance              private; what torch.compiler.set_stance has set
torch._dynamo.config.enable_aot_compile       private; whether the first of these exists: not by default in 2.11
torch._dynamo.config.record_runtime_overhead  private; whether compiled code times what precedes it
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
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
    "stance",
]

R = TypeVar("R")
_TIMES_CALLS = "record_runtime_overhead"
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)


class CompiledAhead(Generic[R]):
    """Code for one function and all arguments that satisfy what was assumed when it was built."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.run: Callable[..., R] = compiled.fn

    def fits(self, *arguments: object) -> bool:
        """Whether ``run`` computes the function for tensors like those in ``arguments``."""
        return bool(self._compiled.guard_check(*arguments))

    def save(self, path: Path) -> None:
        """Writes ``path``, in one step; everybody may read it, as what else is in torch's cache."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            self._compiled.save_compiled_function(str(unfinished))
            unfinished.chmod(0o644)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def can_compile_ahead() -> bool:
    """Whether this torch has what the functions below need, may use its compile cache, and runs no passes of a user.

    Such passes are functions, which no key describes.
    """
    exists = hasattr(torch.compiler, "load_compiled_function") and getattr(dynamo_config, "enable_aot_compile", True)
    caches = inductor_config.fx_graph_cache and not inductor_config.force_disable_caches
    return exists and caches and not any(getattr(inductor_config, name, None) for name in _PASSES)


def stance() -> str:
    """What ``torch.compiler.set_stance`` has set; "default" if nothing."""
    return str(eval_frame._stance.stance)


def compile_ahead(function: Callable[..., R], arguments: tuple[object, ...]) -> CompiledAhead[R]:
    """Builds ``function`` for ``arguments`` with the options of a formula; other sizes fit where marked as dynamic.

    Of what is assumed, only dtypes, sizes and strides are checked by ``CompiledAhead.fits``: not constants, what
    closures hold otherwise, or torch's global state. ``torch_compat.compiler.watch_compiler`` is notified.
    """
    options = {**FORMULA, "guard_filter_fn": _keep_those_of_tensors}
    whole: Any = torch.compile(function, dynamic=False, fullgraph=True, options=options)
    settings = {_TIMES_CALLS: False} if hasattr(dynamo_config, _TIMES_CALLS) else {}
    notifying = callback_handler.install_callbacks(CallbackTrigger.DYNAMO, function.__qualname__)
    with notifying, dynamo_config.patch(settings):
        return CompiledAhead(whole.aot_compile((arguments, {})))


def _keep_those_of_tensors(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]


def load_ahead(path: Path, function: Callable[..., R]) -> CompiledAhead[R]:
    """Loads what ``CompiledAhead.save`` wrote for ``function``."""
    options = inductor_config.patch(FORMULA)  # otherwise torch would not find its machine code
    with path.open("rb") as file, options:
        return CompiledAhead(torch.compiler.load_compiled_function(file, f_globals=function.__globals__))


def cache_folder() -> Path:
    """The folder of torch's compile cache (``TORCHINDUCTOR_CACHE_DIR``)."""
    return Path(cache_dir())


def settings_of_the_compiler() -> str:
    """All settings of Inductor but functions, which users may have changed."""
    return repr(sorted(inductor_config.save_config_portable().items()))
