"""One operation at one size: every contender is checked, then timed in interleaved rounds."""

import logging
import statistics
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions.clock import Clock, Memory, memory_of
from benchmarks.fusions.operation import BASE, Inputs, Operation, outputs_of
from benchmarks.rounds import Spread
from megalith.numerics.tolerance import gradient_error

__all__ = ["SAMPLE", "Contest", "Figures", "contest", "failed"]

log = logging.getLogger(__name__)

# for results and gradients, relative to torch eager in float32: allows for rounding after every operation
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

SAMPLE = 0.02  # seconds; reading the clock and launching are small in comparison
_FAR_BEHIND, _FEW_ROUNDS = 4.0, 3  # a contender 4 times as slow as torch eager runs in 3 rounds only


@dataclass
class Figures:
    """Figures of one contender: seconds by round, of the forward and with the backward, and memory of the latter."""

    forward: dict[int, float] = field(default_factory=dict)
    both: dict[int, float] = field(default_factory=dict)
    memory: Memory | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Contest:
    """The results of an operation at one size; ``floor``: least bytes of forward and backward, None if not stated."""

    operation: str
    dtype: str
    num_bytes: int
    floor: tuple[int, int] | None
    figures: dict[str, Figures]

    def ratio(self, name: str, both: bool) -> Spread | None:
        """The speed-up of ``name`` over torch eager, within each round."""
        if self.figures[name].failure or self.figures[BASE].failure:
            return None
        mine, base = (figures.both if both else figures.forward for figures in (self.figures[name], self.figures[BASE]))
        return Spread.of([base[index] / seconds for index, seconds in mine.items()]) if mine else None

    def share(self, name: str, bandwidth: float) -> tuple[float, float] | None:
        """Fractions of the copy bandwidth that forward and backward reach, counting only the bytes of ``floor``."""
        figures = self.figures[name]
        if self.floor is None or figures.failure or not figures.forward:
            return None
        forward, both = statistics.median(figures.forward.values()), statistics.median(figures.both.values())
        backward = max(both - forward, 1e-9)
        return self.floor[0] / forward / bandwidth, self.floor[1] / backward / bandwidth


def contest(
    operation: Operation,
    num_bytes: int,
    dtype: torch.dtype,
    device: str,
    rounds: int,
    only: Collection[str] | None = None,
    sample: float = SAMPLE,
) -> Contest:
    """Checks and times all contenders of ``operation``, or ``only`` those named, in samples of ``sample`` seconds.

    One that fails or is wrong has the reason instead of numbers. Raises what torch eager raises in float32.
    """
    inputs = operation.make(num_bytes, dtype, device)
    clock = Clock(device)
    floor = operation.cost(**inputs)[:2] if operation.cost else None
    contenders = operation.contenders(device)
    calls = {
        name: _calls(compute, inputs, dtype) for name, compute in contenders.items() if only is None or name in only
    }
    result = Contest(operation.name, str(dtype).removeprefix("torch."), num_bytes, floor, {})
    want = _exact(operation, inputs, dtype)
    for name, (forward, both) in calls.items():
        figures = result.figures[name] = Figures()
        with _failing_alone(operation, name, figures):
            got = both()
            wrong = _wrong(got, want, _TOLERANCE[dtype]) if operation.judged else None
            if wrong and name == BASE:  # it stays, because all others are compared with it
                log.warning("%s, %s: %s", operation.name, name, wrong)
            else:
                figures.failure = wrong
            forward()
            figures.memory = memory_of(both, device)
            for call in (forward, both):  # the profiler may have caused recompilation, which is not timed
                call()
    seconds: dict[str, float] = {}
    for name, (_, both) in calls.items():
        if not result.figures[name].failure:
            with _failing_alone(operation, name, result.figures[name]):
                seconds[name] = clock.seconds(both)
    repeats = _repeats(seconds.get(BASE, 0.0), sample)
    for index in range(rounds if BASE in seconds else 0):
        for name, figures in result.figures.items():
            if figures.failure or (index >= _FEW_ROUNDS and seconds[name] >= _FAR_BEHIND * seconds[BASE]):
                continue
            with _failing_alone(operation, name, figures):
                forward, both = calls[name]
                figures.forward[index] = clock.seconds(forward, repeats)
                figures.both[index] = clock.seconds(both, repeats)
    return result


def failed(operation: Operation, num_bytes: int, dtype: torch.dtype, reason: str) -> Contest:
    """A contest without figures, with the reason it failed."""
    figures = {name: Figures(failure=reason) for name in ("Megalith", BASE)}
    return Contest(operation.name, str(dtype).removeprefix("torch."), num_bytes, None, figures)


@contextmanager
def _failing_alone(operation: Operation, name: str, figures: Figures) -> Iterator[None]:
    """Turns an exception into the reason a contender has no numbers: a peer may fail in any way, at any time."""
    try:
        yield
    except Exception as error:
        figures.failure = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        figures.forward.clear()
        figures.both.clear()
    if figures.failure:
        log.warning("%s, %s: %s", operation.name, name, figures.failure)


def _calls(
    compute: Callable[..., Any], inputs: Inputs, dtype: torch.dtype
) -> tuple[Callable[[], Any], Callable[[], list[Tensor]]]:
    """Forward only, with gradients enabled; and forward with backward, which returns results and gradients.

    The upstream gradients are the same for all contenders: random, rounded to ``dtype``.
    """
    leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    upstream: dict[int, Tensor] = {}

    def forward() -> Any:
        return compute(**inputs)

    def both() -> list[Tensor]:
        roots = outputs_of(compute(**inputs))
        if not roots:
            return []
        for i, y in enumerate(roots):
            if i not in upstream:
                generator = torch.Generator(device=y.device).manual_seed(1)
                upstream[i] = torch.randn(y.shape, generator=generator, device=y.device).to(dtype).to(y.dtype)
        gradients = torch.autograd.grad(roots, leaves, list(upstream.values()), allow_unused=True)
        return [*(y.detach() for y in roots), *(g for g in gradients if g is not None)]

    return forward, both


def _exact(operation: Operation, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of torch eager in float32, for the same rounded inputs."""
    wide = {
        name: x.detach().float().requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }
    return _calls(operation.eager, wide, dtype)[1]()


def _wrong(got: list[Tensor], want: list[Tensor], tolerance: float) -> str | None:
    if len(got) != len(want):
        return f"wrong: {len(got)} results and gradients, the reference has {len(want)}"
    norm = max((w.norm().item() for w in want), default=0.0)
    worst = max((gradient_error(g, w, norm) for g, w in zip(got, want, strict=True)), default=0.0)
    return None if worst <= tolerance else f"wrong: {worst:.1e} from the reference, over {tolerance:.0e}"


def _repeats(seconds: float, sample: float) -> int:
    """The number of calls that take ``sample`` seconds; at most 20."""
    return max(1, min(20, int(sample / max(seconds, 1e-6))))
