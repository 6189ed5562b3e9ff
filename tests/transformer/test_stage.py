"""stage: its layers by global index, and invalid stages."""

import pytest

from megalith.errors import ConfigError
from megalith.transformer.stage import Stage


def test_the_whole_has_every_layer_the_embedding_and_the_head():
    whole = Stage.whole(3)
    assert list(whole.layers) == [0, 1, 2]
    assert whole.has_embedding
    assert whole.has_head


def test_layers_are_counted_in_the_whole_model():
    assert list(Stage(2, 4, has_embedding=False, has_head=True).layers) == [2, 3]


@pytest.mark.parametrize(("first", "last"), [(2, 2), (3, 2), (-1, 2), (0, 0)])
def test_a_stage_without_layers_or_before_the_first_is_refused(first, last):
    with pytest.raises(ConfigError, match=rf"at least one layer, .*; got \[{first}, {last}\)"):
        Stage(first, last, has_embedding=True, has_head=True)
