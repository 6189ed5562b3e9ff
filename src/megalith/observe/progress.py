"""The line that a run shows while it trains."""

import math

from megalith.observe.units import duration, quantity

__all__ = ["progress_line"]


def progress_line(
    step: int,
    steps: int,
    loss: float,
    tokens_per_second: float,
    seconds_left: float,
    lr: float,
    grad_norm: float,
) -> str:
    """One line of fixed columns, so that the lines of a log file stand under each other.

    ``step 120/1,200  10%  loss  3.4121  grad norm  0.92  lr 3.00e-04  12.3k tokens/s  4 min 10 s left``

    A loss of any sign is shown, and one that is no number as ``nan`` or ``inf``. ``seconds_left`` that is not finite
    (nothing measured yet) leaves its column out.
    """
    total = f"{steps:,}"
    columns = [
        f"step {step:>{len(total)},}/{total}",
        f"{step / steps:4.0%}" if steps else "    ",
        f"loss {loss:7.4f}",
        f"grad norm {grad_norm:5.2f}",
        f"lr {lr:.2e}",
        f"{quantity(tokens_per_second):>5} tokens/s",
    ]
    if math.isfinite(seconds_left):
        columns.append(f"{duration(seconds_left)} left")
    return "  ".join(columns)
