"""``megalith data``: ``prepare`` and ``chat`` make datasets of text and conversations; others are in other files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.cli.console import show_text
from megalith.cli.folders import describe_folders
from megalith.cli.inspect import inspect
from megalith.cli.label import label
from megalith.cli.pairs import pairs
from megalith.cli.passages import index, search
from megalith.cli.paths import path_argument, path_option
from megalith.cli.progress_bars import progress_bars
from megalith.observe.machine import num_cores
from megalith.wording import counted

if TYPE_CHECKING:
    from megalith.data.prepare import PrepareSummary

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
app.command("inspect")(inspect)
app.command("label")(label)
app.command("pairs")(pairs)
app.command("index")(index)
app.command("search")(search)

Files = Annotated[
    list[Path],
    path_argument(
        "Text to train on: .jsonl or .parquet (one document per line or row), any other text file (one document), "
        "all but .parquet also as .gz, or a folder of source files (one document each).",
        "FILES",
    ),
]

Chats = Annotated[
    list[Path],
    path_argument(
        ".jsonl (also as .gz) or .parquet: in each line or row messages (a list of role and content), prompt and "
        "completion, or ShareGPT's conversations.",
        "FILES",
    ),
]
Out = Annotated[Path, path_option("Prefix of the files to write: PREFIX.bin, .idx, .json.", "PREFIX")]
Eod = Annotated[str | None, typer.Option(help="Token that ends a document, if it has an unusual name.")]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Number of processes that encode; by default one per core.", metavar="N")
]


@app.callback()
def data() -> None:
    """Make datasets from text, inspect them, and search texts with a trained model."""


@app.command()
def prepare(
    files: Files,
    out: Out,
    tokenizer: Annotated[Path | None, path_option("Path of a tokenizer.json of Hugging Face tokenizers.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE tokenizer with this many entries instead.", metavar="N")
    ] = None,
    valid: Annotated[
        float, typer.Option(help="Fraction of the documents to hold out, as PREFIX-valid.", metavar="FRACTION")
    ] = 0.0,
    key: Annotated[str, typer.Option(help="Key or column that holds the text in .jsonl and .parquet.")] = "text",
    eod: Eod = None,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="Record where sentences and lines end; needed by BERT and T5.")
    ] = False,
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Do not begin documents with the tokenizer's BOS token.")
    ] = False,
    special_tokens: Annotated[
        list[str] | None,
        typer.Option(help="With --vocab-size: special tokens for bert, t5 or fim; may be repeated.", metavar="KIND"),
    ] = None,
    processes: Processes = None,
) -> None:
    """Tokenize text into a dataset.

    Run the same command again to continue after an interruption. The result is identical to the byte, also for any
    number of processes.
    """
    from megalith.data.prepare import prepare as prepare_dataset

    with progress_bars() as show:
        summary = prepare_dataset(
            files,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            valid=valid,
            key=key,
            eod=eod,
            split_sentences=split_sentences,
            bos=not no_bos,
            special_tokens=special_tokens or (),
            processes=processes or num_cores(),
            progress=show,
        )
    recipe = "llama-4m" if not split_sentences else _recipe_of_sentences(summary)
    lacks_sentences = not split_sentences and bool({"bert", "t5"} & {*(special_tokens or ())})
    show_text(_describe(summary, out, recipe, lacks_sentences=lacks_sentences))


@app.command()
def chat(
    files: Chats,
    out: Out,
    tokenizer: Annotated[
        Path, path_option("The tokenizer of the model to train: its folder (or that of a run), or its tokenizer.json.")
    ],
    chat_template: Annotated[
        Path | None, path_option("A Jinja file to use in place of the chat template beside the tokenizer.", "FILE")
    ] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Encode prompt and completion as they are.")
    ] = False,
    split_turns: Annotated[
        bool,
        typer.Option(
            "--split-turns",
            help="Make each assistant message the end of a document of its own, after the messages before it.",
        ),
    ] = False,
    valid: Annotated[
        float, typer.Option(help="Fraction of the conversations to hold out, as PREFIX-valid.", metavar="FRACTION")
    ] = 0.0,
    eod: Eod = None,
    processes: Processes = None,
) -> None:
    """Tokenize conversations for supervised fine-tuning: only what the assistant writes will have a loss.

    Run the same command again to continue after an interruption, as with prepare.
    """
    from megalith.data.chat.format import ChatFormat, tokenizer_file
    from megalith.data.conversations import learned_sequences
    from megalith.data.indexed_dataset import IndexedDataset
    from megalith.data.prepare import prepare as prepare_dataset
    from megalith.errors import ConfigError

    if no_chat_template and (chat_template is not None or split_turns):
        raise ConfigError("--no-chat-template leaves --chat-template and --split-turns without effect; give only one")
    file = tokenizer_file(tokenizer)
    chats = ChatFormat.find(file, chat_template, use_template=not no_chat_template, split_turns=split_turns)
    with progress_bars() as show:
        summary = prepare_dataset(
            files,
            out,
            tokenizer=file,
            valid=valid,
            eod=eod,
            chat=chats,
            processes=processes or num_cores(),
            progress=show,
        )
    dataset = IndexedDataset(summary.prefix)
    num_learned = int(dataset.sequence_lengths[learned_sequences(dataset)].sum())
    learned = (
        f"{'learned':<10}{counted(num_learned, 'token')}, {num_learned / dataset.num_tokens:.1%} of the training set"
    )
    show_text(_describe(summary, out, "--from MODEL", lacks_sentences=False, more=[learned]))


def _recipe_of_sentences(summary: "PrepareSummary") -> str:
    """Returns the recipe for a dataset with sentences: the one whose special tokens the tokenizer has, BERT's first."""
    from megalith.data.special_tokens import bert_tokens, t5_tokens
    from megalith.data.tokenizer import Tokenizer
    from megalith.errors import DataError

    tokenizer = Tokenizer.load(summary.tokenizer, summary.train.eod)
    for recipe, special_tokens in (("bert-tiny", bert_tokens), ("t5-tiny", t5_tokens)):
        try:
            special_tokens(tokenizer)
        except DataError:
            continue
        return recipe
    return "llama-4m"  # its text can still be read from left to right


