"""The results: a file of lines, written as they arrive, and a readable page of them."""

import json
import statistics
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.environment import commit
from benchmarks.fusions.report import Run, contest_from, table
from benchmarks.restartable import Line

__all__ = ["Record"]


class Record:
    """``gpu-check-DEVICE-DATE.jsonl`` and the ``.md`` next to it. A line is in the file when ``add`` returns."""

    def __init__(self, folder: Path, device: str, budget: float) -> None:
        now = datetime.now()
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"gpu-check-{device}-{now:%Y%m%d-%H%M%S}.jsonl"
        self._start = time.monotonic()
        self._lines: list[Line] = []
        self.add("run", {"date": now.isoformat(), "commit": commit(), "device": device, "budget_seconds": budget})

    def add(self, part: str, line: Line) -> None:
        kept = {"part": part, "at_seconds": round(time.monotonic() - self._start, 1), **line}
        self._lines.append(kept)
        with self.file.open("a") as out:
            out.write(json.dumps(kept) + "\n")

    def of(self, part: str) -> list[Line]:
        return [line for line in self._lines if line["part"] == part]

    def page(self) -> str:
        """The lines of each part, with a table of the contests; also written next to the file."""
        head = ", ".join(
            f"{name} {value}" for name, value in self._lines[0].items() if name not in ("part", "at_seconds")
        )
        text = [f"# First minutes: {head}", ""]
        for part in dict.fromkeys(line["part"] for line in self._lines[1:]):
            lines = self.of(part)
            failures = [line for line in lines if line.get("failure")]
            text += [f"## {part}: {len(lines)} lines, {len(failures)} failures", ""]
            text += _contests(lines)
            text += [f"- {_words(line)}" for line in lines if "contest" not in line]
            text.append("")
        page = "\n".join(text)
        self.file.with_suffix(".md").write_text(page)
        return page


def _contests(lines: Iterable[Line]) -> list[str]:
    """The table of ``benchmarks.fusions``, with two more columns: times, and the item."""
    found = [(line["item"], contest_from(line["contest"]), line["bandwidth"]) for line in lines if "contest" in line]
    if not found:
        return []
    rates = [rate / 1e9 for _, _, rate in found]
    rows = table([Run([one for _, one, _ in found], [rate for _, _, rate in found])], ["Megalith"], range(len(found)))
    seconds = [_microseconds(one.figures["Megalith"]) for _, one, _ in found]
    named = [
        f"{row} {more} |"
        for row, more in zip(rows, ["forward, both us | item", "--- | ---", *_items(found, seconds)], strict=True)
    ]
    return [*named, "", f"Copy bandwidth {statistics.median(rates):.1f} GB/s [{min(rates):.1f}..{max(rates):.1f}].", ""]


def _items(found: list[tuple[str, Any, float]], seconds: list[str]) -> list[str]:
    return [f"{us} | {item}" for (item, _, _), us in zip(found, seconds, strict=True)]


def _microseconds(figures: Any) -> str:
    if not figures.forward:
        return ""
    return ", ".join(f"{1e6 * statistics.median(of.values()):.1f}" for of in (figures.forward, figures.both))


def _words(line: Line) -> str:
    """Formats ``line`` without its part and time, with the item first."""
    rest = [f"{name} {_rounded(value)}" for name, value in line.items() if name not in ("part", "at_seconds", "item")]
    return ": ".join(part for part in (str(line.get("item", "")), ", ".join(rest)) if part).replace("\n", " / ")


def _rounded(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
