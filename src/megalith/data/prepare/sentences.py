"""Splits text into sentences by a simple rule that needs no language model.

A sentence ends

    at the end of a line, including blank lines after it
    after . ! ? with any closing quotes and brackets, before white space that is not followed by a lower-case letter
    after Chinese and Japanese full stops, exclamation and question marks, with any closing quotes

So in source code every line is a sentence, and an abbreviation before a name ends one. White space belongs to the
sentence after it, and a line break to the line before it, so that concatenating the sentences restores the text.
"""

import re

__all__ = ["split_sentences"]

_END = re.compile(
    r"(?:[^\S\n]*\n)+"
    r"|[.!?]+[\"'\u2019\u201d)\]]*(?=[^\S\n]+(\S))"
    r"|[\u3002\uff01\uff1f]+[\u2019\u201d\u300d\u300f\uff09]*"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text`` in order; none consists only of white space, unless the whole text does."""
    sentences: list[str] = []
    start = 0
    for match in _END.finditer(text):
        follows = match.group(1)
        if follows is not None and follows.islower():
            continue
        if text[start : match.end()].isspace():  # blank lines at the beginning belong to the next sentence
            continue
        sentences.append(text[start : match.end()])
        start = match.end()
    rest = text[start:]
    if sentences and rest.isspace():
        sentences[-1] += rest
    elif rest:
        sentences.append(rest)
    return sentences
