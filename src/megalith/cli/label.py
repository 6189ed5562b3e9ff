"""``megalith data label``: converts a file of texts and their classes to a dataset for classification."""

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import Announcer, show_text
from megalith.cli.paths import path_argument, path_option
from megalith.wording import counted

__all__ = ["label"]


def label(
    file: Annotated[Path, path_argument("A .csv or .tsv file with the columns text and label.", "FILE")],
    out: Annotated[
        Path,
        path_option("Prefix of the files to write: PREFIX.bin, .idx, .json, -classes.json.", "PREFIX"),
    ],
    tokenizer: Annotated[Path, path_option("Path of the tokenizer.json of the model to train.", "PATH")],
    valid: Annotated[
        Path | None, path_option("Held-out texts with the same classes, for PREFIX-valid.", "FILE")
    ] = None,
    classes_of: Annotated[
        str | None,
        path_option(
            "A trained classifier (run, checkpoint or Hugging Face folder) whose classes, in their order, the "
            "texts have; by default the labels of FILE, sorted.",
            "MODEL",
            kind=str,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Truncate texts to this many tokens; by default none are truncated.", metavar="N")
    ] = None,
    eod: Annotated[str | None, typer.Option(help="Token that ends a document, if it has an unusual name.")] = None,
) -> None:
    """Tokenize texts that are each labelled with a class."""
    from megalith.data.class_names import listed
    from megalith.data.labelled import prepare_labelled, read_labelled

    classes = None if classes_of is None else _classes_of(classes_of)
    if valid is not None:  # check it before anything is written
        read_labelled(valid, classes=read_labelled(file, classes=classes).classes)
    found = prepare_labelled(file, out, tokenizer, classes=classes, max_tokens=max_tokens, eod=eod)
    parts = [("training", found)]
    if valid is not None:
        held_out = Path(f"{out}-valid")
        parts.append(
            (
                "held out",
                prepare_labelled(valid, held_out, tokenizer, classes=found.classes, max_tokens=max_tokens, eod=eod),
            )
        )
    for name, part in parts:
        cut = f", {part.num_cut:,} of them cut" if part.num_cut else ""
        show_text(f"{name:<10}{counted(part.num_texts, 'text')}{cut}, {counted(part.num_tokens, 'token')}")
    show_text(f"{'classes':<10}{len(found.classes)}: {listed(found.classes)}")
    beside = "" if valid is None else f" data.valid={out}-valid"
    show_text(
        f"next: megalith train classification-tiny --from RUN data.train={out}{beside} "
        f"model.bert.num_classes={len(found.classes)}"
    )


def _classes_of(model: str) -> tuple[str, ...]:
    """Returns the class names of a trained classifier, in order."""
    with Announcer() as announcer:
        announcer.begin(f"reading the classes of {model}")
        from megalith.errors import ConfigError
        from megalith.training.tasks.origin import classes_at

        if not (found := classes_at(model)):
            raise ConfigError(f"{model} has no class names; leave out --classes-of to use the labels of FILE, sorted")
    return found
