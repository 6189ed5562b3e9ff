"""Compiles every kernel for every target, with no GPU: ``python -m tests.fusions.kernel_table`` writes the page."""

from pathlib import Path

import torch

from tests.fusions.harness import Case, all_cases
from tests.kernel_reports import TARGETS, Launch, Resources, compile_for, launches, without_interpreter

__all__ = ["DTYPES", "PAGE", "SPILL_BUDGET", "Key", "Report", "compile_kernels", "page", "parts_of"]

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

# bytes (registers on AMD) that a thread may spill, by kernel; kernels that are not listed must not spill
SPILL_BUDGET: dict[str, int] = {
    "attention._forward_kernel": 6,  # gfx942
    "attention_backward._keys_kernel": 48,  # float32
    "attention_backward._queries_kernel": 16,  # sm_80, float32, with a softcap; 8 on sm_100
}
DTYPES = (torch.bfloat16, torch.float32)
Key = tuple[str, str, str]  # kernel, dtype, target
Report = dict[Key, Resources]

_HEAD = """# What kernels take

Every kernel of path `triton`, compiled ahead of time for four targets with no GPU, as its operation launches it (64
rows, up to 4096 columns; the most of all its cases). Registers a thread, **spilled bytes** a thread (on AMD spilled
registers) where there are any, bytes of shared memory a program. Triton {triton}.
`python -m tests.fusions.kernel_table` writes this page; a test compares it, and holds every kernel to its budget of
spills: {budget}.

| kernel | dtype | {targets} |
|---|---|{rule}|
"""


def compile_kernels(
    cases: list[str] | None, targets: tuple[str, ...], dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Report:
    """The maximum each kernel needs over the named cases (None: all); must run without the interpreter."""
    report: Report = {}
    known: dict[str, Resources] = {}
    for case in all_cases():
        if "triton" not in case.fusion.paths or (cases is not None and case.name not in cases):
            continue
        for dtype in (dtype for dtype in dtypes if dtype in case.dtypes):
            for launch in launches_of(case, dtype):
                name = f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"
                for target in targets:
                    identity = f"{target} {name} {launch.signature()}"
                    used = known[identity] = known.get(identity) or compile_for(launch, TARGETS[target])
                    key = (name, str(dtype).removeprefix("torch."), target)
                    report[key] = Resources(*map(max, used, report.get(key, used)))
    return report


def launches_of(case: Case, dtype: torch.dtype) -> list[Launch]:
    """The launches of one forward and backward pass."""
    inputs = case.make(64, max(width for width in case.widths if width <= 4096), dtype, "cpu")
    return launches(lambda: case.run(inputs, "triton", case.upstream(inputs, "triton")))


def page(report: Report, triton: str) -> str:
    """The table as Markdown."""
    budget = ", ".join(f"{kernel} {most}" for kernel, most in SPILL_BUDGET.items())
    budget = f"{budget}, all others none" if budget else "none for all"
    head = _HEAD.format(
        triton=triton, budget=budget, targets=" | ".join(TARGETS), rule="---|" * (len(TARGETS) - 1) + "---"
    )
    lines = []
    for kernel, dtype in dict.fromkeys((kernel, dtype) for kernel, dtype, _ in report):
        cells = [cell(report[kernel, dtype, target]) for target in TARGETS]
        lines.append(f"| `{kernel}` | {dtype} | {' | '.join(cells)} |")
    return head + "\n".join(sorted(lines)) + "\n"


def parts_of(text: str) -> tuple[str, str]:
    """The table in a page, with its header, and the text after it."""
    table, rule, behind = text.partition("\n## ")
    return table, rule + behind


def cell(used: Resources) -> str:
    parts = [
        f"{used.registers}",
        f"**{used.spilled}**" if used.spilled else "",
        f"{used.shared} B" if used.shared else "",
    ]
    return ", ".join(part for part in parts if part)


def main() -> None:
    import triton

    _, behind = parts_of(PAGE.read_text())
    PAGE.write_text(page(without_interpreter(compile_kernels, None, tuple(TARGETS)), triton.__version__) + behind)


if __name__ == "__main__":
    main()
