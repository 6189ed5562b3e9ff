"""docs/data.md: its code runs, and its table lists the inputs that are read."""

from pathlib import Path

from megalith.data.prepare import sources

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = (block.removeprefix("python\n") for block in PAGE.split("```") if block.startswith("python\n"))
    exec(compile(code, "data.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("2 ")
    assert shown[-1] == "(2, 16) [4 5]"


def test_every_suffix_with_a_meaning_is_on_the_page():
    for suffix in sources._FORMATS:
        assert f"`{suffix}`" in PAGE
