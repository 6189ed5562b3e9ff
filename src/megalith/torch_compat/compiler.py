"""torch.compile: what it is asked for, and what is learned from it.

torch.compile(isolate_recompiles=...)       new in 2.13, with recompile_limit=...
torch.compile of a Function                 before 2.13 loses gradients if its first output has none
torch._functorch.config.donated_buffer      private; whether a compiled backward may overwrite saved tensors
torch._inductor.config.cpp, .cpu_vec_isa    private; which vector instructions the C++ compiler is assumed to support
torch._library.triton                       private; whether wrapped kernels are launched directly
Module._compiled_call_impl                  private; what a compiled module calls
torch._dynamo.callback.callback_handler     private; is notified of each build
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._functorch import config as functorch_config

__all__ = [
    "break_graph_before_gradients_are_lost",
    "compile_apart",
    "compile_layers_",
    "compiler_is_watched",
    "keeping_what_is_saved",
    "trusting_vector_instructions",
    "uncompiled",
    "watch_compiler",
]

P = ParamSpec("P")
R = TypeVar("R")

FORMULA: dict[str, str | int | bool | Callable[..., Any]] = {
    # without this, a value rounded for storage and widened again would be used unrounded
    "emulate_precision_casts": True,
    # a product and the sum that it goes into are one FMA, rounded once; exact GELU takes three quarters of the time
    "cpp.enable_floating_point_contract_flag": "fast",
    "cpp.dynamic_threads": True,  # the same code for any number of threads, so that other layouts find it in the cache
}
_isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_apart: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 256} if _isolates else {}


def break_graph_before_gradients_are_lost() -> None:
    """Breaks the graph in the forward of a ``torch.autograd.Function`` whose first output has no gradient.

    Before 2.13, ``torch.compile`` silently gives the inputs of such a Function zero gradients, so it must run
    uncompiled. With ``fullgraph=True``, torch raises at the graph break instead.
    """
    if torch.compiler.is_compiling() and not _isolates:
        torch._dynamo.graph_break("torch before 2.13 loses the gradients of a Function whose first output has none")


def compile_apart(function: Callable[P, R]) -> Callable[P, R]:
    """Returns ``torch.compile(function)`` for static shapes, with a cache not shared with other compilations of it.

    Before 2.13 they share one cache, and its limit of eight variants; a ninth runs in eager mode.
    """
    return torch.compile(function, dynamic=False, options=FORMULA, **_apart)


def compile_layers_(layers: Sequence[nn.Module]) -> None:
    """Calls ``layer.compile()`` on each of ``layers``, in place; identical layers share their code.

    Layers with dropout are not identical, because each has its own name, so the recompile limit grows with the number
    of layers: torch's default is eight. Before 2.13 that default cannot be changed here, and later layers run in eager
    mode.
    """
    limit: dict[str, Any] = {"recompile_limit": 8 + len(layers)} if _isolates else {}
    for layer in layers:
        layer.compile(**limit)


@contextmanager
def trusting_vector_instructions() -> Iterator[None]:
    """Assumes that the C++ compiler supports this CPU's vector instructions; stays in effect unless the block raises.

    Otherwise torch checks at the first build of a process, which with an empty cache takes a 3 s build per instruction
    set. A user's own setting (``TORCHINDUCTOR_VEC_ISA_OK``) is kept.
    """
    cpp = torch._inductor.config.cpp
    given = cpp.vec_isa_ok
    cpp.vec_isa_ok = True if given is None else given
    try:
        yield
    except BaseException:
        cpp.vec_isa_ok = given
        torch._inductor.cpu_vec_isa.valid_vec_isa_list.cache_clear()  # cached under the assumption
        raise


@contextmanager
def uncompiled(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block, ``layers`` compiled by ``compile_layers_`` run in eager mode.

    For shapes that change in every call, which would recompile the layers up to the limit of variants.
    """
    calls = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, calls, strict=True):
            layer._compiled_call_impl = call


def keeping_what_is_saved() -> AbstractContextManager[None]:
    """Inside the block, torch.compile builds and runs backwards that do not reuse the memory of saved tensors."""
    keeping: AbstractContextManager[None] = functorch_config.patch(donated_buffer=False)
    return keeping


@contextmanager
def watch_compiler(started: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Calls ``started`` and ``ended`` around each torch.compile build in this process, in the building thread.

    The build may be requested by a fused operation, a layer or the user's own function; the caller waits for it. Nested
    builds count as part of it. Neither callback may compile.
    """
    handler = torch._dynamo.callback.callback_handler

    def begin(_: object) -> None:
        started()

    def end(_: object) -> None:
        ended()

    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # already removed by torch._dynamo.reset()
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)


def compiler_is_watched() -> bool:
    """Returns whether ``watch_compiler``, or a user's own callback, is notified of torch.compile builds."""
    return bool(torch._dynamo.callback.callback_handler.start_callbacks)
