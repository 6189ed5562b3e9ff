"""``megalith data index`` and ``search``: embeds passages with a trained model, and finds those closest to a query."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.cli.console import Announcer, Console, Progress, printable, show_log, show_text
from megalith.cli.folders import describe_folders
from megalith.cli.paths import path_argument, path_option
from megalith.garbage_collection import importing
from megalith.wording import counted

if TYPE_CHECKING:
    from megalith.training.tasks.passage_search import Hit, IndexSummary

__all__ = ["index", "search"]

_SHOWN = 100  # characters of a passage


def index(
    model: Annotated[
        str, path_argument("The run of a trained text-embedding model, or one of its checkpoints.", "RUN", kind=str)
    ],
    files: Annotated[
        list[Path],
        path_argument(
            "Passages, read as by data prepare: .jsonl or .parquet (one per line or row), other text files (one each), "
            "all but .parquet also as .gz, or a folder of text files.",
            "FILES",
        ),
    ],
    out: Annotated[Path, path_option("The folder to write.", "INDEX")],
    key: Annotated[str, typer.Option(help="Key or column that holds the text in .jsonl and .parquet.")] = "text",
    dtype: Annotated[str, typer.Option(help="How embeddings are stored: float16 or float32.")] = "float16",
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Rows of data.seq_length tokens per forward; by default as many as have 4,096 tokens.", metavar="N"
        ),
    ] = None,
) -> None:
    """Embed passages with a trained text-embedding model, in one process, for megalith data search."""
    console = Console(sys.stderr)
    show_log(console)
    with Announcer() as announcer:
        announcer.begin(f"loading {model}")
        with importing():
            from megalith.training.tasks.passage_search import index_passages
        num_embedded = 0

        def spelled(done: int, total: int) -> str:
            return f"{counted(num_embedded, 'passage')} embedded, {done:,} of {total:,} bytes read"

        show_progress = Progress(console, spelled)

        def progress(num_passages: int, done: int, total: int) -> None:
            nonlocal num_embedded
            num_embedded = num_passages
            if not num_passages:
                announcer.begin("embedding the first passages")
            else:
                announcer.end()
                show_progress(done, total)

        try:
            found = index_passages(model, files, out, key=key, dtype=dtype, batch_size=batch_size, progress=progress)
        finally:
            console.close()
    show_text(_describe(found, out))


def search(
    location: Annotated[str, path_argument("A folder written by data index.", "INDEX", kind=str)],
    query: Annotated[
        list[str] | None, typer.Option(help="Text to search for; may be repeated.", metavar="TEXT")
    ] = None,
    queries: Annotated[
        Path | None,
        path_option(".jsonl (also as .gz) or .parquet with a query in each line or row, under query.", "FILE"),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Number of passages to find for each query.", metavar="N")] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object per query, with the whole passages.")
    ] = False,
    model: Annotated[
        str | None,
        path_option("Where the model of the index is now; by default where it was then.", "RUN", kind=str),
    ] = None,
) -> None:
    """Find the passages of an index that are closest to queries, by exact search."""
    from megalith.errors import ConfigError

    if (query is None) == (queries is None):
        raise ConfigError('give either --query "TEXT", which may be repeated, or --queries FILE')
    console = Console(sys.stderr)
    show_log(console)
    with Announcer() as announcer:
        announcer.begin(f"opening {location}")
        with importing():
            from megalith.training.tasks.passage_search import read_queries, search_passages
        bars: dict[str, Progress] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if not done:
                announcer.begin(phase)
                bars[phase] = Progress(console, lambda done, total: f"{phase}: {done / max(1, total):.0%}")
            else:
                announcer.end()
                bars[phase](done, total)

        try:
            texts = query or [] if queries is None else read_queries(queries)
            found = search_passages(location, texts, k, model=model, progress=progress)
        finally:
            console.close()
    for text, hits in zip(texts, found, strict=True):
        show_text(_as_json(text, hits) if as_json else "\n".join(_lines(text, hits)))


def _describe(found: "IndexSummary", out: Path) -> str:
    """Describes the index, and the command to run next."""
    made, size = found.index, sum(record.bytes for record in found.index.files.values())
    cut = f", {found.num_cut:,} of them truncated to {found.longest:,} tokens" if found.num_cut else ""
    lines = [f"{'passages':<11}{made.num_passages:,}{cut}"]
    if found.num_empty:
        lines.append(f"{'left out':<11}{counted(found.num_empty, 'document')} without text")
    lines += describe_folders(found.sources, 11)
    lines.append(f"{'embeddings':<11}{made.embedding_size:,} features each, in {made.dtype}")
    lines.append(f"{'index':<11}{out}, {size:,} bytes")
    return "\n".join([*lines, f'next: megalith data search {out} --query "TEXT"'])


def _lines(text: str, hits: "Sequence[Hit]") -> list[str]:
    """The query, and one line for each passage: place, score, where it is from, and how it begins."""
    lines = [f"query: {_begin(text)}"]
    for place, hit in enumerate(hits, 1):
        passage = hit.passage
        origin = f"{printable(passage.source)} {passage.document}"
        lines.append(f"{place:>4}  {hit.score:8.4f}  {origin}  {_begin(passage.text)}")
    return lines


def _begin(text: str) -> str:
    words = " ".join(text[: 8 * _SHOWN].split())
    return printable(words if len(words) <= _SHOWN else f"{words[: _SHOWN - 3]}...")


def _as_json(text: str, hits: "Sequence[Hit]") -> str:
    found = [{"id": hit.id, "score": hit.score, **vars(hit.passage)} for hit in hits]
    return json.dumps({"query": text, "passages": found}, ensure_ascii=False)
