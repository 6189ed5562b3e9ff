"""The one place that knows which torch is installed: names that differ between torch 2.11 and 2.13, or are private.

all_gather_single, reduce_scatter_single    new in 2.13, which warns of all_gather_into_tensor, reduce_scatter_tensor
torch.nn.functional.grouped_mm              torch._grouped_mm in older ones
torch.compile(isolate_recompiles=...)       new in 2.13, with recompile_limit=...
torch.compile of a Function                 before 2.13 loses gradients where its first output has none
torch._functorch.config.donated_buffer      private; whether a compiled backward may overwrite what was saved
torch._inductor.config.cpp, .cpu_vec_isa    private; which vector instructions a C++ compiler is taken to know
forward_ad._current_level                   private; whether derivatives are carried forward
torch._C._AutoDispatchBelowAutograd         private; where torch runs the implementation of an operator
torch._C._any_requires_grad                 private; asks many operands at once
torch.ops.mkldnn._is_mkldnn_bf16_supported  private; whether a CPU multiplies numbers of 16 bits natively
torch._library.triton                       private; whether wrapped kernels are launched as they are
distributed_c10d._process_group_name        private; names a new process group
FSDPModule._get_fsdp_state()                private; ends a backward by hand
Module._compiled_call_impl                  private; what a compiled module calls
Module._forward_hooks, _forward_pre_hooks   private; what calls of a module also call
Module._modules, _parameters, _buffers      private; what a module consists of, as dicts
distributed_c10d._abort_process_group       private; ends process groups that NCCL would wait for
torch.distributed._symmetric_memory         private; memory that other GPUs read
torch.distributed._tools.mem_tracker        private; bytes of live tensors by category, also of fake ones
torch.testing._internal...fake_pg           private; registers the process group whose collectives do nothing
torch.cuda.is_current_stream_capturing      raises where torch was built without CUDA
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

__all__ = [
    "DEPENDS_ON_VALUES",
    "ForwardParts",
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

# the state of torch in which the implementation of an operator runs: nothing is recorded
below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
symmetric_memory = _symmetric_memory
# raised where tensors without values, of ``fake_tensors``, would have to have some
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_grouped_mm = torch.nn.functional.grouped_mm if hasattr(torch.nn.functional, "grouped_mm") else torch._grouped_mm
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

# else a number that is rounded to be stored and widened to be used would be used as it was before
_ROUNDS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
_isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_apart: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 256} if _isolates else {}


def abort_process_groups() -> None:
    """Ends every process group of NCCL without waiting for collectives in flight."""
    distributed_c10d._abort_process_group()


def break_graph_before_gradients_are_lost() -> None:
    """Called in the forward of a ``torch.autograd.Function`` whose first output has no gradient: run it uncompiled.

    Before 2.13 ``torch.compile`` gives the inputs of such a Function zero as their gradient, without a word. With
    ``fullgraph=True`` torch raises there instead.
    """
    if torch.compiler.is_compiling() and not _isolates:
        torch._dynamo.graph_break("torch before 2.13 loses the gradients of a Function whose first output has none")


def compile_apart(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compile(function)`` for static shapes, whose code nothing else that compiles ``function`` looks through.

    Before 2.13 they share it, and its eight variants; a ninth runs in plain torch.
    """
    return torch.compile(function, dynamic=False, options=_ROUNDS, **_apart)


def compile_layers_(layers: Sequence[nn.Module]) -> None:
    """``layer.compile()`` of each of ``layers``, in place; layers alike share their code.

    Layers that drop elements are not alike, because each has a name of its own, so the limit of variants follows their
    number: torch gives up at eight. Before 2.13 that limit is torch's own, and later layers run in plain torch.
    """
    limit: dict[str, Any] = {"recompile_limit": 8 + len(layers)} if _isolates else {}
    for layer in layers:
        layer.compile(**limit)


@contextmanager
def trusting_vector_instructions() -> Iterator[None]:
    """Takes it that the C++ compiler knows the vector instructions of this CPU; from then on, unless the block raises.

    Else torch finds out at the first build of a process, which on an empty cache is a build of 3 s for each kind of
    them. What a user has set (``TORCHINDUCTOR_VEC_ISA_OK``) stays.
    """
    cpp = torch._inductor.config.cpp
    given = cpp.vec_isa_ok
    cpp.vec_isa_ok = True if given is None else given
    try:
        yield
    except BaseException:
        cpp.vec_isa_ok = given
        torch._inductor.cpu_vec_isa.valid_vec_isa_list.cache_clear()  # what it took for granted
        raise


