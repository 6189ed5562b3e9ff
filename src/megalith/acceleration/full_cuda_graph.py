"""An iteration as one CUDA graph: forward and backward of all its micro-batches, launched by a single call.

Where kernels are short, the GPU waits for the host to launch them. A replay of a graph launches all of them in one
call. It runs the kernels of the captured call on the same memory and with the same numbers from Python, and none of the
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

__all__ = ["FullCudaGraph"]

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, complex, str, NoneType, torch.dtype, torch.device)
_MANY_KINDS = 8
_FAILED: list["_Recorder"] = []  # kept, because torch's allocator may refer to a graph whose capture has failed


class _Recorder(Protocol):
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

    The function gets the inputs with their tensors copied to ``device``, always to the same memory, and the caller gets
    copies of the result. The function

    - must not read the values of a tensor in Python, nor make tensors whose size depends on them;
    - may write only to tensors that it makes, to those that outlive it, and to gradients;
    - may read tensors that are neither inputs nor parameters, such as buffers, if they stay in the same memory;
    - must contain the whole of an autocast region, or be called in one with ``cache_enabled=False``.

    Dropout and ``fused_adamw_`` refuse to be captured, because a replay would repeat the numbers of a step. Everything
    else that Python decides is as in the captured call, such as ``model.training`` and ``fusions.use``; ``reset``
    begins anew. No loss of an earlier iteration may still hold its autograd graph at the capture: detach it.

    Gradients are those of one call: before each, ``zero_grad()`` must have set them to None. The graph owns the memory
    of gradients and activations for as long as it exists, and the next replay overwrites both.

    Tested on a CPU with a recorder that repeats calls of operators; on a GPU only hand-written captures of models and
    layers of this library have run.

    Args:
        function: forward and backward of an iteration, or the forward of an evaluation. Its inputs are tensors, numbers
            and strings, in any nesting of tuples, lists and dicts; its result is of tensors in such a nesting.
        parameters: what gets gradients.
        device: where the function runs, a CPU or a GPU of NVIDIA or AMD.
        num_warmups: at least 1, so that nothing is captured that happens only once.

    Raises:
        ConfigError: ``num_warmups`` is too small, or ``device`` is another; an input is an object of another class or
            requires a gradient; a parameter has a gradient before a call; a call is inside autocast with its cache; or
            the function cannot be captured. After the last, parameters have no gradients, and the memory of the
            attempt is not returned before the process ends.
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
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device must be a CPU or a GPU that torch calls cuda; got {device}")
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
        self._recorder: _Recorder | None = None
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
            buffer.copy_(tensor)  # waits for pinned memory to be read, because the caller may fill it again
        buffers = iter(self._buffers)
        given = [next(buffers) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._run(pytree.tree_unflatten(given, structure))

    def _circumstances(self) -> list[object]:
        type_ = self._device.type
        autocast = torch.get_autocast_dtype(type_) if torch.is_autocast_enabled(type_) else None
        if autocast is not None and torch.is_autocast_cache_enabled():
            raise ConfigError(
                "autocast would keep copies of weights from one iteration to the next, and a graph would read them; "
                "enter autocast inside the function, or with cache_enabled=False"
            )
        modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast]
        return [*modes, *(parameter.data_ptr() for parameter in self._parameters)]

    def _begin(self, kind: object, tensors: list[Tensor]) -> None:
        self.reset()  # first, so that two graphs never need memory at once
        self._buffers = [torch.empty(x.shape, dtype=x.dtype, device=self._device) for x in tensors]
        self._recorder = _recorder_on(self._device)
        self._kind = kind
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
            output = self._recorder.warm_up(lambda: self._function(*inputs))
            self._num_runs += 1
            return _copied(output)
        if self._captured is None:
            self._captured = self._capture(self._recorder, inputs)
        self._recorder.replay()
        for parameter, gradient in zip(self._parameters, self._captured.gradients, strict=True):
            parameter.grad = gradient
        return _copied(self._captured.output)

    def _capture(self, recorder: _Recorder, inputs: tuple[Any, ...]) -> _Captured:
        raised: list[BaseException] = []

        def function() -> Any:
            try:
                return self._function(*inputs)
            except BaseException as error:
                raised.append(error)
                raise

        try:
            output = recorder.capture(function)
        except BaseException as error:
            _FAILED.append(recorder)
            self.reset()
            for parameter in self._parameters:
                parameter.grad = None
            first = raised[0] if raised else error  # ending a capture that has failed raises another error
            if not isinstance(first, RuntimeError) or "captur" not in str(first):
                if first is error:
                    raise
                raise first from first.__cause__
            raise ConfigError(
                f"the iteration cannot be captured in a CUDA graph: {str(first).splitlines()[0]}; it must not read "
                "values of tensors in Python, with .item(), .tolist() or nonzero(), nor work on other streams; or run "
                "it without a graph"
            ) from first
        detached = pytree.tree_map_only(Tensor, Tensor.detach, output)  # frees the graph of autograd
        return _Captured(detached, [parameter.grad for parameter in self._parameters])


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
        # other threads may pin memory meanwhile, for the next batch. If the capture fails, torch.cuda.graph does not
        # return to the stream that was current
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            return function()

    def replay(self) -> None:
        self._graph.replay()


def _recorder_on(device: torch.device) -> _Recorder | None:
    return None if device.type == "cpu" else _CudaRecorder(device)


def _kind_of(leaf: object) -> tuple[object, ...]:
    if isinstance(leaf, Tensor):
        if leaf.requires_grad and torch.is_grad_enabled():
            raise ConfigError("an input requires a gradient, which a replay would not compute; pass x.detach()")
        return Tensor, leaf.shape, leaf.dtype
    if not isinstance(leaf, _PLAIN):
        raise ConfigError(
            f"a CUDA graph takes tensors, numbers and strings, in tuples, lists and dicts; got {type(leaf).__name__}; "
            "pass its tensors"
        )
    return type(leaf), repr(leaf)  # NaN equals NaN, and 0.0 differs from -0.0


def _copied(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), output)
