"""Registers a forward and a backward function as one differentiable torch operator.

Compiled Triton launchers become a ``triton_op``: torch.compile sees their kernels and plans memory around them.
Interpreted launchers become a ``custom_op``, which is opaque to torch.compile, because the interpreter reads data
pointers, which traced tensors do not have. Functions over blocks of rows become a ``custom_op`` too. Wherever nothing
traces a launch, it bypasses torch's wrapper, which costs many times as much as Triton's own launch.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megalith.fusions.core.devices import on_the_device_of_its_tensors
from megalith.fusions.core.eager import NON_TENSOR_TYPES, call_in_backward, eager_or_operator, recorded
from megalith.fusions.core.records import flat_signature
from megalith.fusions.core.rows import as_rows, fresh_like
from megalith.optional import triton_interprets

__all__ = ["Differentiable", "Operator", "gradients_like", "register_without_gradient", "wrap_triton"]

Y = TypeVar("Y")
G = TypeVar("G", bound=tuple[Tensor, ...])
Y_co = TypeVar("Y_co", covariant=True)
G_co = TypeVar("G_co", covariant=True, bound=tuple[Tensor, ...])
Saves = Callable[..., tuple[object, ...]]
Passes = Callable[..., Sequence[str]]
Shares = Callable[..., Mapping[str, str]]
_SAVED = object()  # placeholder in ctx.kept for the next of ctx.saved_tensors


class _Launches(threading.local):
    """How this thread launches kernels: through torch's wrapper, which torch.compile traces, or directly."""

    directly = False


_launches = _Launches()


class Computes(Protocol[Y_co]):
    """A function of positional operands that is opaque to autograd."""

    def __call__(self, *inputs: Any) -> Y_co: ...

    @property
    def implementation(self) -> Callable[..., Y_co]:
        """The function that the operator runs, for tensors that are not being traced."""


class Differentiable(Protocol[Y_co, G_co]):
    """A differentiable function of positional operands, and its gradient as a separate function."""

    def __call__(self, *inputs: Any) -> Y_co: ...

    @property
    def back(self) -> "Computes[G_co]":
        """The registered backward; it records no gradient."""

    @property
    def implementation(self) -> Callable[..., Y_co]:
        """The function that the operator runs, for tensors that are neither traced nor recorded."""


