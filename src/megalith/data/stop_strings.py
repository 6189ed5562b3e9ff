"""Stop strings: ends a generated text where one of them begins."""

from collections.abc import Sequence

from megalith.errors import ConfigError

__all__ = ["StopStrings", "check_stop_strings"]


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raises ConfigError for an empty string, which would end every text at once."""
    if not all(stops):
        raise ConfigError("a stop string must not be empty; got an empty one; leave it out")


class StopStrings:
    """Filters a text piece by piece, up to where the first of ``stops`` begins.

    Text that may be the beginning of a stop string is held back until that is decided.

    Attributes:
        found: whether a stop string was found; no text is returned after that.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stop_strings(stops)
        self.found = False
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """Adds a piece; returns the text that is certain now and was not returned before."""
        if self.found:
            return ""
        text = self._held + text
        begins = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        self.found = bool(begins)
        certain = min(begins) if begins else len(text) - self._open(text)
        self._held = "" if self.found else text[certain:]
        return text[:certain]

    def end(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Number of characters at the end of ``text`` that may be the beginning of a stop string."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)
