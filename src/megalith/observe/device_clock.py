"""A GPU clock for ``Timers``: events in its stream, without synchronization."""

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Measures the time of a GPU's current stream with events, without synchronizing."""

    def mark(self) -> torch.cuda.Event:
        """Records an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """The time between two events; None until the stream has reached the second."""
        return start.elapsed_time(end) / 1e3 if end.query() else None
