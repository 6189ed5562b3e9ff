"""Turns one conversation into tokens, and tells those that the assistant writes, which are learned, from their context.

The text of a conversation is rendered with the chat template and tokenized once, as a whole. What precedes message i of
the assistant is the text of the messages before it with the template's generation prompt, so that what it adds, up to
and including its end-of-turn token, is the text of messages 0 to i without that. A template may instead enclose what
the assistant writes in ``{% generation %}`` blocks. A token is learned if it has a character of such a span,
a special token if its first character, not counting whitespace that it includes, is in one.

Special tokens that the template writes are encoded as such. A message that spells one must not forge it: what it spells
is encoded as ordinary text (see ``special_tokens.py``).
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from megalith.data.chat.format import ChatFormat
from megalith.data.chat.records import ASSISTANT, ChatRecord, learned_turns, read_record
from megalith.data.chat.special_tokens import SpecialTokens, absent, texts_in
from megalith.data.chat.template import ChatTemplate, Message
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError

__all__ = ["ChatEncoder", "EncodedChat"]

log = logging.getLogger(__name__)

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
    """Encodes records of the forms in ``records.py``.

    Args:
        warn: log a warning if a template ends prompts without the header of an answer, which is then learned.

    Raises:
        DataError: the template is invalid.
    """

    def __init__(self, tokenizer: Tokenizer, format: ChatFormat, *, warn: bool = True) -> None:
        self._tokenizer, self._split_turns = tokenizer, format.split_turns
        tokens = {"bos_token": tokenizer.begin_text, "eos_token": tokenizer.eod_text, **dict(format.tokens)}
        self._template = None if format.template is None else ChatTemplate(format.template, tokens)
        self._tools_template = self._template
        if format.tools_template is not None:
            self._tools_template = ChatTemplate(format.tools_template, tokens)
        templates = list(filter(None, dict.fromkeys([self._template, self._tools_template])))
        self._special = {template: SpecialTokens(tokenizer.special_texts, template) for template in templates}
        for header in filter(None, dict.fromkeys(map(_learned_header, templates if warn else ()))):
            log.warning(
                "the chat template adds nothing for add_generation_prompt, so %r before each answer is learned, and "
                "prompts must not have it; give a --chat-template that adds it, or has {%% generation %%} blocks",
                header,
            )

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
            return [self._conversation(template, found, messages[: turn + 1], [turn]) for turn in turns]
        return [self._conversation(template, found, messages, turns)]

    def _conversation(
        self, template: ChatTemplate, found: ChatRecord, messages: Sequence[Message], learned: Sequence[int]
    ) -> EncodedChat:
        """The tokens of ``messages`` of the record, with those of the messages ``learned`` to be learned."""
        content = [messages, found.tools, [*found.variables.values()]]
        marks = absent(_NONCHARACTERS, texts_in(content), 2)

        def whole(content: Sequence[Any]) -> tuple[str, list[Span]]:
            messages, tools, values = content
            variables = dict(zip(found.variables, values, strict=True))
            return _spans_in_blocks(template.render(messages, tools, variables, marks=marks), marks)

        if template.marks_learned_text:
            text, spans = whole(content)
            spans = _of_turns(spans, messages, learned)
        else:
            render = partial(template.render, tools=found.tools, variables=found.variables)
            text, spans = _spans_of_turns(render, messages, learned)
        forged = self._special[template].forged(text, content, lambda changed: whole(changed)[0])
        return self._encoded(text, spans, forged)

    def _without_template(self, prompt: str, completion: str) -> EncodedChat:
        """The tokens that begin a text, the two texts, and the end-of-document token, which is learned."""
        text = prompt + completion
        num_bytes = _num_bytes(text)
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        begin = self._tokenizer.begin
        learned = [*(False for _ in begin), *_in_spans(offsets, [(len(prompt), len(text))], len(text)), True]
        return EncodedChat([*begin, *ids, self._tokenizer.eod], _alternating(learned), num_bytes)

    def _encoded(self, text: str, spans: Sequence[Span], forged: Sequence[Span]) -> EncodedChat:
        """The tokens of ``text``; what is ``forged`` does not become a special token."""
        ids: list[int] = []
        offsets: list[Span] = []
        num_bytes = _num_bytes(text)
        borders = [0, *(border for span in forged for border in span), len(text)]
        for number, (start, end) in enumerate(pairwise(borders)):
            if start < end:
                own, places = self._tokenizer.encode_with_offsets(text[start:end], special_tokens=number % 2 == 0)
                ids += own
                for id, (first, last) in zip(own, places, strict=True):
                    if id in self._tokenizer.special_ids:  # it may include the whitespace around it (lstrip, rstrip)
                        piece = text[start + first : start + last]
                        first += len(piece) - len(piece.lstrip() or piece)
                        last = min(first + 1, last)
                    offsets.append((start + first, start + last))
        learned = _in_spans(offsets, spans, len(text))
        if not any(learned):
            raise DataError(f"must have text of the {ASSISTANT} to learn; the chat template writes none; remove it")
        return EncodedChat(ids, _alternating(learned), num_bytes)


def _learned_header(template: ChatTemplate) -> str:
    """What ``template`` writes before an answer, if not before one that is to be written; empty if that is nothing."""
    question, answer = {"role": "user", "content": "How are you?"}, {"role": ASSISTANT, "content": "I am fine."}
    try:
        prompts = [template.render([question], add_generation_prompt=is_added) for is_added in (False, True)]
        whole = template.render([question, answer])
    except DataError:  # it requires other messages or variables
        return ""
    if template.marks_learned_text or prompts[0] != prompts[1] or not whole.startswith(prompts[1]):
        return ""
    header, found, _ = whole.removeprefix(prompts[1]).partition(answer["content"])
    return header.strip() if found else ""


def _spans_in_blocks(text: str, marks: Sequence[str]) -> tuple[str, list[Span]]:
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
            at = _first_difference(before, until)
            raise DataError(
                f"cannot be split at message {turn}: the chat template ends a prompt with {before[at:]!r:.60}, where "
                f"the message itself has {until[at:]!r:.60}; use a --chat-template with {{% generation %}} blocks"
            )
        if not whole.startswith(until):
            at = _first_difference(until, whole)
            raise DataError(
                f"cannot be split after message {turn}: the chat template writes {until[at:]!r:.60} if that is the "
                f"last message, and {whole[at:]!r:.60} if others follow (some remove earlier reasoning, or append "
                f"something at the end); use --split-turns, which makes each message of the {ASSISTANT} the last one "
                "of a document, or a --chat-template with {% generation %} blocks"
            )
        spans.append((len(before), len(until)))
    return whole, spans


def _first_difference(one: str, other: str) -> int:
    """The position of the first character that differs; the length of the shorter text if there is none."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (mine, others) in pairs if mine != others), min(len(one), len(other)))


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


def _num_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(f"must be text; {text[error.start]!r} is an unpaired surrogate") from error
