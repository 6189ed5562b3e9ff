"""Where a sentence ends, by a plain rule that needs no model of a language.

A sentence ends

    at the end of a line, blank lines after it included
    after . ! ? with any closing quotes and brackets, before white space that no lower-case letter follows
    after the full stop, exclamation and question marks of Chinese and Japanese, with any closing quotes

In source code every line is thus a sentence, and an abbreviation before a name ends one. White space belongs to the
sentence after it, and a line's end to the line, so that the sentences put together are the text again.
"""

import re

__all__ = ["split_sentences"]

_END = re.compile(
    r"(?:[^\S\n]*\n)+"
    r"|[.!?]+[\"'\u2019\u201d)\]]*(?=[^\S\n]+(\S))"
    r"|[\u3002\uff01\uff1f]+[\u2019\u201d\u300d\u300f\uff09]*"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text`` in order; none of them is white space alone, unless the text is."""
    sentences: list[str] = []
    start = 0
    for match in _END.finditer(text):
        follows = match.group(1)
        if follows is not None and follows.islower():
            continue
        if text[start : match.end()].isspace():  # blank lines at the beginning belong to what follows
            continue
        sentences.append(text[start : match.end()])
        start = match.end()
    rest = text[start:]
    if sentences and rest.isspace():
        sentences[-1] += rest
    elif rest:
        sentences.append(rest)
    return sentences
