"""docs/when_things_go_wrong.md: the messages it quotes are those of the program."""

import re

import pytest

from megalith.resilience.stop_signals import REQUESTS
from tests.docs.pages import ROOT, page

TEXT = page("when_things_go_wrong.md")
# the fixed text of a message
QUOTED = [
    "was killed by",
    "(out of memory?)",
    "run the same command to continue from step",
    "failed:",
    "the process that the ranks were forked from has died",
    "train.time_limit",
    "waiting for rank",
    "does not answer",
    "no step in",
    "is in use by another run",
    "it is not a complete checkpoint",
    "changed since step",
    "nothing to do: ",
]


def test_every_signal_that_asks_for_an_end_is_in_the_table():
    for number in REQUESTS:
        assert number.name in TEXT


@pytest.mark.parametrize("words", QUOTED)
def test_a_message_that_is_explained_is_one_that_is_printed(words):
    assert words in TEXT
    sources = (file.read_text("utf-8") for file in (ROOT / "src" / "megalith").rglob("*.py"))
    assert any(words in source for source in sources)


def test_the_exit_codes_are_those_of_the_table_of_deaths():
    codes = set(re.findall(r"^\| (\d+|128 \+ number) \|", TEXT, re.MULTILINE))
    assert codes == {"0", "1", "2", "75", "128 + number"}
