"""benchmarks/generation at its tiny size: both sides match the reference's texts, and a different text is detected."""

import pytest
import torch

from benchmarks.generation import _TOLERANCE
from benchmarks.registry import CASES


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("B", [1, 8])
def test_ours_and_theirs_draw_the_texts_of_the_reference(B, dtype, tmp_path):
    case = CASES[f"generate-{B}-{str(dtype).removeprefix('torch.')}"]
    size = case.sizes["quick"]
    case.prepare(size, tmp_path)
    for name, contender in case.contenders.items():
        first = contender.build(size, tmp_path).first()
        assert case.verdict(name, first) is None, name
        assert (first.loss_error == 0.0) or dtype == torch.bfloat16


def test_another_text_is_found_out(tmp_path):
    case = CASES["generate-8-float32"]
    size = case.sizes["quick"]
    case.prepare(size, tmp_path)
    runner = case.contenders["Megalith"].build(size, tmp_path)
    texts = runner._texts()
    runner._texts = lambda: [texts[0], *([(token + 1) % 256 for token in text] for text in texts[1:])]
    assert "wrong: its loss is" in case.verdict("Megalith", runner.first())
