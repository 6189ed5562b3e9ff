"""Text that ends where one of a few strings begins."""

from collections.abc import Sequence

from megalith.errors import ConfigError

__all__ = ["StopStrings", "check_stop_strings"]


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raises ConfigError for an empty string, at which every text would end."""
    if not all(stops):
        raise ConfigError("a stop string must have characters; got an empty one; leave it out")


class StopStrings:
    """Passes a text on, piece by piece, up to where the first of ``stops`` begins.

    What may be the beginning of one is held back until that is known.

    Attributes:
        found: whether there was one; nothing is passed on any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stop_strings(stops)
        self.found = False
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """What of the text so far is certain and was not passed on before."""
        if self.found:
            return ""
        text = self._held + text
        begins = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        self.found = bool(begins)
        certain = min(begins) if begins else len(text) - self._open(text)
        self._held = "" if self.found else text[certain:]
        return text[:certain]

    def end(self) -> str:
        """What is held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a stop string."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)
