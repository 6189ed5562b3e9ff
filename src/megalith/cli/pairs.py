"""``megalith data pairs``: converts records of queries and passages to a dataset for text-embedding models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.cli.console import show_text
from megalith.cli.paths import path_argument, path_option
from megalith.cli.progress_bars import progress_bars
from megalith.wording import counted, range_of

if TYPE_CHECKING:
    from megalith.data.pairs.prepare import PairsSummary

__all__ = ["pairs"]

_MULTIPLE = 16  # of data.seq_length


def pairs(
    files: Annotated[
        list[Path],
        path_argument(
            ".jsonl (also as .gz) or .parquet: in each line or row a query, passages that answer it and hard "
            "negatives, under the keys of sentence-transformers, FlagEmbedding, Tevatron or DPR.",
            "FILES",
        ),
    ],
    out: Annotated[Path, path_option("Prefix of the files to write: PREFIX.bin, .idx, .json.", "PREFIX")],
    tokenizer: Annotated[Path, path_option("Path of the tokenizer.json of the model to train.", "PATH")],
    valid: Annotated[
        list[Path] | None, path_option("Held-out pairs, for PREFIX-valid; may be repeated.", "FILE")
    ] = None,
    max_query_tokens: Annotated[
        int | None,
        typer.Option(help="Truncate queries to this many tokens; by default none are truncated.", metavar="N"),
    ] = None,
    max_passage_tokens: Annotated[
        int | None, typer.Option(help="Truncate passages, also negatives, to this many tokens.", metavar="N")
    ] = None,
    eod: Annotated[str | None, typer.Option(help="Token that ends a document, if it has an unusual name.")] = None,
) -> None:
    """Tokenize pairs of a query and a passage, with hard negatives, for a text-embedding model."""
    from megalith.data.pairs.prepare import prepare_pairs

    with progress_bars() as show:
        found = prepare_pairs(
            files,
            out,
            tokenizer,
            valid=valid or (),
            max_query_tokens=max_query_tokens,
            max_passage_tokens=max_passage_tokens,
            eod=eod,
            progress=show,
        )
    show_text(_describe(found, out))


def _describe(found: "PairsSummary", out: Path) -> str:
    """Describes both datasets, and the command to run next."""
    from megalith.data.indexed_dataset import IndexedDataset
    from megalith.data.pairs.dataset import row_lengths

    lines, longest = [], 0
    num_negatives = found.num_negatives[0]  # that every pair has
    for name, part in (("training", found), ("held out", found.valid)):
        if part is not None:
            lines.append(f"{name:<10}{_counts(part)}")
            used = min(num_negatives, part.num_negatives[0])
            longest = max(longest, int(row_lengths(IndexedDataset(part.prefix), used).max()))
    texts = f"a query, a passage and {counted(num_negatives, 'negative')}"
    lines.append(f"{'rows':<10}up to {counted(longest, 'token')} of {texts}, special tokens included")
    beside = "" if found.valid is None else f" data.valid={out}-valid"
    seq_length = -(-longest // _MULTIPLE) * _MULTIPLE
    next_command = f"megalith train embedding-tiny --from RUN data.train={out}{beside} data.seq_length={seq_length}"
    if num_negatives:
        next_command += f" data.num_negatives={num_negatives}"
    return "\n".join([*lines, f"next: {next_command}"])


def _counts(part: "PairsSummary") -> str:
    queries = [counted(part.num_cut_queries, "query", "queries")] if part.num_cut_queries else []
    passages = [counted(part.num_cut_passages, "passage")] if part.num_cut_passages else []
    negatives = range_of(*part.num_negatives, "negative")
    told = f", {' and '.join(queries + passages)} cut" if queries + passages else ""
    return f"{counted(part.num_pairs, 'pair')}, each with {negatives}{told}, {counted(part.num_tokens, 'token')}"
