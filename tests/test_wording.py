"""wording: nouns that follow a number."""

from megalith.wording import counted


def test_a_noun_is_plural_unless_there_is_one():
    assert [counted(n, "file") for n in (0, 1, 2, 12345)] == ["0 files", "1 file", "2 files", "12,345 files"]
    assert [counted(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]
