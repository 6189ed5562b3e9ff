"""``megalith train``: trains a recipe or YAML file with dotted overrides."""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalith.cli.console import Announcer, Console, say, say_over, show_log, show_text
from megalith.cli.paths import path_argument, path_option
from megalith.cli.recipes import complete_recipe
from megalith.garbage_collection import importing
from megalith.recipe_files import require_source
from megalith.resilience.rank_link import is_supervised, tell
from megalith.resilience.stop_request import StopRequest
from megalith.resilience.stop_signals import REQUESTS, handled
from megalith.resilience.verdict import SAVED

if TYPE_CHECKING:
    from megalith.config import RunConfig
    from megalith.training.torchrun_environment import LaunchedRank

__all__ = ["train"]


def _complete_source(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: recipes and YAML files."""
    folder = Path(incomplete).parent
    files = sorted(str(path) for path in folder.glob("*.yaml") if str(path).startswith(incomplete))
    return [*complete_recipe(incomplete), *((file, "") for file in files)]


def _complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: settings, each with its description."""
    from megalith.config.settings_tree import FIELDS

    return [(f"{name}=", field.description or "") for name, field in FIELDS.items() if name.startswith(incomplete)]


Source = Annotated[
    str | None,
    path_argument(
        "A recipe, a YAML file, or a run's folder, which train continues; if omitted, the recipes are listed.",
        "RECIPE",
        _complete_source,
        kind=str,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings to override, such as optim.lr=3e-4 parallel.tensor=2.",
        metavar="[KEY=VALUE]...",
        autocompletion=_complete_override,
    ),
]


def train(
    source: Source = None,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Ranks to start on this machine; for several machines, use torchrun.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and exit.")] = False,
    origin: Annotated[
        str | None,
        path_option(
            "Start from this model: a Hugging Face folder, a run, or a checkpoint; RECIPE may be omitted.",
            "FOLDER",
            "--from",
            kind=str,
        ),
    ] = None,
) -> None:
    """Pretrain a model, or continue a run.

    The same command continues a run that was stopped: exit code 75 means that it was stopped and its state is saved.
    """
    if origin is not None and source is not None and "=" in source:
        overrides = [source, *(overrides or [])]
        source = None
    if origin is None:
        source = require_source(source)  # before torch is imported
    wanted = _Wanted(source, overrides or [], origin)
    from megalith.training.torchrun_environment import launched_rank, num_ranks

    launched = launched_rank()
    world_size = num_ranks(nproc, launched)
    console = Console()
    if dry_run and launched is None:
        _show_plan(wanted, world_size, console)
        return
    if world_size > 1 and launched is None:
        raise typer.Exit(_train_on_ranks(world_size, wanted))
    with StopRequest(partial(_announce, console)) as stop:
        tell(listening=True)
        _train_here(wanted, launched, stop, console, dry_run=dry_run)


@dataclass(frozen=True)
class _Wanted:
    """The arguments that define the run: a recipe, file or folder, overrides, and a model to start from."""

    source: str | None
    overrides: list[str]
    origin: str | None

    def settings(self) -> "tuple[str | Mapping[str, Any], list[str]]":
        """The arguments of ``preflight``. Raises as ``resolve_run_folder`` and ``settings_from``."""
        from megalith.training.preflight import resolve_run_folder
        from megalith.training.tasks.origin import settings_from

        if self.origin is not None:
            return settings_from(self.origin, self.source), self.overrides
        assert self.source is not None, "either a source or --from is given"
        return resolve_run_folder(self.source, self.overrides)

    def check(self, config: "RunConfig") -> None:
        """Checks that a run that goes on has this model to start from. Raises as ``check_origin``."""
        from megalith.training.tasks.origin import check_origin

        if self.origin is not None:
            check_origin(config, self.origin)

    def arguments(self) -> list[str]:
        """The command line arguments that define the same run."""
        source = [] if self.source is None else [self.source]
        return ["train", *source, *self.overrides, *([] if self.origin is None else ["--from", self.origin])]


def _show_plan(wanted: _Wanted, world_size: int, console: Console) -> None:
    """A dry run in this process alone; there is nothing to save, so Ctrl-C ends it like any command."""
    with importing():
        from megalith.training.preflight import preflight

    show_log(console)
    config = preflight(*wanted.settings(), world_size)
    wanted.check(config)
    _describe(config, world_size)


def _train_on_ranks(num_ranks: int, wanted: _Wanted) -> int:
    """Checks the run in this process and trains in one process per rank; returns the exit code."""
    with _nothing_to_save():
        from megalith.resilience.launch import get_ready, launch

        get_ready(num_ranks)  # before this process imports torch too
        with importing():
            from megalith.storage import RunLock
            from megalith.training.machine_fit import check_machine
            from megalith.training.preflight import preflight
            from megalith.training.resume import where_it_goes_on

        config = preflight(*wanted.settings(), num_ranks)
        wanted.check(config)
        check_machine(config, num_ranks, range(num_ranks))
        with RunLock(Path(config.run)):
            pass  # raises here if another run holds the lock; otherwise the ranks would write errors into its logs
    return launch(
        num_ranks,
        wanted.arguments(),
        Path(config.run, "logs"),
        say_over,
        goes_on=lambda: where_it_goes_on(Path(config.run, "checkpoints")),
    )


@contextmanager
def _nothing_to_save() -> Iterator[None]:
    """Inside the ``with`` block a signal ends the program at once, with the exit code that asks for a restart."""

    def stop(number: signal.Signals) -> None:
        say(f"{number.name}: stopped before the ranks were started; run the same command to start again")
        os._exit(SAVED)  # an exception could be raised inside an import, which may turn it into an error of its own

    with handled(REQUESTS, stop):
        yield


def _train_here(
    wanted: _Wanted,
    launched: "LaunchedRank | None",
    stop: StopRequest,
    console: Console,
    *,
    dry_run: bool,
) -> None:
    """Trains in this process, which is one of several ranks or the only one."""
    with importing():
        from megalith.topology.agreement import agreed
        from megalith.training.machine_fit import check_machine
        from megalith.training.preflight import preflight
        from megalith.training.process_group import choose_device, process_group

    show_log(console)
    world_size, local_ranks = (1, range(1)) if launched is None else (launched.world_size, launched.local_ranks)
    # ranks may see different files, so they agree on whether their input is valid
    with process_group(choose_device()) if launched else nullcontext():
        with agreed():
            settings, overrides = wanted.settings()
            config = preflight(settings, overrides, world_size)
            wanted.check(config)
            if not dry_run:
                check_machine(config, world_size, local_ranks)
        if dry_run:
            _describe(config, world_size)
        else:
            as_given = (settings, overrides) == (wanted.source, wanted.overrides)
            run_folder = None if as_given or not isinstance(settings, str) else Path(settings).parent
            _train(config, stop, console, _described(wanted, run_folder, world_size))


def _describe(config: "RunConfig", world_size: int) -> None:
    from megalith.training.dry_run import describe

    with Announcer() as announcer:
        announcer.begin("counting the memory of a step, on tensors that have none")
        description = describe(config, world_size)
    show_text(description)


def _described(wanted: _Wanted, run_folder: Path | None, world_size: int) -> dict[str, str]:
    """The command and recipe to record in the run's folder; the command has ``--nproc`` even under torchrun.

    For settings from ``run_folder``, the recipe is the one that its run was started with.
    """
    from megalith.training.about import recorded

    ranks = ["--nproc", str(world_size)] if world_size > 1 else []
    command = shlex.join(["megalith", *wanted.arguments(), *ranks])
    recipe = wanted.source and Path(wanted.source).stem if run_folder is None else recorded(run_folder, "recipe")
    return {"command": command, **({"recipe": recipe} if isinstance(recipe, str) else {})}


def _train(config: "RunConfig", stop: StopRequest, console: Console, origin: dict[str, str]) -> None:
    with importing():
        from megalith.insight.report import write_report_if_possible
        from megalith.training.loop import Outcome
        from megalith.training.pretrain import pretrain

    is_first = os.environ.get("RANK", "0") == "0"
    with Announcer(console.show) as announcer:
        if is_first:
            announcer.begin("building the model, with initialized or loaded weights")

        def show(line: str) -> None:
            announcer.end()
            console.show(line)

        outcome = pretrain(config, show, console.show_progress, origin=origin, stop=stop)
    console.close()
    draws = outcome is not Outcome.WAS_DONE and is_first
    if draws and (line := write_report_if_possible(config.run)) is not None:
        console.show(line)
    if outcome is Outcome.STOPPED:
        raise typer.Exit(SAVED)


def _announce(console: Console, line: str) -> None:
    """Announces a stop request: through the supervisor if there is one, otherwise on rank 0."""
    if is_supervised():
        tell(asked=line)
    elif os.environ.get("RANK", "0") == "0":
        console.close()  # end the current progress line
        say(line)
