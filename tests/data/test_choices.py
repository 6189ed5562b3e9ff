"""Questions in a JSONL file: what is read, and that a malformed line is reported by its number."""

import pytest

from megalith.data.choices import Question, read_questions
from megalith.errors import DataError

GOOD = '{"context": "über", "choices": [" a", " b", "c"], "answer": 2, "id": 7}'


def test_each_line_is_a_question(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{GOOD}\n\n{{"context": "", "choices": ["x", "y"], "answer": 0}}\r\n', "utf-8")
    assert read_questions(path) == [Question("über", (" a", " b", "c"), 2), Question("", ("x", "y"), 0)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "it is not a JSON object in UTF-8"),
        (b"[1]", "it is not a JSON object in UTF-8"),
        (b"\xff", "it is not a JSON object in UTF-8"),
        (b"[" * 100_000, "it is not a JSON object in UTF-8"),
        (b'{"choices": ["a", "b"], "answer": 0}', "context must be text; got None"),
        (b'{"context": "\\ud800", "choices": ["a", "b"], "answer": 0}', "context must be text; got '\\ud800'"),
        (b'{"context": "", "choices": ["a"], "answer": 0}', "choices must be at least two non-empty texts; got ['a']"),
        (b'{"context": "", "choices": ["a", ""], "answer": 0}', "non-empty texts; got ['a', '']"),
        (b'{"context": "", "choices": "ab", "answer": 0}', "choices must be at least two non-empty texts; got 'ab'"),
        (b'{"context": "", "choices": ["a", "b"], "answer": 2}', "answer must be an integer from 0 to 1; got 2"),
        (b'{"context": "", "choices": ["a", "b"], "answer": true}', "from 0 to 1; got True"),
        (b'{"context": "", "choices": ["a", "b"], "answer": -1}', "from 0 to 1; got -1"),
        (b'{"context": 3, "choices": []}', "context must be text; got 3; choices must be"),
    ],
)
def test_a_malformed_line_is_told_by_its_number(line, says, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + line + b"\n" + GOOD.encode())
    with pytest.raises(DataError) as refusal:
        read_questions(path)
    head, told = str(refusal.value).split("\n")
    assert head.startswith(f"each line of {path} must be {{")
    assert told.startswith("  line 2: ")
    for part in says.split(".*"):
        assert part in told


def test_of_many_malformed_lines_the_first_are_told_and_the_rest_counted(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("{}\n" * 25)
    with pytest.raises(DataError) as refusal:
        read_questions(path)
    lines = str(refusal.value).splitlines()
    assert (len(lines), lines[-1]) == (12, "  and 15 more")


def test_a_file_without_questions_or_that_is_none_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DataError, match="empty contains no questions"):
        read_questions(tmp_path / "empty")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=r"questions cannot be read from .*; check the path"):
            read_questions(path)
