"""``megalith report``: the page at any time, also during the run, and errors."""

import pytest

from tests.insight.run_folder import write_run
from tests.program import here


def test_it_draws_the_page_again_and_says_where(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    ended = here("report", folder)
    assert (ended.code, ended.out, ended.err) == (0, f"{folder / 'report.html'}\n", "")
    assert "smoothed" not in (folder / "report.html").read_text()


def test_a_run_that_is_writing_a_record_is_shown_up_to_the_record_before(tmp_path):
    folder = write_run(tmp_path / "run", steps=8)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    ended = here("report", folder, "--out", tmp_path / "page.html")
    assert (ended.code, ended.out) == (0, f"{tmp_path / 'page.html'}\n")
    assert "in 8 steps" in (tmp_path / "page.html").read_text()
    assert not (folder / "report.html").exists()


def test_text_that_no_encoding_holds_is_shown_with_a_question_mark(tmp_path):
    folder = write_run(tmp_path / "run", steps=4)
    (folder / "about.json").write_text('{"recipe": "half a \\ud800 pair"}')
    assert here("report", folder).code == 0
    assert "half a ? pair" in (folder / "report.html").read_text()


def append_an_integer_of_400_digits(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 5, "loss": {"9" * 400}}}\n')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has no metrics.jsonl, so it is not the folder of a run"),
        (lambda folder: folder.mkdir(), "has no metrics.jsonl, so it is not the folder of a run"),
        (lambda folder: write_run(folder, steps=4) and (folder / "about.json").write_text("{"), "must be JSON"),
        (lambda folder: write_run(folder, steps=4) and (folder / "report.html").mkdir(), "cannot write"),
        (lambda folder: append_an_integer_of_400_digits(write_run(folder, steps=4)), 'line 4 is b\'{"step": 5, "loss"'),
    ],
)
def test_what_stands_in_its_way_is_one_message(tmp_path, make, message):
    make(tmp_path / "run")
    ended = here("report", tmp_path / "run")
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert message in ended.err
    assert ended.err.count("\n") == 1
