"""Cross entropy of a padded vocabulary: how wide its kernels load a row, and that padding has no effect.

GPT-2 has 50257 words, and its output layers commonly have 50304 columns.
"""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from megalith.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from tests.accuracy import assert_same
from tests.kernel_reports import TARGETS, launches, widest_load, without_interpreter
from tests.sampling import sampled

# numpy warns of it in the interpreter; a GPU does not
infinite = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
ROW_BY_ROW = ("_statistics_kernel", "_gradient_kernel")  # they read logits


def loss_and_gradient(
    logits: Tensor, target: Tensor, path: str, num_words: int, **options: float
) -> tuple[Tensor, ...]:
    x = logits.detach().requires_grad_()
    loss = fused_vocab_parallel_cross_entropy(x, target, vocab_size=num_words, backend=path, **options)
    return [loss.detach(), *torch.autograd.grad(loss, x, torch.ones_like(loss))]


def widths(num_words: int, num_columns: int, dtype: torch.dtype) -> dict[str, int]:
    """The widest load of each kernel that reads logits, in bytes."""
    logits, target = torch.zeros(8, num_columns, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    launched = launches(lambda: loss_and_gradient(logits, target, "triton", num_words))
    found = {launch.kernel.__name__: launch for launch in launched}
    return {name: widest_load(found[name], TARGETS["sm_90"]) for name in ROW_BY_ROW}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_are_loaded_16_bytes_at_a_time_whatever_the_number_of_words(dtype):
    for num_words in (50257, 50304):
        assert without_interpreter(widths, num_words, 50304, dtype) == dict.fromkeys(ROW_BY_ROW, 16), num_words


OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"softcap": 3.0, "label_smoothing": 0.1}]
PATHS = ("triton", "blocked", "reference")


@infinite
@pytest.mark.parametrize(
    ("options", "num_words", "path"),
    sampled([*product(OPTIONS, (48, 50, 63, 64), PATHS)], lambda case: {(str(case[0]), case[2]), case[1:]}),
)
def test_the_padding_counts_for_nothing_even_where_it_is_nan_or_infinite(options, num_words, path, device):
    torch.manual_seed(0)
    logits = torch.randn(5, 64, device=device)
    target = torch.tensor([0, 47, 3, -100, num_words - 1], device=device)
    words = logits[:, :num_words].clone()
    logits[:, num_words:] = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 0.0], device=device)[:, None]
    want, dwant = loss_and_gradient(words, target, path, num_words, **options)
    loss, dlogits = loss_and_gradient(logits, target, path, num_words, **options)
    assert_same(loss, want)
    assert_same(dlogits[:, :num_words], dwant)
    assert not dlogits[:, num_words:].any()


@infinite
def test_a_row_of_several_parts_ends_at_its_last_word(device):
    torch.manual_seed(0)
    num_words, num_columns = 2 * 2048 + 5, 2 * 2048 + 32
    logits = torch.randn(2, num_columns, device=device)
    logits[:, num_words:] = math.nan
    target = torch.tensor([7, num_words - 1], device=device)
    loss, _ = loss_and_gradient(logits, target, "triton", num_words)
    want = torch.nn.functional.cross_entropy(logits[:, :num_words].double(), target, reduction="none")
    torch.testing.assert_close(loss.double(), want, rtol=4e-6, atol=0.0)
