"""An iteration as one CUDA graph: forward and backward of all its micro-batches, launched by a single call.

Where kernels are short, the GPU waits for the host to launch them. A replay of a graph launches all of them at once. It
runs the kernels of the captured call on the same memory and with the same numbers from Python, and none of the
function's Python. What differs from call to call must therefore be the values of a tensor.
"""

import logging
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megalith.errors import ConfigError

__all__ = ["FullCudaGraph", "Recorder"]

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, complex, str, NoneType, torch.dtype, torch.device)
_MANY_KINDS = 8


class Recorder(Protocol):
    """Records the kernels that a function launches: the part of a graph that needs a GPU."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Returns ``function()``, run where it would be captured."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Returns ``function()``, whose kernels are recorded but do not run: its tensors have no values yet."""

    def replay(self) -> None:
        """Runs the recorded kernels."""


class _Captured(NamedTuple):
    output: Any
    gradients: list[Tensor | None]


class FullCudaGraph:
    """Wraps ``function``, which is captured after ``num_warmups`` calls with inputs of one kind, and then replayed.

    Inputs are of another kind if their structure differs, a shape or dtype, a value that is not a tensor, the memory of
    a parameter, or the mode of autograd or autocast. The function then runs, and is captured again, as at first; only
    the last graph is kept. On a CPU there are no graphs, and every call runs the function.

    The function gets the inputs with their tensors copied to ``device``, always to the same memory. The caller gets
    copies of what it returns. It must not read the values of a tensor in Python, nor make tensors whose size depends on
    them, and may write only to tensors that it makes, to persistent ones, and to gradients. Dropout and
    ``fused_adamw_`` refuse to be captured, because a replay would repeat the numbers of a step. Everything else that
    Python decides is as in the captured call, such as ``model.training`` and ``fusions.use``; ``reset`` begins anew.

    Gradients are those of one call: before each, ``zero_grad()`` must have set them to None. The graph owns their
    memory, and its next replay overwrites them. So it does with the memory of activations, which nothing else can use
    while the graph exists.

    Tested on a CPU with a recorder that repeats calls of operators, and not yet on a GPU, where the same was done by
    hand with models and layers of this library.

    Args:
        function: forward and backward of an iteration, or the forward of an evaluation. Its inputs are tensors, numbers
            and strings, in any nesting of tuples, lists and dicts; its result is of tensors in such a nesting.
        parameters: what gets gradients.
        device: where the function runs.
        num_warmups: at least 1, so that nothing is captured that happens only once.

    Raises:
        ConfigError: ``num_warmups`` is too small, an input is of another class, a parameter has a gradient before a
            call, or the function cannot be captured; parameters then have no gradients.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        num_warmups: int = 2,
    ) -> None:
        if num_warmups < 1:
            raise ConfigError(f"num_warmups must be at least 1, because kernels are compiled first; got {num_warmups}")
        self._function = function
        self._parameters = [*parameters]
        self._device = device
        self._num_warmups = num_warmups
        self._num_kinds = 0
        self.reset()

    @property
    def is_captured(self) -> bool:
        """Whether a call with inputs of the same kind as in the last one replays a graph."""
        return self._captured is not None

    def reset(self) -> None:
        """Frees the graph and its memory, except for gradients that parameters still have."""
        self._kind: object = None
        self._buffers: list[Tensor] = []
        self._num_runs = 0
        self._recorder: Recorder | None = None
        self._captured: _Captured | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Returns ``function(*inputs)``, and leaves its gradients in the parameters."""
        if any(parameter.grad is not None for parameter in self._parameters):
            raise ConfigError("parameters have gradients before an iteration; call zero_grad(set_to_none=True) first")
        leaves, structure = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = structure, [_kind_of(leaf) for leaf in leaves], self._circumstances()
        if kind != self._kind:
            self._begin(kind, tensors)
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        buffers = iter(self._buffers)
        given = [next(buffers) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._run(pytree.tree_unflatten(given, structure))

    def _circumstances(self) -> list[object]:
        type_ = self._device.type
        autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
        return [torch.is_grad_enabled(), autocast, *(parameter.data_ptr() for parameter in self._parameters)]

    def _begin(self, kind: object, tensors: list[Tensor]) -> None:
        self.reset()  # first, so that two graphs never need memory at once
        self._kind = kind
        self._buffers = [torch.empty(x.shape, dtype=x.dtype, device=self._device) for x in tensors]
        self._recorder = _recorder_on(self._device)
        self._num_kinds += 1
        if self._num_kinds == _MANY_KINDS and self._recorder is not None:
            log.warning(
                "the inputs of a CUDA graph have changed shape or value %d times; each time the iteration runs without "
                "a graph %d times, and is captured again. Pad inputs to one shape, and pass what changes as tensors",
                _MANY_KINDS - 1,
                self._num_warmups,
            )

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        if self._recorder is None:
            return _copied(self._function(*inputs))
        if self._num_runs < self._num_warmups:
            self._num_runs += 1
            return _copied(self._recorder.warm_up(lambda: self._function(*inputs)))
        if self._captured is None:
            self._captured = self._capture(self._recorder, inputs)
        self._recorder.replay()
        for parameter, gradient in zip(self._parameters, self._captured.gradients, strict=True):
            parameter.grad = gradient
        return _copied(self._captured.output)

    def _capture(self, recorder: Recorder, inputs: tuple[Any, ...]) -> _Captured:
        try:
            output = recorder.capture(lambda: self._function(*inputs))
        except Exception as error:
            self.reset()
            for parameter in self._parameters:
                parameter.grad = None
            if not isinstance(error, RuntimeError):
                raise
            first = error.__context__ or error  # ending a capture that has failed raises another error
            raise ConfigError(
                f"the iteration cannot be captured in a CUDA graph: {str(first).splitlines()[0]}; it must not read "
                "values of tensors in Python, with .item(), .tolist() or nonzero(), nor depend on them; or run it "
                "without a graph"
            ) from error
        return _Captured(output, [parameter.grad for parameter in self._parameters])


class _CudaRecorder:
    """A CUDA graph, captured on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Any]) -> Any:
        # other threads may pin memory meanwhile, for the next batch
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            return function()

    def replay(self) -> None:
        self._graph.replay()


def _recorder_on(device: torch.device) -> Recorder | None:
    return None if device.type == "cpu" else _CudaRecorder(device)


def _kind_of(leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        return Tensor, leaf.shape, leaf.dtype
    if not isinstance(leaf, _PLAIN):
        raise ConfigError(
            f"a CUDA graph takes tensors, numbers and strings, in tuples, lists and dicts; got {type(leaf).__name__}; "
            "pass its tensors"
        )
    return type(leaf), leaf


def _copied(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), output)
