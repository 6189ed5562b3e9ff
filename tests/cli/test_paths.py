"""~ in paths: expanded in settings and arguments, where quotes or ``--out=`` have kept the shell from it."""

from pathlib import Path

import pytest
import typer

from megalith.cli.main import app
from megalith.cli.paths import with_home
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


def test_every_argument_and_option_that_is_a_path_expands_the_home_folder():
    parameters = [each for command in commands(typer.main.get_command(app)) for each in command.params]
    paths = [each for each in parameters if each.metavar in PATHS or each.name in ("data", "out", "tokenizer")]
    assert len(paths) >= 30
    assert [each.name for each in paths if each.callback is None] == []


def test_a_run_is_trained_evaluated_and_reported_in_the_home_folder(home):
    [command, settings, *_] = train(home, "train.steps=1")
    assert here(command, f"~/{settings.name}", "train.steps=1", "run=~/mine", "data.train=~/text").code == 0
    assert (home / "mine" / "report.html").is_file()
    assert here("eval", "~/mine", "--data=~/text").code == 0
    assert here("report", "~/mine", "--out=~/page.html").code == 0
    assert (home / "page.html").is_file()
    assert here(command, "--from=~/mine", "data.train=~/text", "run=~/next", "--dry-run").code == 0
    assert list(Path().iterdir()) == []


def test_several_files_a_url_and_nothing_are_kept_as_they_are(home):
    assert with_home([Path("~/a"), Path("b")]) == [home / "a", Path("b")]
    assert with_home("file:///~/a") == "file:///~/a"
    assert with_home("a/~") == "a/~"
    assert with_home("-") == "-"
    assert with_home(None) is None


def test_the_home_folder_of_a_user_who_does_not_exist_is_refused(home):
    message = "must begin with a home folder that exists, and none does for ~nobody-here; use ./~nobody-here instead"
    found = here(*train(home, "run=~nobody-here/run"))
    assert found.code == 2
    assert f"\n  run {message}; got '~nobody-here/run'" in found.err
    with pytest.raises(ConfigError, match=f"~nobody-here/run: the path {message}"):
        with_home("~nobody-here/run")
    assert list(Path().iterdir()) == []
