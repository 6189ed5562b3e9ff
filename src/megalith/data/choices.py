"""Multiple-choice questions: a JSONL file of {"context": text, "choices": [text, text, ...], "answer": index}.

A choice is appended to the context as it is, so it includes the space: {"context": "The sky is", "choices": [" blue",
" loud"], "answer": 0}. Answers count from 0; other fields and empty lines are ignored.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.input_file import read_regular_file

__all__ = ["Question", "read_questions"]

_MOST_BYTES = 1 << 28
_MOST_TOLD = 10  # lines listed in an error message


@dataclass(frozen=True)
class Question:
    """``answer``: index in ``choices`` of the correct one."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str | Path) -> list[Question]:
    """Reads the questions of the file ``path``, one per line.

    Raises DataError if it cannot be read, holds no question, or has malformed lines; the first ones are listed.
    """
    try:
        lines = read_regular_file(path, _MOST_BYTES).split(b"\n")
    except OSError as error:
        raise DataError(f"questions cannot be read from {path}: {error.strerror}; check the path") from error
    questions, wrong = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parsed(line)
        problems = list(_problems(record))
        if problems:
            wrong.append(f"line {number}: {'; '.join(problems)}")
        else:
            questions.append(Question(record["context"], tuple(record["choices"]), record["answer"]))
    if wrong:
        more = [f"  and {len(wrong) - _MOST_TOLD:,} more"] if len(wrong) > _MOST_TOLD else []
        told = "\n".join([*(f"  {each}" for each in wrong[:_MOST_TOLD]), *more])
        wanted = '{"context": text, "choices": [text, text, ...], "answer": index}'
        raise DataError(f"each line of {path} must be {wanted}:\n{told}")
    if not questions:
        raise DataError(f"{path} contains no questions; write one per line")
    return questions


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _problems(record: Any) -> Iterator[str]:
    """Describes why ``record`` is not a valid question."""
    if not isinstance(record, dict):
        yield "it is not a JSON object in UTF-8"
        return
    choices, answer = record.get("choices"), record.get("answer")
    if not _is_text(record.get("context")):
        yield f"context must be text; got {record.get('context')!r:.60}"
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(choice) and choice for choice in choices):
        yield f"choices must be at least two non-empty texts; got {choices!r:.60}"
    elif type(answer) is not int or not 0 <= answer < len(choices):
        yield f"answer must be an integer from 0 to {len(choices) - 1}; got {answer!r:.60}"


def _is_text(value: Any) -> bool:
    """Whether ``value`` is text that UTF-8 can encode: JSON may contain half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
