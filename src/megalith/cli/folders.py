"""Lines about folders of input files, for the commands that read text."""

from typing import TYPE_CHECKING

from megalith.wording import counted

if TYPE_CHECKING:
    from megalith.data.prepare.sources import Sources

__all__ = ["describe_folders"]


def describe_folders(sources: "Sources", width: int) -> list[str]:
    """Describes what was not read in the input folders, or not as the user may expect; labels have ``width``."""
    left_out = (
        (sources.num_skipped, "binary file", None),
        (sources.num_broken_links, "broken link", None),
        (sources.num_special, "pipe, socket or device", "pipes, sockets or devices"),
    )
    told = ", ".join(counted(*each) for each in left_out if each[0])
    lines = [f"{'left out':<{width}}{told}"] if told else []
    if sources.num_lines_as_text:
        files = counted(sources.num_lines_as_text, ".jsonl file")
        lines.append(f"{'as text':<{width}}{files} in folders, each one document; give the files to read their lines")
    return lines
