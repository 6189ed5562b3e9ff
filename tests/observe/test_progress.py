"""The progress line: its content, and aligned columns."""

import math

from megalith.observe.progress import progress_line, shortened


def line(step=120, steps=1200, seconds_left=250.0, **fields):
    record = {"loss": 3.41214, "grad_norm": 0.923, "lr": 3e-4, "tokens_per_second": 12345.6, "peak_memory": 3.45e9}
    return progress_line({"step": step, "time": {}, **record, **fields}, steps, seconds_left)


def test_the_line_holds_every_number():
    assert line() == (
        "step   120/1,200   10%  loss  3.4121  grad norm  0.92  lr 3.00e-04  12.3k tokens/s  3.21 GiB  4 min 10 s left"
    )


def test_lines_of_one_run_stand_in_columns():
    lines = [
        line(step, 12000, 1.0, loss=loss, tokens_per_second=speed, grad_norm=norm, peak_memory=peak)
        for step, loss, speed, norm, peak in [
            (1, 10.5, 999.0, 12.5, 3e8),
            (12000, -0.25, 1.2e6, 0.1, 8e10),
            (999, math.nan, 45.0, math.inf, 7e11),
        ]
    ]
    for word in ("%", "loss", "grad norm", "lr", "tokens/s", "GiB"):
        assert len({line.index(word) for line in lines}) == 1, lines


def test_a_loss_that_is_negative_or_no_number_is_shown():
    assert "loss -1.5000" in line(loss=-1.5)
    assert "loss     nan  grad norm   inf" in line(loss=math.nan, grad_norm=math.inf)


def test_time_left_that_is_not_known_is_left_out():
    assert line(seconds_left=math.nan).endswith("GiB")


def test_waiting_for_the_compiler_is_said_where_it_happened():
    assert line(time={"compile": 33.6, "data": 1.0}).endswith("4 min 10 s left  (34 s compiling)")


def test_a_narrow_terminal_keeps_what_is_wanted_most():
    assert shortened(line(), 79) == "step   120/1,200   10%  loss  3.4121  12.3k tokens/s  3.21 GiB  4 min 10 s left"
    compiling = line(time={"compile": 33.6})
    assert shortened(compiling, 79) == ("step   120/1,200  loss  3.4121  3.21 GiB  4 min 10 s left  (34 s compiling)")
    assert shortened(compiling, 200) == compiling
    assert "grad norm" not in (wide := shortened(compiling, len(compiling) - 1))
    assert "lr 3.00e-04" in wide
    assert shortened("any other line", 5) == "any other line"
