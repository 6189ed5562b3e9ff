"""Predicting masked tokens from counts, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from megalith.errors import DataError
from megalith.insight.masked_baselines import masked_baselines
from tests.insight.test_baselines import Documents


def sample(labels, *masked):
    loss_mask = np.zeros(len(labels), bool)
    loss_mask[list(masked)] = True
    return SimpleNamespace(labels=np.array(labels), loss_mask=loss_mask)


def test_accuracies_are_those_of_the_commonest_token_and_of_the_commonest_pair():
    # 0 is the most frequent; after 1, 2 is more frequent than 3; after 2 always 0; after 0, 0 is more frequent than 1
    train = Documents([0, 0, 0, 0, 1, 2, 0, 1, 2, 0, 1, 3] * 4)
    samples = [sample([1, 2, 0, 0], 1, 2), sample([1, 3, 0], 1), sample([2, 0, 0, 1], 3)]
    found = masked_baselines(train, samples, 4)
    assert found.num_tokens == 4  # 2 after 1, 0 after 2, 3 after 1, 1 after 0
    assert found.unigram_accuracy == 0.25
    assert found.bigram_accuracy == 0.5
    assert found.unigram_loss > found.bigram_loss > 0.0


def test_text_of_which_nothing_is_masked_is_refused():
    with pytest.raises(DataError, match="no token of the held-out data is masked"):
        masked_baselines(Documents([0, 1] * 20), [sample([0, 1])], 2)