@contextmanager
def uncompiled(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, ``layers`` that ``compile_layers_`` has compiled run in plain torch.

    Where the shapes change in every call they would be compiled again and again, up to the limit of variants.
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
    """Whether a forward of ``model`` also calls hooks, of one of its modules or of all modules there are."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class ForwardParts:
    """What a forward through ``modules`` uses: them, their weights, buffers and hooks, as they are when this is made.

    Held, so that none can be freed and another one get its identity.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # dicts that torch changes in place, looked up once: this is asked for every token
        self._parts = [parts for x in modules for parts in (x._modules, x._parameters, x._buffers)]
        self._hooks = [hooks for x in modules for hooks in (x._forward_hooks, x._forward_pre_hooks)]
        self._hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
        self._own = [vars(x) for x in modules]  # where one may hide the method of its class
        self._held = self._found()

    def are_in_place(self) -> bool:
        """Whether they are still the same ones."""
        found = self._found()
        return len(found) == len(self._held) and all(map(operator.is_, found, self._held))

    def _found(self) -> list[object]:
        found: list[object] = [part for parts in self._parts for part in parts.values()]
        found += [own["forward"] for own in self._own if "forward" in own]
        if any(self._hooks):
            found += [hook for hooks in self._hooks for hook in hooks.values()]
        return found


def keeping_what_is_saved() -> AbstractContextManager[None]:
    """While it lasts, torch.compile builds and runs backwards that do not reuse the memory of what was saved."""
    keeping: AbstractContextManager[None] = functorch_config.patch(donated_buffer=False)
    return keeping


def is_capturing() -> bool:
    """Whether what is launched here goes into a CUDA graph, whose replays repeat every number that the host gives."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_intercepted() -> bool:
    """Whether something looks at the operators that are called here: torch.compile, a dispatch mode, torch.func.

    Fake tensors, torch.export and selective checkpointing are dispatch modes.
    """
    return torch.compiler.is_compiling() or _num_dispatch_modes() > 0 or _functorch_is_active()


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether torch's products of ``dtype``, one of 16 bits, use instructions that this CPU has for them."""
    if not torch.backends.mkldnn.is_available():
        return False
    library = torch.ops.mkldnn
    is_supported = library._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else library._is_mkldnn_fp16_supported
    return bool(is_supported())


def launching_directly() -> AbstractContextManager[None]:
    """While it lasts, ``torch.library.wrap_triton(kernel)`` launches the kernel, as nothing traces it."""
    direct: AbstractContextManager[None] = set_wrap_triton_enabled(False)
    return direct


def forward_mode_is_on() -> bool:
    """Whether torch.func.jvp, or a level of torch.autograd.forward_ad, carries derivatives forward here."""
    return forward_ad._current_level >= 0


@contextmanager
def watch_compiler(started: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Calls ``started`` and ``ended`` around each build of torch.compile in this process, in the thread that builds.

    Whoever asked for the build, a fused operation, a layer, or a function of the user's own, waits for it. What a build
    makes it build is part of it. Neither function may compile.
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
        with suppress(ValueError):  # torch._dynamo.reset() has removed them
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)


def compiler_is_watched() -> bool:
    """Whether ``watch_compiler``, or a callback of a user's own, hears of each build of torch.compile."""
    return bool(torch._dynamo.callback.callback_handler.start_callbacks)


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """This process is rank 0 of ``world_size``, of which the others are not there: collectives return at once."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=0, world_size=world_size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_tensors() -> AbstractContextManager[object]:
    """Tensors made inside have shapes and no memory; those from outside are taken for such."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def bytes_of_tensors(model: nn.Module) -> Iterator[Callable[[str], int]]:
    """Counts tensors that live inside, but for the parameters and buffers of ``model`` and their gradients.

    Gives a function of "current" and "peak": bytes now, and when all tensors together were largest.
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
    """Fills ``out`` [W n, ...] with the ``x`` [n, ...] of each rank of ``group``, in its order; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _all_gather(out, x, group=group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """Fills ``out`` [n, ...] with this rank's part of the sum over ``group`` of ``x`` [W n, ...]; all contiguous.

    As everywhere in torch.distributed, None is the default group.
    """
    _reduce_scatter(out, x, group=group)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows or columns, each up to one of ``ends`` int32 [E], in the dtype of ``a``.

    [R, n] with [E, n, m] -> [R, m], whose rows after the last group are not written; [m, R] with [R, n] -> [E, m, n].
    """
    y: Tensor = _grouped_mm(a, b, offs=ends)
    return y


def end_backward(root: FSDPModule) -> None:
    """What FSDP2 does when a backward through ``root`` has ended, for gradients that were computed outside of one.

    torch calls it at the end of each backward. It takes care of every unit whose turn has not come, here all of them.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def new_group(
    ranks: Sequence[int], backend: str | None, timeout: timedelta | None, pg_options: object | None
) -> ProcessGroup:
    """A process group of ``ranks``, of the default group, made by these ranks alone.

    torch would name it by its ranks and the number of groups that this process has, and its members find each other
    under that name in the store of the default group. Where they have different numbers of other groups they would
    wait for each other in vain; where a group of the same ranks was destroyed they would find what it left behind, and
    fail to connect. Here the name is the ranks and how many groups these ranks have made, counted in that store.

    gloo's connections are made here, and a rank that has all of its own would be free to destroy them while two others
    still connect, which then fail; so all wait in the store for the last. NCCL connects at the first collective.
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
