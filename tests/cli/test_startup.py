"""Commands that start fast: without torch, and without the settings if their names are not needed."""

import json
import subprocess
import sys

from megalith import __version__

PROGRAM = """
import contextlib, io, json, os, sys
from megalith.cli.main import run

answers = []
for arguments, environment in json.loads(sys.argv[1]):
    sys.argv = ["megalith", *arguments]
    os.environ.update(environment)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run()
    for name in environment:
        del os.environ[name]
    loaded = [name for name in ("megalith.config", "numpy", "torch") if name in sys.modules]
    answers.append([code, out.getvalue(), err.getvalue(), loaded])
print(json.dumps(answers))
"""


def complete(words: str) -> list[object]:
    """What bash requests when somebody presses TAB after ``words``."""
    last = str(len(words.split(" ")) - 1)
    return [[], {"_MEGALITH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": last}]


ASKED = [
    [["--help"], {}],
    [["--version"], {}],
    [["train"], {}],
    [["train", "optim.lr=1"], {}],
    [["recipes", "list"], {}],
    [["recipes", "show", "llama-4m"], {}],
    complete("megalith train lla"),
    [["train", "llama-4m", "--nproc", "0"], {}],
    complete("megalith train llama-4m optim.wa"),  # last, because it asks for names of settings
]


def test_questions_are_answered_before_anything_large_is_loaded():
    run = [sys.executable, "-c", PROGRAM, json.dumps(ASKED)]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    *answers, nproc, settings = json.loads(out)
    help_, version, train, override, names, recipe, completed = answers
    assert [loaded for _, _, _, loaded in answers] == [[]] * len(answers)
    assert nproc[3] == []
    assert settings[3] == ["megalith.config"]
    for command in ("demo", "data", "recipes", "train", "eval", "generate", "verify", "doctor"):
        assert f"\n  {command} " in help_[1]
    assert len(help_[1].splitlines()) < 25
    assert version[:2] == [0, f"megalith {__version__}\n"]
    for answer in (train, override):
        assert answer[0] == 2
        assert answer[2].startswith(
            "error: give a recipe or a YAML file first: bert-tiny, classification-tiny, embedding-tiny, gpt2-124m, "
        )
    assert (names[0], recipe[0]) == (0, 0)
    assert completed[1].split() == ["llama-28m", "llama-4m"]
    assert settings[1].split() == ["optim.warmup_steps="]
    assert (nproc[0], "--nproc must be at least 1" in nproc[2]) == (2, True)


def test_a_low_limit_on_open_files_is_raised_as_far_as_allowed():
    program = (
        "import resource; from megalith.cli import main\n"
        "for limits in ((64, 128), (64, 1 << 20), (128, 128)):\n"
        "    resource.setrlimit = lambda _, wanted: print(*wanted)\n"
        "    resource.getrlimit = lambda _: limits\n"
        "    main._allow_many_files()\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["128 128", f"{1 << 16} {1 << 20}"]
