"""Runs a case: the reference, each contender's checked first run, warm-up, interleaved rounds between calibrations."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.case import Case, First
from benchmarks.environment import surroundings
from benchmarks.registry import CASES
from benchmarks.rounds import Round
from benchmarks.workers import Answer, Worker, WorkerError

__all__ = ["Entry", "Measurement", "measure"]

log = logging.getLogger(__name__)

WARM_UP_RUNS = 2
# discarded rounds are repeated, up to this many times the requested number of rounds
PATIENCE = 2
_FIRST_SECONDS, _RUN_SECONDS = 600.0, 120.0  # after which a worker is given up


@dataclass
class Entry:
    """The results of one contender; ``failure`` says why there are none."""

    first: First | None = None
    peak_rss: int = 0  # bytes, after its last run
    failure: str | None = None


@dataclass
class Measurement:
    """All measurements; ``calibration`` has one more set of rates than there are rounds."""

    case: str
    size: str
    entries: dict[str, Entry]
    calibration: list[dict[str, float]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def kept(self) -> list[Round]:
        return [one for one in self.rounds if one.kept]


def measure(case_name: str, size: str, num_rounds: int, contenders: Sequence[str]) -> Measurement:
    """Measures ``contenders`` of a case until ``num_rounds`` rounds were quiet, or twice as many have run.

    Raises WorkerError if the reference or the calibration fails; if a contender fails, its entry has the reason.
    """
    measurement = Measurement(case_name, size, {name: Entry() for name in contenders})
    with TemporaryDirectory(prefix="benchmark-") as scratch, ExitStack() as stack:
        field = _Field(case_name, size, Path(scratch), stack)
        field.prepare()
        for name, entry in measurement.entries.items():
            log.info("first run: %s", name)
            field.enter(name, entry)
        log.info("calibrating")
        measurement.calibration.append(field.calibrate())
        while len(measurement.kept) < num_rounds and len(measurement.rounds) < PATIENCE * num_rounds:
            seconds = {name: spent for name, entry in measurement.entries.items() if (spent := field.run(name, entry))}
            measurement.calibration.append(field.calibrate())
            done = Round(seconds, *measurement.calibration[-2:])
            measurement.rounds.append(done)
            fate = "kept" if done.kept else f"discarded: calibration changed by {done.moved:.0%}"
            log.info("round %d: %s (%d of %d)", len(measurement.rounds), fate, len(measurement.kept), num_rounds)
    return measurement


class _Field:
    """The worker processes of one measurement."""

    def __init__(self, case_name: str, size: str, scratch: Path, stack: ExitStack) -> None:
        self._case: Case = CASES[case_name]
        self._arguments = (case_name, size, str(scratch))
        self._scratch, self._stack = scratch, stack
        self._environment = surroundings(scratch)
        self._workers: dict[str, Worker] = {}
        self._calibrator = self._start(stack, "calibrate")

    def prepare(self) -> None:
        """Writes the input of all contenders, in a process that ends before the first of them starts."""
        with ExitStack() as alone:
            self._start(alone, "prepare", *self._arguments).ask("write", _FIRST_SECONDS)

    def calibrate(self) -> dict[str, float]:
        rates: dict[str, float] = self._calibrator.ask("measure", _RUN_SECONDS)["rates"]
        return rates

    def enter(self, name: str, entry: Entry) -> None:
        """Starts a contender, checks its first run, and warms it up."""
        self._workers[name] = self._start(self._stack, "contend", *self._arguments, name)
        answer = self._ask(name, entry, "first", _FIRST_SECONDS)
        if answer is None:
            return
        entry.first = First(answer["seconds"], answer["loss_error"], answer["gradient_error"])
        if wrong := self._case.verdict(name, entry.first):
            self._drop(name, entry, wrong)
        for _ in range(WARM_UP_RUNS):
            self.run(name, entry)

    def run(self, name: str, entry: Entry) -> float | None:
        """Seconds of one run; None for a contender that has failed, now or before."""
        answer = None if entry.failure else self._ask(name, entry, "run", _RUN_SECONDS)
        return None if answer is None else answer["seconds"]

    def _ask(self, name: str, entry: Entry, command: str, timeout: float) -> Answer | None:
        try:
            answer = self._workers[name].ask(command, timeout)
        except WorkerError as error:
            self._drop(name, entry, str(error))
            return None
        entry.peak_rss = answer["peak_rss"]
        return answer

    def _drop(self, name: str, entry: Entry, reason: str) -> None:
        log.warning("%s failed: %s", name, reason)
        entry.failure = reason
        self._workers[name].close()

    def _start(self, stack: ExitStack, *arguments: str) -> Worker:
        log_file = self._scratch / f"{len(self._workers)}-{arguments[0]}.log"
        return stack.enter_context(closing(Worker(arguments, self._environment, log_file)))
