"""``megalith convert``: imports and exports Hugging Face models, proves that logits match, and upcycles models."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megalith.cli.console import Announcer, Console, Progress, show_log, show_text
from megalith.cli.paths import path_argument, path_option
from megalith.garbage_collection import importing
from megalith.wording import counted

if TYPE_CHECKING:
    from megalith.data.tokenizer import Tokenizer
    from megalith.training.tasks.conversion import Exported, Imported, LogitProof

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

Out = Annotated[Path, path_option("The folder to create; it must not exist yet.", "DIR")]
Run = Annotated[str, path_argument("A run's folder, or one of its checkpoints.", "RUN", kind=str)]
NoProof = Annotated[bool, typer.Option("--no-proof", help="Do not compare logits with transformers.")]
Scaling = Literal["exact", "published"]
_WRITING = "writing the run's folder"
_COMPARING = "comparing logits with transformers"


@app.callback()
def convert() -> None:
    """Import and export Hugging Face models; upcycle a dense model to a mixture of experts."""


@app.command("import")
def import_command(
    source: Annotated[
        str, path_argument("A Hugging Face model folder, or an iter_... folder of Megatron.", "FOLDER", kind=str)
    ],
    out: Out,
    eod: Annotated[
        str | None, typer.Option(help="Token of its tokenizer that ends a document, if not the one in config.json.")
    ] = None,
    no_proof: NoProof = False,
) -> None:
    """Convert a Hugging Face or Megatron model to a run at step 0, to generate with, evaluate and train."""
    from megalith.observe.units import quantity

    with _progress(f"reading {source}") as progress:
        with importing():
            from megalith.training.tasks.conversion import import_model

        found = import_model(source, out, eod, with_proof=not no_proof, progress=progress)
    folder = found.folder
    show_text(
        f"model      {folder.architecture}, {quantity(found.num_parameters)} parameters in {folder.weights.dtype}, "
        f"{quantity(folder.weights.num_bytes)}B\n"
        f"{_tokenizer_line(found.tokenizer)}{_proof_line(found.proof)}"
        f"next: {', or '.join(_uses(found, out))}"
    )


def _uses(imported: "Imported", out: Path) -> list[str]:
    """Returns the commands that can use the model of the run ``out``."""
    model, train = imported.folder.config, f"megalith train {out} data.train=PREFIX"
    if model.bert is None:
        prompt = '--prompt "Once"' if model.t5 is None else '--special-tokens --prompt "Once <extra_id_0> name."'
        return [train] if imported.tokenizer is None else [f"megalith generate {out} {prompt}", train]
    if model.bert.head == "embedding":  # both need a tokenizer, and training takes one from its data
        evaluation = [] if imported.tokenizer is None else [f"megalith eval {out} --data PAIRS"]
        return [*evaluation, f"megalith train {out} data.train=PAIRS"]
    tune = f"megalith train classification-tiny --from {out} data.train=PREFIX model.bert.num_classes=N"
    if not model.bert.num_text_scores:  # a new pooler as in Hugging Face's classifiers, so that it can be exported
        tune += " model.bert.classifier_pooling=first"
        tune += "" if model.rope is None else f" model.bert.classifier_activation={model.activation}"
    # evaluation needs the run's tokenizer, and no built-in task has the head for multiple choice
    has_loss = imported.tokenizer is not None and model.bert.head != "multiple_choice"
    return [f"megalith eval {out} --data PREFIX", tune] if has_loss else [tune]


@app.command("export")
def export_command(
    source: Run,
    out: Out,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the tensors; by default the compute dtype of the run.")
    ] = None,
    no_proof: NoProof = False,
) -> None:
    """Export a run or checkpoint, written in any layout, to a folder that transformers can load."""
    with _progress(f"reading {source}") as progress:
        with importing():
            from megalith.training.tasks.conversion import export_model

        found = export_model(source, out, dtype, with_proof=not no_proof, progress=progress)
    why = "" if dtype else ", the compute dtype of the run; use --dtype for another"
    left_out = "".join(f"left out   {part}\n" for part in found.left_out)
    show_text(
        f"model      {found.family.architecture} of {found.checkpoint}, in {found.dtype}{why}\n"
        f"{left_out}{_tokenizer_line(found.tokenizer)}{_proof_line(found.proof)}"
        f"next: {_loading(found, out)}"
    )


def _loading(exported: "Exported", out: Path) -> str:
    """Returns the Python that loads the folder ``out``."""
    load = f'transformers.{exported.family.architecture}.from_pretrained("{out}")'
    if not exported.family.embeds:
        return load
    return f'sentence_transformers.SentenceTransformer("{out}").encode(TEXTS); its encoder alone: {load}'


@app.command("upcycle")
def upcycle_command(
    source: Annotated[
        str, path_argument("A dense model: a run, a checkpoint, or a Hugging Face model folder.", "SRC", kind=str)
    ],
    overrides: Annotated[
        list[str],
        typer.Argument(
            help="Settings of the experts: model.moe.num_experts=8 model.moe.ffn_hidden_size=352 ...",
            metavar="KEY=VALUE...",
        ),
    ],
    out: Out,
    scaling: Annotated[
        Scaling, typer.Option(help="exact: equals the dense model for every activation; published: as in the paper.")
    ] = "exact",
    noise: Annotated[
        float, typer.Option(help="[ratio] Noise on expert weights, so that copies differ, as a fraction of their std.")
    ] = 0.0,
) -> None:
    """Convert a dense model to a run at step 0 with a mixture of experts made from its MLPs, to train."""
    from megalith.observe.units import quantity

    with _progress(f"reading {source}", _WRITING) as progress:
        with importing():
            from megalith.training.tasks.conversion import upcycle_model

        found = upcycle_model(source, out, overrides, scaling=scaling, noise=noise, progress=progress)
    moe, num_shards = found.config.moe, found.config.ffn_hidden_size // found.config.expert_ffn_hidden_size
    assert moe is not None, "an upcycled model has experts"
    reasons = "".join(f"not exact  {reason}\n" for reason in found.inexact_for)
    show_text(
        f"model      {quantity(found.num_parameters)} parameters; new ones in {found.dtype}\n"
        f"experts    {moe.num_experts} per layer, {moe.top_k} per token: "
        f"{counted(moe.num_experts // num_shards, 'copy', 'copies')} of {counted(num_shards, 'shard')} of an MLP\n"
        f"{reasons}{_tokenizer_line(found.tokenizer)}"
        f"next: megalith train {out} data.train=PREFIX, or megalith train RECIPE --from {out} run=..."
    )


@app.command("prove")
def prove_command(
    source: Run,
    folder: Annotated[str, path_argument("A Hugging Face model folder.", "HF_FOLDER", kind=str)],
) -> None:
    """Compare the logits of a run with those that transformers computes for a Hugging Face model."""
    with Announcer() as announcer:
        announcer.begin(_COMPARING)
        with importing():
            from megalith.training.tasks.conversion import prove

        proof = prove(source, folder)
    show_text(str(proof))


@contextmanager
def _progress(reading: str, then: str = _COMPARING) -> Iterator[Callable[[int, int], None]]:
    """Shows log lines and the progress of long operations on standard error; ``then`` is announced once all is read."""
    from megalith.observe.units import quantity

    console = Console(sys.stderr)
    show_log(console)
    show = Progress(console, lambda done, total: f"{quantity(done)}B of {quantity(total)}B")
    with Announcer() as announcer:
        announcer.begin(reading)

        def progress(done: int, total: int) -> None:
            if done == total:
                console.close()
                announcer.begin(then)
            elif done:
                announcer.end()
                show(done, total)

        try:
            yield progress
        finally:
            console.close()


def _tokenizer_line(tokenizer: "Tokenizer | None") -> str:
    if tokenizer is None:
        return "tokenizer  no tokenizer.json was found, so none was written\n"
    return f"tokenizer  {tokenizer.vocab_size:,} entries; {tokenizer.eod_text!r} ends a document\n"


def _proof_line(proof: "LogitProof | str | None") -> str:
    if proof is None:
        return ""
    return f"proof      skipped: {proof}\n" if isinstance(proof, str) else f"proof      {proof}\n"
