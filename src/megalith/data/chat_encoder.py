"""Turns one conversation into tokens, and tells those that the assistant writes, which are learned, from their context.

The text of a conversation is rendered with the chat template and tokenized once, as a whole. What precedes message i of
the assistant is the text of the messages before it with the template's generation prompt, so that what it adds, up to
and including its end-of-turn token, is the text of messages 0 to i without that. A template may instead enclose what
the assistant writes in ``{% generation %}`` blocks. A token is learned if it has a character of such a span.

Special tokens that the template writes are encoded as such. A message that spells one must not forge it: its spelling
is put between two marks, characters that the conversation does not have, and encoded as ordinary text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megalith.data.chat_format import ChatFormat
from megalith.data.chat_records import ASSISTANT, learned_turns, read_record
from megalith.data.chat_template import ChatTemplate, Message
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError

__all__ = ["ChatEncoder", "EncodedChat"]

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode reserves them for uses like this

Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens.

    Attributes:
        tokens: all its ids.
        lengths: how many of them are context, learned, context, and so on; the first may be 0.
        num_bytes: size of its text in UTF-8.
    """

    tokens: list[int]
    lengths: list[int]
    num_bytes: int


class ChatEncoder:
    """Encodes records of the forms in ``chat_records.py``.

    Raises:
        DataError: the template is invalid.
    """

    def __init__(self, tokenizer: Tokenizer, format: ChatFormat) -> None:
        self._tokenizer, self._split_turns = tokenizer, format.split_turns
        tokens = {"bos_token": tokenizer.begin_text, "eos_token": tokenizer.eod_text, **dict(format.tokens)}
        self._template = None if format.template is None else ChatTemplate(format.template, tokens)
        self._tools_template = self._template
        if format.tools_template is not None:
            self._tools_template = ChatTemplate(format.tools_template, tokens)
        longest_first = sorted(filter(None, tokenizer.special_texts), key=lambda text: (-len(text), text))
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) never matches

    def __call__(self, record: Mapping[str, Any]) -> list[EncodedChat]:
        """The documents of ``record``: one, or with ``split_turns`` one for each message of the assistant.

        Raises DataError if the record has another form, or nothing to learn.
        """
        found = read_record(record)
        messages, tools = found.messages, found.tools
        template = self._tools_template if tools else self._template
        if template is None:
            if found.texts is not None:
                return [self._without_template(*found.texts)]
            raise DataError(
                "has messages, but the model has no chat template; give --chat-template FILE, or records with the "
                "texts prompt and completion"
            )
        turns = learned_turns(messages)
        if self._split_turns:
            return [self._conversation(template, messages[: turn + 1], tools, [turn]) for turn in turns]
        return [self._conversation(template, messages, tools, turns)]

    def _conversation(
        self, template: ChatTemplate, messages: Sequence[Message], tools: list[Any] | None, learned: Sequence[int]
    ) -> EncodedChat:
        """The tokens of ``messages``, with those of the messages ``learned`` to be learned."""
        forged_marks, learned_marks = _marks_absent_from([*messages, *(tools or ())])
        mark = partial(self._special.sub, rf"{forged_marks[0]}\g<0>{forged_marks[1]}")
        marked = [_mapped(message, mark) for message in messages]
        render = partial(template.render, tools=_mapped(tools, mark), marks=learned_marks)
        if template.marks_learned_text:
            text, spans = _spans_in_blocks(render(marked), learned_marks)
            spans = _of_turns(spans, messages, learned)
        else:
            text, spans = _spans_of_turns(render, marked, learned)
        return self._encoded(text, spans, forged_marks)

    def _without_template(self, prompt: str, completion: str) -> EncodedChat:
        """The tokens that begin a text, the two texts, and the end-of-document token, which is learned."""
        text = prompt + completion
        num_bytes = _num_bytes(text)
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        begin = self._tokenizer.begin
        learned = [*(False for _ in begin), *_in_spans(offsets, [(len(prompt), len(text))], len(text)), True]
        return EncodedChat([*begin, *ids, self._tokenizer.eod], _alternating(learned), num_bytes)

    def _encoded(self, text: str, spans: Sequence[Span], marks: tuple[str, str]) -> EncodedChat:
        """The tokens of ``text``, in which ``marks`` enclose what must not become a special token."""
        ids: list[int] = []
        offsets: list[Span] = []
        num_bytes = 0
        for start, piece, is_forged in _pieces(text, marks):
            num_bytes += _num_bytes(piece)
            own, places = self._tokenizer.encode_with_offsets(piece, special_tokens=not is_forged)
            ids += own
            offsets += [(start + first, start + end) for first, end in places]
        learned = _in_spans(offsets, spans, len(text))
        if not any(learned):
            raise DataError(f"must have text of the {ASSISTANT} to learn; the chat template writes none; remove it")
        return EncodedChat(ids, _alternating(learned), num_bytes)