def _describe(
    summary: "PrepareSummary", out: Path, recipe: str, *, lacks_sentences: bool, more: Sequence[str] = ()
) -> str:
    """Describes the dataset, with ``more`` lines, and the command to run next.

    ``lacks_sentences``: the tokenizer is for a model whose samples consist of sentences, and the dataset has none.
    """
    lines = ["nothing to do: this command has already been run, and its files exist" if summary.was_done else "done"]
    for name, part in (("training", summary.train), ("held out", summary.valid)):
        if part is not None:
            empty = f", {part.num_empty_documents:,} of them empty" if part.num_empty_documents else ""
            lines.append(
                f"{name:<10}{counted(part.num_documents, 'document')}{empty}, {counted(part.num_tokens, 'token')}, "
                f"{part.text_bytes / max(1, part.num_tokens):.2f} bytes per token"
            )
    lines += more
    lines.append(f"{'tokenizer':<10}{summary.train.vocab_size:,} entries, {_short(summary.tokenizer)}")
    lines += describe_folders(summary.sources, 10)
    if lacks_sentences:
        lines.append(f"{'sentences':<10}none; to train BERT or T5, prepare with --split-sentences and another --out")
    lines.append(f"{'files':<10}" + "\n          ".join(_short(path) for path in summary.files))
    valid = "" if summary.valid_prefix is None else f" data.valid={_short(summary.valid_prefix)}"
    return "\n".join([*lines, f"next: megalith train {recipe} data.train={out}{valid}"])


def _short(path: Path) -> str:
    """The path relative to the working folder, if it is inside that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