@dataclass(frozen=True)
class Operator(Generic[Y, G]):
    """Declares a differentiable operator; each of its implementations is registered under its own name.

    Args:
        outputs: allocates the outputs of forward, given the same inputs: tensors, None, numbers, strings. Its
            annotations are the schema, including those of a record's fields (``core.records``), and it tells
            torch.compile the shapes.
        gradients: the same for backward. Backward gets the gradients of the first ``num_differentiable`` outputs, then
            what ``saves`` returned, and, if ``gradients`` has an argument ``needs``, a list of bool: which inputs in
            ``of`` need a gradient. It returns a tensor for each of them, empty if not needed or if the input was None.
            One empty tensor may stand for several, so callers must not write into it.
        of: names of the inputs that have gradients, in the order that backward returns them.
        saves: selects what backward needs, given the tuple of outputs and the inputs; by default all inputs.
        passes: given the inputs, returns the names of those whose gradient is the first output's gradient, unchanged;
            backward does not compute these.
        shares: given the inputs, maps the names of inputs to that of another input with the same gradient; backward
            only computes the other's, because an operator may not return one tensor twice.
        num_differentiable: the number of differentiable outputs; those after them are statistics for backward only.
        absent_as_none: backward gets None for the gradient of an output that was not used; otherwise zeros.
        rows: names of operands of forward and backward that are rows [T, F] and may also be passed as [..., F].
            Functions get them flattened; differentiable outputs that are rows, and gradients of such operands, are
            returned in the original shape. Flattening with a view outside the operator would cost autograd more than a
            small operation takes. Also, an output saved for backward would not be the caller's tensor, so autograd
            would not notice if the caller writes into it.
    """

    outputs: Callable[..., Y]
    gradients: Callable[..., G]
    of: Sequence[str]
    saves: Saves | None = None
    passes: Passes | None = None
    shares: Shares | None = None
    num_differentiable: int = 1
    absent_as_none: bool = False
    rows: Sequence[str] = ()

    def register(
        self, name: str, forward: Callable[..., Y], backward: Callable[..., G], *, opaque: bool = False
    ) -> Differentiable[Y, G]:
        """Registers ``megalith::<name>`` and its gradient ``megalith::<name>_back``; both only write fresh tensors.

        The gradient is not differentiable: a second derivative raises an error rather than being wrong.

        Args:
            opaque: torch.compile does not trace the functions, which may launch kernels all the same.
        """
        operator, implementation = _define(
            name, forward, self.outputs, opaque, of_rows=_Rows(self.rows, range(self.num_differentiable))
        )
        of_gradients = _Rows(self.rows, [index for index, of in enumerate(self.of) if of in self.rows])
        gradient = eager_or_operator(*_define(f"{name}_back", backward, self.gradients, opaque, of_rows=of_gradients))
        setup_context, gradients = self._around(gradient)
        torch.library.register_autograd(f"megalith::{name}", gradients, setup_context=setup_context)
        differentiable = recorded(name, implementation, setup_context, gradients)
        call: Any = eager_or_operator(operator, implementation, differentiable)
        call.back = gradient
        registered: Differentiable[Y, G] = call
        return registered

    def _around(self, gradient: Callable[..., G]) -> tuple[Callable[..., None], Callable[..., Any]]:
        """Returns setup_context and backward, as ``torch.library.register_autograd`` takes them, for ``gradient``."""
        input_names = list(flat_signature(self.outputs).parameters)
        positions = [input_names.index(of) for of in self.of]
        takes_needs = "needs" in flat_signature(self.gradients).parameters
        saves, passes, shares = self.saves, self.passes, self.shares
        num_differentiable, absent_as_none = self.num_differentiable, self.absent_as_none

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            has_statistics = len(outputs) > num_differentiable
            if has_statistics:
                ctx.mark_non_differentiable(*outputs[num_differentiable:])
            if has_statistics or absent_as_none:  # otherwise torch allocates zeros for statistics too
                ctx.set_materialize_grads(False)
            fills = has_statistics and not absent_as_none
            ctx.zeros_like = [(y.shape, y.dtype, y.device) for y in outputs[:num_differentiable]] if fills else None
            kept = list(inputs if saves is None else saves(outputs, *inputs))
            tensors = []
            for place, x in enumerate(kept):
                if type(x) not in NON_TENSOR_TYPES and isinstance(x, Tensor):
                    tensors.append(x)
                    kept[place] = _SAVED
            ctx.save_for_backward(*tensors)
            ctx.kept = kept
            ctx.passed = [input_names.index(name) for name in passes(*inputs)] if passes else []
            of_name = shares(*inputs) if shares else None
            ctx.shared = {input_names.index(name): input_names.index(of) for name, of in (of_name or {}).items()}

        def gradients(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
            needed, passed, shared = ctx.needs_input_grad, ctx.passed, ctx.shared
            wanted = [needed[position] for position in positions]
            if passed or shared:
                asked = {shared.get(position, position) for position in positions if needed[position]}
                wanted = [position in asked and position not in passed for position in positions]
            found: list[Tensor | None] = [None] * len(needed)
            if True in wanted:  # an input outside `of` may be the one that requires a gradient
                upstream = dy[:num_differentiable]
                if ctx.zeros_like:
                    upstream = tuple(map(_zeros_for_none, upstream, ctx.zeros_like))
                tensors = iter(ctx.saved_tensors)
                operands = [*upstream, *[next(tensors) if x is _SAVED else x for x in ctx.kept]]
                if takes_needs:
                    operands.append(wanted)
                results = call_in_backward(gradient, dy, operands)
                for position, result in zip(positions, results, strict=True):
                    if needed[position]:
                        found[position] = result
            for position in passed:
                found[position] = dy[0] if needed[position] else None
            for position, of in shared.items():
                found[position] = results[positions.index(of)] if needed[position] else None
            return tuple(found)

        return setup_context, gradients


def register_without_gradient(
    name: str,
    function: Callable[..., Y],
    outputs: Callable[..., Y],
    *,
    mutates: Sequence[str] = (),
    opaque: bool = False,
) -> Callable[..., Y]:
    """Registers ``megalith::<name>``, an operator without a gradient; otherwise like ``Operator``.

    Args:
        mutates: names of inputs, tensors or lists of them, that ``function`` writes into; ``name`` then ends in "_".
    """
    operator, implementation = _define(name, function, outputs, opaque, mutates)
    # autograd tracks an operator's in-place writes, but not those of a kernel
    return operator if mutates else eager_or_operator(operator, implementation)


def _zeros_for_none(dy: Tensor | None, like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    shape, dtype, device = like
    return torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy


def gradients_like(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Uninitialized contiguous gradients for ``inputs``, in their dtypes; all None inputs share one empty tensor."""
    nothing = next(x for x in inputs if x is not None).new_empty(0)
    return tuple([nothing if x is None else fresh_like(x) for x in inputs])


def wrap_triton(kernel: Any) -> Any:
    """Wraps ``kernel`` for launch by an operator. Call it by this bare name, which torch's compile cache looks for.

    Kernel arguments must be tensors, numbers and None, one by one. Triton also accepts a tuple of strides, and
    generates the same code for it, but torch.compile (2.13) does not: Inductor rejects the argument, loses symbolic
    sizes in it, and then treats every tensor as mutated. Functions called by a kernel may take tuples.
    """
    return kernel if _launches.directly or triton_interprets() else torch.library.wrap_triton(kernel)


class _Rows(NamedTuple):
    """Which operands are rows that may have any shape [..., F], and which results then have the same leading shape."""

    names: Sequence[str]
    results: Sequence[int]

    def of_any_shape(self, function: Callable[..., Y], signature: inspect.Signature) -> Callable[..., Y]:
        """Extends ``function``, which takes rows [T, F] (or allocates its results), to operands [..., F]."""
        positions = [index for index, name in enumerate(signature.parameters) if name in self.names]
        if not positions:
            return function

        @functools.wraps(function)  # torch's search for kernels unwraps it
        def flattened(*inputs: Any) -> Any:
            first = inputs[positions[0]]
            if first is None:
                first = next(x for position in positions if (x := inputs[position]) is not None)
            if first.dim() == 2:
                return function(*inputs)
            leading = first.shape[:-1]
            operands = list(inputs)
            for position in positions:
                if inputs[position] is not None:
                    operands[position] = as_rows(inputs[position])
            found: Any = function(*operands)
            if isinstance(found, Tensor):
                return _in_shape(found, leading)
            results = list(found)
            for index in self.results:
                if results[index].dim() == 2:  # not empty (no gradient) and not one number per row
                    results[index] = _in_shape(results[index], leading)
            return tuple(results)

        return flattened


def _in_shape(x: Tensor, leading: torch.Size) -> Tensor:
    """Reshapes ``x`` [T, F], fresh memory, to [..., F] without making it a view, which a Function must not return."""
    y: Tensor = torch.ops.aten._unsafe_view.default(x, [*leading, x.shape[-1]])
    return y


def _define(
    name: str,
    function: Callable[..., Y],
    outputs: Callable[..., Y],
    opaque: bool,
    mutates: Sequence[str] = (),
    of_rows: _Rows | None = None,
) -> tuple[Callable[..., Y], Callable[..., Y]]:
    """Returns the operator, and its equivalent for tensors that are not being traced."""
    function = on_the_device_of_its_tensors(function)
    is_traced = not (opaque or triton_interprets())  # by torch.compile, which then sees the kernels that it launches
    options: dict[str, Any] = {"mutates_args": tuple(mutates)}
    allocate = outputs
    if of_rows is not None:
        function, allocate = (of_rows.of_any_shape(one, flat_signature(outputs)) for one in (function, outputs))
    implementation = _launching(function)
    function, allocate = _without_aliases(function if is_traced else implementation), _without_aliases(allocate)
    define: Any = torch.library.triton_op if is_traced else torch.library.custom_op
    if is_traced:
        function = _declared_as(function, outputs)
    else:
        options["schema"] = torch.library.infer_schema(_declared_as(outputs, outputs), **options)
    operator: Callable[..., Y] = define(f"megalith::{name}", function, **options)
    torch.library.register_fake(f"megalith::{name}", allocate)
    return operator, implementation


def _without_aliases(function: Callable[..., Y]) -> Callable[..., Y]:
    """Gives each missing gradient its own empty tensor, because an operator may not return one tensor twice."""

    @functools.wraps(function)  # torch's search for kernels unwraps it
    def with_copies(*inputs: Any) -> Any:
        found: Any = function(*inputs)
        if isinstance(found, tuple):
            found = tuple(y.new_empty(0) if any(y is x for x in found[:place]) else y for place, y in enumerate(found))
        return found

    return with_copies


def _launching(function: Callable[..., Y]) -> Callable[..., Y]:
    """``function`` with its kernels launched by Triton directly, bypassing the wrapper that torch.compile traces."""

    def launch(*inputs: Any) -> Y:
        before, _launches.directly = _launches.directly, True
        try:
            return function(*inputs)
        finally:
            _launches.directly = before

    return launch


def _declared_as(function: Callable[..., Y], outputs: Callable[..., Y]) -> Callable[..., Y]:
    """``function`` with the signature of ``outputs``, from which a triton_op infers its schema."""

    @functools.wraps(function)  # torch's search for kernels unwraps it
    def declared(*inputs: Any) -> Y:
        return function(*inputs)

    declared.__signature__ = flat_signature(outputs)  # type: ignore[attr-defined]
    return declared
