"""``megalith data prepare``: from text to the files that training reads."""

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "prepare"]

app = typer.Typer(help="Make datasets.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Make datasets."""


@app.command()
def prepare(
    inputs: Annotated[list[Path], typer.Argument(help=".txt, .jsonl (.gz too), .parquet, folders.", metavar="FILES...")],
    out: Annotated[Path, typer.Option(help="Prefix of the files to write.")],
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Train a byte-level BPE of so many entries instead.")] = None,
    valid: Annotated[float, typer.Option(help="Share of the documents to hold out, as PREFIX-valid.")] = 0.0,
    key: Annotated[str, typer.Option(help="Key of the text in .jsonl and .parquet.")] = "text",
    eod: Annotated[str | None, typer.Option(help="Token that ends a document, where it has an unusual name.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes that encode; by default one a core.")] = None,
) -> None:
    """Tokenize text into .bin and .idx. Killed and started again it goes on, and ends with the same bytes."""
    from megalith.data.prepare import prepare as run

    found = run(
        inputs,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        valid=valid,
        key=key,
        eod=eod,
        processes=processes or os.cpu_count() or 1,
    )
    for prefix, part in ((found.prefix, found.train), (found.valid_prefix, found.valid)):
        if part is not None:
            ratio = part.text_bytes / max(1, part.num_tokens)
            print(f"{prefix}: {part.num_documents:,} documents, {part.num_tokens:,} tokens, {ratio:.2f} bytes a token")
    if found.was_done:
        print("an earlier command had made them; nothing was changed")
    valid_setting = "" if found.valid_prefix is None else f" data.valid={found.valid_prefix}"
    print(f"next: megalith train llama-4m data.train={found.prefix}{valid_setting}")
