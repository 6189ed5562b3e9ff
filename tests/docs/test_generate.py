"""docs/generate.md: its Python block runs; test_commands runs its commands."""

import ast

from tests.docs.pages import python_blocks


def test_the_block_draws_a_text_for_every_prompt(capsys):
    [source] = python_blocks("generate.md")
    names: dict[str, object] = {}
    exec(compile(source, "docs/generate.md", "exec"), names)
    assert [0 < len(text) <= 8 for text in names["texts"]] == [True] * 3
    lines = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 8
    assert all(len(tokens) == 3 for tokens in lines)
