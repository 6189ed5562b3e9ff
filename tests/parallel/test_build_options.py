"""build_options: derived values."""

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.linear import linear
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.parallel.groups import collection
from tests.rank_pool import ranks


def sequence_parallel(tensor: int) -> bool:
    return BuildOptions(collection(tensor), sequence_parallel=True).sequence_parallel


def test_without_tp_there_is_no_sequence_to_split():
    assert not BuildOptions(ProcessGroupCollection.single(), sequence_parallel=True).sequence_parallel
    assert ranks(2, sequence_parallel, 1) == [False, False]
    assert ranks(2, sequence_parallel, 2) == [True, True]


def test_defaults_are_float32_and_the_default_product():
    options = BuildOptions(ProcessGroupCollection.single())
    assert (options.dtype, options.matrix_product, options.sequence_parallel) == (torch.float32, linear, False)


def halved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) / 2.0


def test_a_product_that_the_fused_loss_would_not_call_is_refused():
    with pytest.raises(ConfigError, match=r"would ignore matrix_product='halved'; use only one of the two"):
        BuildOptions(ProcessGroupCollection.single(), matrix_product=halved, fused_linear_cross_entropy=True)
