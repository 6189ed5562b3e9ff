"""~ in paths: expanded in settings and arguments, where quotes or ``--out=`` have kept the shell from it."""

import inspect
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import pytest
import typer

from megalith.cli.main import app
from megalith.cli.paths import path_argument, path_option
from megalith.errors import ConfigError
from tests.cli.mistakes import train
from tests.program import here

PATHS = {"DIR", "FILE", "FILE.jsonl", "FILES", "FOLDER", "HF_FOLDER", "MODEL", "PATH", "PREFIX", "RECIPE", "RUN", "SRC"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def commands(command):
    """``command`` and all commands below it."""
    return [command, *(each for one in getattr(command, "commands", {}).values() for each in commands(one))]


def types_in(annotation):
    """The types in an annotation such as ``list[Path] | None``."""
    return {annotation}.union(*map(types_in, get_args(annotation)))


def test_every_argument_and_option_that_is_a_path_expands_the_home_folder(home):
    num_paths = 0
    for command in commands(typer.main.get_command(app)):
        hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
        for name, hint in hints.items():
            annotation, *how = getattr(hint, "__origin__", hint), *getattr(hint, "__metadata__", ())
            if name in ("data", "out", "tokenizer") or any(each.metavar in PATHS for each in how):
                [how] = how
                assert str(how.parser("~/x")) == f"{home}/x", name
                assert types_in(annotation) & {Path, str} == {Path if isinstance(how.parser("x"), Path) else str}, name
                num_paths += 1
    assert num_paths >= 30


def test_a_run_is_trained_evaluated_and_reported_in_the_home_folder(home):
    [command, settings, *_] = train(home, "train.steps=1")
    assert here(command, f"~/{settings.name}", "train.steps=1", "run=~/mine", "data.train=~/text").code == 0
    assert (home / "mine" / "report.html").is_file()
    assert here("eval", "~/mine", "--data=~/text").code == 0
    assert here("report", "~/mine", "--out=~/page.html").code == 0
    assert (home / "page.html").is_file()
    assert here(command, "--from=~/mine", "data.train=~/text", "run=~/next", "--dry-run").code == 0
    assert list(Path().iterdir()) == []


def read_as(kind: type, *arguments: str) -> list[object]:
    """What a command gets for ``arguments`` of ``kind``, and for the last one as an option."""
    found: list[object] = []
    program, given_nothing = typer.Typer(), kind(".")

    @program.command()
    def command(
        several: Annotated[list[kind], path_argument("Paths.", "FILES", kind=kind)],
        one: Annotated[kind | None, path_option("Path.", kind=kind)] = None,
        nothing: Annotated[kind | None, path_option("Path.", kind=kind)] = None,
        default: Annotated[kind, path_option("Path.", kind=kind)] = given_nothing,
    ) -> None:
        assert nothing is None
        assert default == given_nothing
        found.extend([*several, one])

    program([*arguments, "--one", arguments[-1]], standalone_mode=False)
    return found


@pytest.mark.parametrize("kind", [Path, str])
def test_only_what_begins_with_a_home_folder_is_expanded(kind, home):
    for given in ("~", "~/x"):
        expanded = kind(given.replace("~", str(home)))
        assert read_as(kind, "b", given) == [kind("b"), expanded, expanded]
    for given in ("file:///~/a", "a/~", "-"):
        assert read_as(kind, given) == [kind(given)] * 2


@pytest.mark.parametrize("kind", [Path, str])
def test_a_path_in_the_working_folder_may_begin_with_a_tilde(kind, home):
    for given in ("./~", "./~/x", "./~x", "././/~nobody-here"):
        here = kind(Path.cwd() / Path(given))
        assert read_as(kind, given) == [here, here]  # absolute: expanding it again changes nothing
    (Path.cwd() / "~notes.txt").touch()
    (Path.cwd() / "~").mkdir()
    for given in ("~notes.txt", "~"):  # as the shell names them for *
        here = kind(Path.cwd() / given)
        assert read_as(kind, given) == [here, here]


def test_files_that_begin_with_a_tilde_are_prepared(home):
    Path("~notes.txt").write_text("a text")
    tokenizer = home / "corpus-tokenizer.json"
    assert here("data", "prepare", "~notes.txt", "--out=~/corpus", "--vocab-size", 257).code == 0
    assert here("data", "prepare", "./~notes.txt", "--out=./~/corpus", "--tokenizer", tokenizer).code == 0
    assert Path("./~/corpus.bin").read_bytes() == (home / "corpus.bin").read_bytes()
    assert here("data", "inspect", "./~/corpus").code == 0


def test_the_home_folder_of_a_user_who_does_not_exist_is_refused(home):
    message = "must begin with a home folder that exists, and none does for ~nobody-here; use ./~nobody-here instead"
    found = here(*train(home, "run=~nobody-here/run"))
    assert found.code == 2
    assert f"\n  run {message}; got '~nobody-here/run'" in found.err
    for kind in (Path, str):
        with pytest.raises(ConfigError, match=f"~nobody-here/run: the path {message}"):
            read_as(kind, "~nobody-here/run")
    assert list(Path().iterdir()) == []
