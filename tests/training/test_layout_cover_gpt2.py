"""The generated layouts of test_layout_cover.py, for a model of GPT-2's shape."""

import pytest

from tests.training.test_layout_cover import check, rows_of


@pytest.mark.parametrize("row", rows_of("gpt2"))
def test_a_gpt2_computes_what_one_process_does(row, tmp_path):
    check(row, tmp_path)
