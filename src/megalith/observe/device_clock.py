"""The clock of a GPU, for ``Timers``: events in its stream, that nobody waits for."""

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """The time of a GPU's current stream, by events that it passes: nobody waits for it."""

    def mark(self) -> torch.cuda.Event:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """The time between two events, once the stream has passed the second."""
        return start.elapsed_time(end) / 1e3 if end.query() else None
