"""The README's commands, as they stand there, with less text and fewer steps."""

import re
import shlex
from pathlib import Path

from tests.program import Ended, here, start
from tests.training.test_faults import FAULTS
from tests.training.test_layouts import LAYOUTS

README = (Path(__file__).parent.parent / "README.md").read_text()
SMALLER = ["train.steps=4", "train.global_batch_size=4", "train.micro_batch_size=1", "optim.warmup_steps=0"]
SMALLER += ["data.seq_length=32", "model.num_layers=1", "optim.decay_steps=4"]


def commands(heading: str) -> list[list[str]]:
    """The words of each command in the first block below ``heading``."""
    block = re.search(rf"## {heading}\n+```\n(.*?)```", README, re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].splitlines()]


def in_a_program(*arguments: object) -> Ended:
    return start(*arguments).ended()


def test_the_three_commands_for_your_own_text_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "my_texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"Once there were {number} ships, and each had a name. " * 20)
    prepare, train, generate = commands("Your own text")
    # the program is started where it starts ranks; a start takes seconds
    for command, more, run in (
        (prepare, [], here),
        (train, SMALLER, in_a_program),
        (generate, ["--max-new-tokens", "5"], here),
    ):
        assert command[0] == "megalith"
        found = run(*command[1:], *more)
        assert found.code == 0, found
    assert found.out.startswith("Once")
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/step-00000004", "report.html"):
        assert (tmp_path / "runs" / "mine" / name).exists(), name


def test_the_numbers_of_layouts_and_faults_are_those_of_the_suites():
    assert f"| {len(LAYOUTS)} layouts of" in README
    assert f"{len(FAULTS)} seeded faults" in README


def test_every_page_that_the_readme_names_is_there():
    for page in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (Path(__file__).parent.parent / page).exists(), page
