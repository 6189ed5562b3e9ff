"""The benchmark of recipe t5-tiny: texts with their missing tokens filled in, for predictions from counts."""

import numpy as np

from benchmarks.t5_tiny import _filled
from megalith.data.special_tokens import T5Tokens
from megalith.data.t5_dataset import T5Sample


def test_a_sample_is_filled_with_what_its_decoder_learns():
    special = T5Tokens(0, 1, np.array([90, 91, 92]))
    tokens = np.array([5, 90, 6, 7, 91, 1, 0, 0])  # 5 10 11 6 7 12, the end, padding
    labels = np.array([90, 10, 11, 91, 12, 1, 0])
    sample = T5Sample(tokens, np.array([0, *labels[:-1]]), labels, labels > 0, 6, 6, False)
    found = _filled(sample, special)
    assert found.labels.tolist() == [1, 5, 10, 11, 6, 7, 12]
    assert found.loss_mask.tolist() == [False, False, True, True, False, False, True]
