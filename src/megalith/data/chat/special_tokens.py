"""Tells the special tokens that a chat template writes from those that a conversation spells.

A conversation is rendered twice: as it is, and with a stand-in for each character of its texts that special tokens
have besides letters and digits, in each text that is all the letters of one, and wherever a text spells one that has
only letters and digits. The two texts must agree everywhere else; then a stand-in shows what comes from the
conversation, however the template joins, cuts or quotes it, and a special token in which there is none is the
template's. Two cases are missed: letters and digits of the conversation that the template completes to a special
token, and a special token of letters and digits alone that is spelled by several texts together.

A role has no stand-ins for letters, because templates write it in special tokens. Texts that the template itself
names, such as ``</think>``, are kept, because it may look for them: they cannot be part of a special token. If the
texts do not agree, the record is refused.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from megalith.data.chat.template import ChatTemplate
from megalith.errors import DataError

__all__ = ["SpecialTokens", "absent", "mapped", "texts_in"]

# ASCII first, which JSON and Python do not escape; then syllables of Yi
_STAND_INS = ["~", "^", "@", "$", ";", *(chr(code) for code in range(0xA000, 0xA020))]

Span = tuple[int, int]


class SpecialTokens:
    """The special tokens ``texts`` of a tokenizer in what ``template`` writes."""

    def __init__(self, texts: Iterable[str], template: ChatTemplate) -> None:
        self._texts = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        self._pattern = re.compile(_one_of(self._texts))
        self._names = template.names
        signs = {sign for text in self._texts for sign in text if not (sign.isalnum() or sign in "_ ")}
        self._words = {text.strip("".join(signs)) for text in self._texts} - {"", *template.names}
        kept = [
            name for name in template.names if signs & set(name) and not any(map(partial(_meet, name), self._texts))
        ]
        without_signs = [text for text in self._texts if not signs & set(text)]  # in any case: a template may change it
        self._kept_or_sign = re.compile(
            "|".join(
                [
                    *map(re.escape, sorted(kept, key=len, reverse=True)),
                    f"(?P<sign>{_one_of(signs)})",
                    f"(?P<spelled>(?i:{_one_of(without_signs)}))",
                ]
            )
        )

    def forged(self, text: str, content: Any, render: Callable[[Any], str]) -> list[Span]:
        """Where ``text``, which is ``render(content)``, spells special tokens that the template does not write.

        Raises DataError if that cannot be told.
        """
        stand_in = absent(_STAND_INS, [*self._names, *self._texts, *texts_in(content)], 1)[0]
        changed = mapped(content, partial(self._with_stand_ins, stand_in=stand_in))
        if changed == content:
            return []
        try:
            other = render(changed)
        except DataError:
            other = ""
        written = [found.span() for found in self._pattern.finditer(other)]
        spelled = [found.span() for found in self._pattern.finditer(text)]
        if not (_agree(text, other, stand_in) and set(written) <= set(spelled)):
            signs = " ".join(sorted({found.group() for found in self._pattern.finditer("\n".join(texts_in(content)))}))
            raise DataError(
                "must have messages that the chat template writes as they are; it looks for parts of special tokens in "
                f"them, or changes such parts, so that a message could forge one{f' ({signs:.80})' if signs else ''}; "
                "remove special tokens from the messages, write reasoning under 'reasoning_content', or use another "
                "--chat-template"
            )
        return sorted(set(spelled) - set(written))

    def _with_stand_ins(self, text: str, is_role: bool, *, stand_in: str) -> str:
        def changed(found: re.Match[str]) -> str:
            is_forgery = found["sign"] or (found["spelled"] and not is_role)
            return stand_in + found.group()[1:] if is_forgery else found.group()

        signs = self._kept_or_sign.sub(changed, text)
        if text in self._words and not is_role:
            return stand_in + signs[1:]  # such as a name s that a template writes as <s>; templates write <|role|>
        return signs


def absent(candidates: Iterable[str], texts: Iterable[str], count: int) -> list[str]:
    """The first ``count`` characters of ``candidates`` that no text has. Raises DataError if there are fewer."""
    used = set().union(*texts)
    free = [sign for sign in candidates if sign not in used]
    if len(free) < count:
        raise DataError(
            "must be text; it contains nearly all of the noncharacters U+FDD0 to U+FDEF, or of the syllables U+A000 to "
            "U+A01F; remove them"
        )
    return free[:count]


def texts_in(content: Any) -> list[str]:
    """All texts in the lists and objects of ``content``, with the keys."""
    texts: list[str] = []

    def collect(text: str, is_role: bool) -> str:
        texts.append(text)
        return text

    mapped(content, collect)
    return texts


def mapped(value: Any, change: Callable[[str, bool], str], *, is_role: bool = False) -> Any:
    """``value`` with ``change`` applied to each text in its lists and objects, keys too, told whether it is a role."""
    if isinstance(value, str):
        return change(value, is_role)
    if isinstance(value, dict):
        return {mapped(name, change): mapped(each, change, is_role=name == "role") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([mapped(each, change) for each in value])
    if isinstance(value, bytes):
        raise DataError(f"must be text; it contains bytes, {value!r:.80}; write them as text")
    return value


def _one_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"  # which never matches


def _meet(text: str, special: str) -> bool:
    """Whether a text that contains ``text`` could have ``special`` at a place that overlaps with it."""
    shorter = min(len(text), len(special))
    return (
        text in special
        or special in text
        or any(text.endswith(special[:n]) or special.endswith(text[:n]) for n in range(1, shorter))
    )


def _agree(text: str, other: str, stand_in: str) -> bool:
    """Whether ``other`` is ``text`` but for stand-ins."""
    if len(text) != len(other):
        return False
    signs, others = (np.frombuffer(each.encode("utf-32-le", "surrogatepass"), np.uint32) for each in (text, other))
    return bool(np.all((signs == others) | (others == ord(stand_in))))
