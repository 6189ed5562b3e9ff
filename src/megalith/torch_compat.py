"""The only place that knows torch versions: names that are private, or differ between torch 2.11 and 2.13.

all_gather_single, reduce_scatter_single    new in 2.13, which deprecates all_gather_into_tensor, reduce_scatter_tensor
torch.nn.functional.grouped_mm              torch._grouped_mm in older versions
torch.compile(isolate_recompiles=...)       new in 2.13, with recompile_limit=...
torch.compile of a Function                 before 2.13 loses gradients if its first output has none
torch._functorch.config.donated_buffer      private; whether a compiled backward may overwrite saved tensors
torch._inductor.config.cpp, .cpu_vec_isa    private; which vector instructions the C++ compiler is assumed to support
forward_ad._current_level                   private; whether forward-mode AD is active
torch._C._AutoDispatchBelowAutograd         private; the dispatch state in which an operator's implementation runs
torch._C._any_requires_grad                 private; checks many operands at once
torch.ops.mkldnn._is_mkldnn_bf16_supported  private; whether a CPU multiplies 16-bit numbers natively
torch.ops.mkldnn._linear_pointwise          private; a linear layer by oneDNN, bias included
torch._library.triton                       private; whether wrapped kernels are launched directly
distributed_c10d._process_group_name        private; names a new process group
FSDPModule._get_fsdp_state()                private; ends a backward manually
torch.distributed.fsdp...ReduceScatter      private; the base of custom reductions of FSDP2
Module._compiled_call_impl                  private; what a compiled module calls
Module._forward_hooks, _forward_pre_hooks   private; hooks that run when a module is called
Module._modules, _parameters, _buffers      private; the contents of a module, as dicts
distributed_c10d._abort_process_group       private; ends process groups that NCCL would wait for
torch.distributed._symmetric_memory         private; memory that other GPUs can read
torch.distributed._tools.mem_tracker        private; bytes of live tensors by category, including fake ones
torch.testing._internal...fake_pg           private; registers the process group whose collectives do nothing
torch.cuda.is_current_stream_capturing      raises if torch was built without CUDA
"""

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._functorch import config as functorch_config
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, _symmetric_memory, distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = [
    "DEPENDS_ON_VALUES",
    "ForwardParts",
    "ReduceScatter",
    "abort_process_groups",
    "all_gather_into",
    "any_requires_grad",
    "below_autograd",
    "break_graph_before_gradients_are_lost",
    "bytes_of_tensors",
    "compile_apart",
    "compile_layers_",
    "compiler_is_watched",
    "end_backward",
    "fake_ranks",
    "fake_tensors",
    "forward_mode_is_on",
    "grouped_mm",
    "has_forward_hooks",
    "is_capturing",
    "is_intercepted",
    "keeping_what_is_saved",
    "launching_directly",
    "linear_in_onednn",
    "multiplies_natively",
    "new_group",
    "reduce_scatter_into",
    "symmetric_memory",
    "trusting_vector_instructions",
    "uncompiled",
    "watch_compiler",
]

P = ParamSpec("P")
R = TypeVar("R")

# the dispatch state in which an operator's implementation runs: autograd records nothing
below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
symmetric_memory = _symmetric_memory
# raised when the values of ``fake_tensors``, which have none, are needed
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_grouped_mm = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

_FORMULA: dict[str, str | int | bool | Callable[..., Any]] = {
    # without this, a value rounded for storage and widened again would be used unrounded
    "emulate_precision_casts": True,
    # a product and the sum that it goes into are one FMA, rounded once; exact GELU takes three quarters of the time
    "cpp.enable_floating_point_contract_flag": "fast",
    "cpp.dynamic_threads": True,  # the same code for any number of threads, so that other layouts find it in the cache
}
_isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_apart: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 256} if _isolates else {}


def abort_process_groups() -> None:
    """Aborts all NCCL process groups without waiting for collectives in flight."""
    distributed_c10d._abort_process_group()


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
    return torch.compile(function, dynamic=False, options=_FORMULA, **_apart)


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


def has_forward_hooks(model: nn.Module) -> bool:
    """Returns whether a forward of ``model`` also calls hooks, either of one of its modules or global ones."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class ForwardParts:
    """A snapshot of what a forward through ``modules`` uses: submodules, parameters, buffers and hooks.

    It holds references, so that no part can be freed and its id reused.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # torch changes these dicts in place; they are looked up once because the check runs for every token
        self._parts = [parts for x in modules for parts in (x._modules, x._parameters, x._buffers)]
        self._hooks = [hooks for x in modules for hooks in (x._forward_hooks, x._forward_pre_hooks)]
        self._hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
        self._own = [vars(x) for x in modules]  # an instance attribute may shadow the class's method
        self._held = self._found()

    def are_in_place(self) -> bool:
        """Returns whether all parts are still the same objects."""
        found = self._found()
        return len(found) == len(self._held) and all(map(operator.is_, found, self._held))

    def _found(self) -> list[object]:
        found: list[object] = [part for parts in self._parts for part in parts.values()]
        found += [own["forward"] for own in self._own if "forward" in own]
        if any(self._hooks):
            found += [hook for hooks in self._hooks for hook in hooks.values()]
        return found


