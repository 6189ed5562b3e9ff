"""``megalith data inspect``: shows what is in a dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.cli.console import printable, show_text
from megalith.cli.paths import path_argument, path_option
from megalith.wording import range_of

if TYPE_CHECKING:
    from megalith.data.inspection import Inspection

__all__ = ["inspect"]

_BAR = 30  # characters in the bar of the most frequent token


def inspect(
    prefix: Annotated[str, path_argument("Prefix of the dataset: PREFIX.bin and .idx.", "PREFIX", kind=str)],
    documents: Annotated[
        int, typer.Option(help="Number of documents to show, starting with the first.", metavar="N")
    ] = 3,
    top: Annotated[int, typer.Option(help="Number of most frequent tokens to show.", metavar="N")] = 15,
    tokenizer: Annotated[
        Path | None, path_option("Path of its tokenizer.json, if the dataset does not name it.", "PATH")
    ] = None,
) -> None:
    """Show counts, the first documents as text, and the most frequent tokens."""
    from megalith.data.inspection import inspect_dataset
    from megalith.errors import ConfigError

    if top < 0:
        raise ConfigError(f"--top must be 0 or more; got {top}; use 15")
    found = inspect_dataset(prefix, tokenizer, documents)
    show_text("\n".join([*_counts(prefix, found), *_documents(found), *_histogram(found, top)]))


def _counts(prefix: str, found: "Inspection") -> list[str]:
    dataset, sidecar, lengths = found.dataset, found.dataset.sidecar, found.document_lengths
    size = dataset.num_tokens * dataset.dtype.itemsize
    lines = [
        f"dataset     {prefix}",
        _number(found),
        f"tokens      {dataset.num_tokens:,} of {dataset.dtype.name}, {size:,} bytes",
    ]
    if len(lengths):
        lines.append(f"lengths     {lengths.min():,} to {lengths.max():,} tokens, median {found.median_length:,}")
    if sidecar is not None and sidecar.text_bytes and sidecar.num_tokens:
        lines.append(f"text        {sidecar.text_bytes / sidecar.num_tokens:.2f} bytes per token")
    if found.tokenizer is not None:
        eod = found.tokenizer.eod
        name = f"{found.tokenizer.vocab_size:,} entries, {found.tokenizer.name}"
        lines.append(f"tokenizer   {name}; {eod} {_on_one_line(found.token_text(eod))} ends a document")
    else:
        lines.append(f"tokenizer   {found.why_no_tokenizer}")
    if sidecar is not None and sidecar.sources:
        names = ", ".join(printable(source.name) for source in sidecar.sources[:5])
        rest = f" and {len(sidecar.sources) - 5:,} more" if sidecar.sources[5:] else ""
        lines.append(f"sources     {names}{rest}")
    return lines


def _number(found: "Inspection") -> str:
    """The line that says how many documents or pairs there are."""
    number, num_negatives = found.dataset.num_documents, found.num_negatives
    if num_negatives is not None:
        return f"pairs       {number:,}, each with {range_of(num_negatives.min(), num_negatives.max(), 'negative')}"
    num_empty = int((found.document_lengths == 0).sum())
    return f"documents   {number:,}" + (f", {num_empty:,} of them empty" if num_empty else "")


def _documents(found: "Inspection") -> list[str]:
    lines, kind = [], "document" if found.num_negatives is None else "pair"
    for document in found.documents:
        lines += ["", f"{kind} {document.number}, {document.num_tokens:,} tokens"]
        lines += [f"  | {printable(line)}" for line in document.text.split("\n")]
        lines += ["  | ..."] if document.is_cut else []
    return lines


def _histogram(found: "Inspection", top: int) -> list[str]:
    if not found.num_counted or not top:
        return []
    ids = found.token_ids
    part = "" if found.num_counted == found.dataset.num_tokens else f"{found.num_counted:,}, evenly spread, of "
    entries = "" if found.vocab_size is None else f" of {found.vocab_size:,}"
    lines = [
        "",
        f"most frequent of {part}{found.dataset.num_tokens:,} tokens; {len(ids):,}{entries} ids occur, "
        f"{ids.min():,} to {ids.max():,}",
    ]
    width = len(str(ids[:top].max()))
    for token_id, count in zip(ids[:top].tolist(), found.counts[:top].tolist(), strict=True):
        bar = "#" * max(1, round(_BAR * count / int(found.counts[0])))
        text = _on_one_line(found.token_text(token_id))
        lines.append(f"{100 * count / found.num_counted:6.2f} %  {token_id:>{width}}  {text:<16} {bar}".rstrip())
    return lines


def _on_one_line(text: str | None) -> str:
    return "" if text is None else repr(text)
