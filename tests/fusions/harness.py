"""Checks for every fused operation: a case says how to call it, and what the float64 result is."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions.cost import Cost
from megalith.fusions.core.dispatch import Backend, Fusion
from tests.accuracy import assert_accurate

WIDTHS = (1, 7, 64, 127, 1000, 1536, 4096, 16385)
SAMPLE = (7, 127, 1536)  # the widths that `make test` takes
Inputs = dict[str, Tensor | None]
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One way to call an operation.

    Args:
        name: the operation and what is special, such as "swiglu, bias".
        fusion: the operation.
        inputs: (num_rows, width, dtype, device) -> arguments by name; floating ones get gradients unless ``constant``.
        compute: (**inputs, backend=...) -> the operation's result, a tensor or a tuple of them.
        formula: (**inputs) -> the same in float64, in plain torch without our code; autograd gives its gradients.
        terms: (**inputs) -> number of terms summed by each result ("0", "1", ...) or gradient ("dbias", ...), if not 1.
        cancels: results and gradients that cross zero by cancellation, so that float32 has no accurate digits there.
        upstream_of_stored: (results, exact results, dy) -> upstream gradients whose gradients in float64 are those of a
            backward that reads the rounded results; a path may match these or the exact ones.
        cost: (**inputs) -> bytes moved and saved.
        constant: inputs without a gradient.
        shared: inputs that many programs read; their bytes are counted once.
        widths: the widths that it accepts.
        dtypes: the accepted dtypes, if not all of float32, float16 and bfloat16.
        derivative: whether its gradient is the derivative of its value, taken at the same point.
    """

    name: str
    fusion: Fusion[Any]
    inputs: Callable[[int, int, torch.dtype, str], Inputs]
    compute: Callable[..., Any]
    formula: Callable[..., Any]
    terms: Callable[..., Mapping[str, int]] = lambda **_: {}
    cancels: Sequence[str] = ()
    upstream_of_stored: Callable[[Results, Results, Sequence[Tensor]], Sequence[Tensor]] | None = None
    cost: Callable[..., Cost] | None = None
    constant: Sequence[str] = ()
    shared: Sequence[str] = ()
    widths: Sequence[int] = WIDTHS
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    derivative: bool = True

    def __str__(self) -> str:
        return self.name

    def make(self, num_rows: int, width: int, dtype: torch.dtype, device: str) -> Inputs:
        """Fresh inputs, the same in every call."""
        torch.manual_seed(num_rows + width)
        made = self.inputs(num_rows, width, dtype, device)
        return {name: self.leaf(name, x) for name, x in made.items()}

    def leaf(self, name: str, x: Tensor | None) -> Tensor | None:
        floating = x is not None and x.is_floating_point() and name not in self.constant
        return x.detach().requires_grad_() if x is not None and floating else x

    def run(self, inputs: Inputs, backend: Backend | None, dy: Sequence[Tensor] | None = None) -> Results:
        """Results by number, and gradients by "d" and the input's name."""
        return results(lambda: self.compute(**inputs, backend=backend), inputs, dy)

    def expected(self, inputs: Inputs, dy: Sequence[Tensor]) -> Results:
        """The float64 results for the same rounded inputs."""
        exact = {name: in_float64(x) for name, x in inputs.items()}
        return results(lambda: self.formula(**exact), exact, [g.double() for g in dy])

    def upstream(self, inputs: Inputs, backend: Backend | None = None) -> list[Tensor]:
        """Random gradients for the differentiable results."""
        with torch.no_grad():
            values = as_tuple(self.compute(**inputs, backend=backend))
        torch.manual_seed(1)
        return [torch.randn(y.shape, device=y.device).to(y.dtype) for y in values if y.is_floating_point()]

    def expanded(self, dy: Tensor) -> Tensor:
        """A gradient like ``dy`` with stride 0, such as a sum produces."""
        return torch.ones((), dtype=dy.dtype, device=dy.device).expand(dy.shape)

    def assert_accurate(self, inputs: Inputs, backend: Backend | None, dy: Sequence[Tensor] = ()) -> None:
        """Results and gradients are as accurate as their dtypes allow, compared with float64; integers are equal."""
        dy = dy or self.upstream(inputs, backend)
        got = self.run(inputs, backend, dy)
        want = self.wanted(inputs, got, dy)
        for name in got:
            self.assert_result_accurate(name, got, want, inputs)

    def wanted(self, inputs: Inputs, got: Results, dy: Sequence[Tensor]) -> Results:
        """``expected``, or if a path may read the rounded results, whichever is closer to ``got`` as a whole."""
        want = self.expected(inputs, dy)
        assert got.keys() == want.keys()
        if self.upstream_of_stored is None:
            return want
        stored = self.expected(inputs, self.upstream_of_stored(got, want, dy))
        return min(want, stored, key=lambda each: distance(got, each))  # a path reads one or the other

    def assert_result_accurate(self, name: str, got: Results, want: Results, inputs: Inputs) -> None:
        """Checks one of the results or gradients for ``assert_accurate``."""
        value, terms = got[name], self.terms(**inputs)
        if value.is_floating_point():
            assert_accurate(value, want[name], terms.get(name, 1), name in self.cancels, f"{self.name}: {name}")
        else:
            assert torch.equal(value, want[name].to(value.dtype)), f"{self.name}: {name}"


def results(compute: Callable[[], Any], inputs: Inputs, dy: Sequence[Tensor] | None = None) -> Results:
    """The results of ``compute``, by number, and with ``dy`` the gradients of ``inputs``, by "d" and the name."""
    values = as_tuple(compute())
    found = {str(i): y.detach() for i, y in enumerate(values)}
    leaves = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    if dy and leaves:
        pairs = zip((y for y in values if y.is_floating_point()), dy, strict=True)
        roots = [(y, g) for y, g in pairs if y.requires_grad]
        gradients = torch.autograd.grad([y for y, _ in roots], list(leaves.values()), [g for _, g in roots])
        found |= {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return found


def distance(got: Results, want: Results) -> float:
    """The distance between all gradients of the two."""
    return sum((got[name].double() - want[name]).norm().item() for name in got if name.startswith("d"))


def as_tuple(values: Any) -> tuple[Tensor, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def in_float64(x: Tensor | None) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def all_cases() -> list[Case]:
    """The ``CASES`` of every file ``cases_of_*.py``."""
    files = sorted(Path(__file__).parent.glob("*/cases_of_*.py"), key=lambda file: file.stem)
    modules = [importlib.import_module(f"tests.fusions.{file.parent.name}.{file.stem}") for file in files]
    return [case for module in modules for case in module.CASES]


def first_of_each_operation() -> list[Case]:
    """One case for each fusion: the first in its file."""
    return list({case.fusion.name: case for case in reversed(all_cases())}.values())[::-1]
