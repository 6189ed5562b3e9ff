"""The progress line: what it holds, and that lines stand in columns."""

import math

from megalith.observe.progress import progress_line


def test_the_line_holds_every_number():
    line = progress_line(120, 1200, 3.41214, 12345.6, 250.0, 3e-4, 0.923)
    assert line == (
        "step   120/1,200   10%  loss  3.4121  grad norm  0.92  lr 3.00e-04  12.3k tokens/s  4 min 10 s left"
    )


def test_lines_of_one_run_stand_in_columns():
    lines = [
        progress_line(step, 12000, loss, speed, 1.0, 1e-3, norm)
        for step, loss, speed, norm in [
            (1, 10.5, 999.0, 12.5),
            (12000, -0.25, 1.2e6, 0.1),
            (999, math.nan, 45.0, math.inf),
        ]
    ]
    for word in ("%", "loss", "grad norm", "lr", "tokens/s"):
        assert len({line.index(word) for line in lines}) == 1, lines


def test_a_loss_that_is_negative_or_no_number_is_shown():
    assert "loss -1.5000" in progress_line(1, 10, -1.5, 1.0, 1.0, 1e-3, 1.0)
    assert "loss     nan  grad norm   inf" in progress_line(1, 10, math.nan, 1.0, 1.0, 1e-3, math.inf)


def test_time_left_that_is_not_known_is_left_out():
    assert progress_line(0, 10, 1.0, 1.0, math.inf, 1e-3, 1.0).endswith("tokens/s")