def keeping_what_is_saved() -> AbstractContextManager[None]:
    """Inside the block, torch.compile builds and runs backwards that do not reuse the memory of saved tensors."""
    keeping: AbstractContextManager[None] = functorch_config.patch(donated_buffer=False)
    return keeping


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being captured, whose replays reuse every host value passed during capture.

    False while torch.compile traces: torch 2.11 cannot trace the query.
    """
    return (
        not torch.compiler.is_compiling() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


def is_intercepted() -> bool:
    """Returns whether operator calls are intercepted: by torch.compile, a dispatch mode or torch.func.

    Fake tensors, torch.export and selective checkpointing are dispatch modes.
    """
    return torch.compiler.is_compiling() or _num_dispatch_modes() > 0 or _functorch_is_active()


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Returns whether torch's matrix products of a 16-bit ``dtype`` use native instructions of this CPU."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    library = torch.ops.mkldnn
    is_supported = library._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else library._is_mkldnn_fp16_supported
    return bool(is_supported())


def linear_in_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b, computed by oneDNN on the CPU with a single rounding; autograd cannot record it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def launching_directly() -> AbstractContextManager[None]:
    """Inside the block, ``torch.library.wrap_triton(kernel)`` launches the kernel directly, since nothing traces it."""
    direct: AbstractContextManager[None] = set_wrap_triton_enabled(False)
    return direct


def forward_mode_is_on() -> bool:
    """Returns whether forward-mode AD (torch.func.jvp or a torch.autograd.forward_ad level) is active."""
    return forward_ad._current_level >= 0


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


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of ``world_size``; the other ranks do not exist, and collectives return at once."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=0, world_size=world_size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> AbstractContextManager[object]:
    """Inside the block, tensors have shapes but no memory; tensors from outside are treated as such."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def bytes_of_tensors(model: nn.Module) -> Iterator[Callable[[str], int]]:
    """Counts tensors that are alive inside the block, except ``model``'s parameters, buffers and gradients.

    Yields a function of "current" (bytes now) or "peak" (bytes when the total of all tensors was largest).
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model)

    def counted(when: str) -> int:
        found = tracker.get_tracker_snapshot(when)
        return sum(
            count
            for by_category in found.values()
            for category, count in by_category.items()
            if getattr(category, "name", "") in ("ACT", "TEMP", "OTH")
        )

    with tracker:
        yield counted


def all_gather_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [W n, ...] with the ``x`` [n, ...] of each rank of ``group``, in rank order; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _all_gather(out, x, group=group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [n, ...] with this rank's part of the sum of ``x`` [W n, ...] over ``group``; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _reduce_scatter(out, x, group=group)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Returns products of groups of rows or columns, each ending at one of ``ends`` int32 [E], in the dtype of ``a``.

    [R, n] with [E, n, m] -> [R, m], whose rows after the last group are not written; [m, R] with [R, n] -> [E, m, n].
    """
    y: Tensor = _grouped_mm(a, b, offs=ends)
    return y


def end_backward(root: FSDPModule) -> None:
    """Runs FSDP2's end-of-backward work on ``root``, for gradients computed outside of a backward through it.

    torch calls this at the end of each backward. It handles every unit that has not been processed yet, here all of
    them.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def new_group(
    ranks: Sequence[int], backend: str | None, timeout: timedelta | None, pg_options: object | None
) -> ProcessGroup:
    """Returns a process group of ``ranks``, of the default group, created by these ranks alone.

    torch names a group by its ranks and the number of groups that this process has, and its members find each other
    under that name in the default group's store. If they have different numbers of other groups, they would wait for
    each other forever; if a group of the same ranks was destroyed, they would find its stale entries and fail to
    connect. Here the name consists of the ranks and how many groups these ranks have created, counted in that store.

    gloo connects here. A rank that has all its connections could destroy them while two others are still connecting,
    which would then fail; so all wait in the store for the last one. NCCL connects at the first collective.
    """
    text = hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()
    store = distributed_c10d._get_default_store()
    count = store.add(f"megalith/{text}/{dist.get_rank()}", 1)
    naming = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: distributed_c10d.GroupName(f"{text}-{count}")
    try:
        group: ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=pg_options, use_local_synchronization=True
        )
    finally:
        distributed_c10d._process_group_name = naming
    if "gloo" in dist.get_backend_config(group):
        connected = f"megalith/{text}-{count}/connected"
        if store.add(connected, 1) == len(ranks):
            store.set(f"{connected}/all", "")
        store.wait([f"{connected}/all"], timeout or distributed_c10d.default_pg_timeout)
    return group