def _spans_in_blocks(text: str, marks: tuple[str, str]) -> tuple[str, list[Span]]:
    """``text`` without ``marks``, and where those were that enclose a block."""
    pieces, spans, length = re.split(f"[{''.join(marks)}]", text), list[Span](), 0
    for number, piece in enumerate(pieces):
        if number % 2:  # blocks are not nested
            spans.append((length, length + len(piece)))
        length += len(piece)
    return "".join(pieces), spans


def _of_turns(spans: list[Span], messages: Sequence[Message], learned: Sequence[int]) -> list[Span]:
    """The ``spans`` of generation blocks for the messages ``learned`` of all the assistant's."""
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if list(learned) == turns:
        return spans
    if len(spans) != len(turns):
        raise DataError(
            f"must have one generation block of the chat template for each message of the {ASSISTANT}, to learn "
            f"only some of them; it has {len(spans)} for {len(turns)}; use a template that encloses each message"
        )
    return [span for span, turn in zip(spans, turns, strict=True) if turn in learned]


def _spans_of_turns(
    render: Callable[..., str], messages: Sequence[Message], learned: Sequence[int]
) -> tuple[str, list[Span]]:
    """The text of ``messages``, and what each of those in ``learned`` adds to the text before it."""
    whole, spans = render(messages), []
    for turn in learned:
        before = render(messages[:turn], add_generation_prompt=True)
        until = whole if turn == len(messages) - 1 else render(messages[: turn + 1])
        if not until.startswith(before):
            at = next((i for i, pair in enumerate(zip(before, until, strict=False)) if pair[0] != pair[1]), len(until))
            raise DataError(
                f"cannot be split at message {turn}: the chat template ends a prompt with {before[at:]!r:.60}, where "
                f"the message itself has {until[at:]!r:.60}; use a --chat-template with {{% generation %}} blocks"
            )
        if not whole.startswith(until):
            raise DataError(
                f"cannot be split after message {turn}: the chat template writes that message or earlier ones "
                "differently if others follow (some remove earlier reasoning); use --split-turns, which makes each "
                f"message of the {ASSISTANT} the last one of a document, or a --chat-template with "
                "{% generation %} blocks"
            )
        spans.append((len(before), len(until)))
    return whole, spans


def _pieces(text: str, marks: tuple[str, str]) -> Iterator[tuple[int, str, bool]]:
    """Position and text of each piece of ``text`` around ``marks``, and whether it was enclosed by them."""
    begin, end = marks
    start = 0
    for found in re.finditer(rf"[{begin}{end}]|\Z", text):
        if piece := text[start : found.start()]:
            yield start, piece, text[start - 1 : start] == begin and found.group() == end
        start = found.end()


def _in_spans(offsets: Sequence[Span], spans: Sequence[Span], length: int) -> list[bool]:
    """For each token, whether one of its characters is in a span; a token of no characters counts as the next one."""
    if not offsets:
        return []
    is_inside = np.zeros(length + 1, np.int64)
    for start, end in spans:
        is_inside[start:end] = 1
    before = np.concatenate(([0], np.cumsum(is_inside)))
    starts, ends = np.array(offsets).T
    found: list[bool] = (before[np.maximum(ends, starts + 1)] > before[starts]).tolist()
    return found


def _alternating(learned: Sequence[bool]) -> list[int]:
    """Lengths of the runs of ``learned``, the first of them False."""
    borders = np.flatnonzero(np.diff(np.array([False, *learned]))).tolist()
    lengths: list[int] = np.diff([0, *borders, len(learned)]).tolist()
    return lengths


def _marks_absent_from(content: Any) -> tuple[tuple[str, str], tuple[str, str]]:
    """Two pairs of characters that no text in ``content`` has. Raises DataError if all candidates occur."""
    texts: list[str] = []
    _mapped(content, lambda text: texts.append(text))
    free = [mark for mark in _NONCHARACTERS if not any(mark in text for text in texts)]
    if len(free) < 4:
        raise DataError("must be text; it contains nearly all of the noncharacters U+FDD0 to U+FDEF; remove them")
    return (free[0], free[1]), (free[2], free[3])


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    """``value`` with ``change`` applied to each text in its lists and objects; their keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(f"must be text; {text[error.start]!r} is an unpaired surrogate") from error
