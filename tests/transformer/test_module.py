"""module: models built on meta and made real, drawn again, counted; whoever hides a parameter is refused."""

import pytest
import torch
from torch import nn

from megalith.errors import ShapeError
from megalith.parallel.parameters import ParameterSpec, declared_parameters
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.module import ModelModule
from tests.parallel.groups import collection
from tests.rank_pool import ranks


class Small(ModelModule):
    def __init__(self, groups: ProcessGroupCollection, *, undeclared: bool = False) -> None:
        super().__init__()
        self.declare("matrix", ParameterSpec((5, 8), 0, "normal", 1.0), groups, torch.float32)
        self.declare("gain", ParameterSpec((8,), None, "ones"), groups, torch.float32)
        if undeclared:
            self.extra = nn.Linear(2, 2)
        self.finish(seed=1)


SINGLE = ProcessGroupCollection.single()


def test_built_on_a_device_it_has_its_weights_at_once():
    model = Small(SINGLE)
    assert model.matrix.std().item() == pytest.approx(1.0, abs=0.5)
    assert (model.gain == 1.0).all()


def test_built_on_meta_and_materialized_it_has_the_same_bits():
    with torch.device("meta"):
        model = Small(SINGLE)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.materialize("cpu", seed=1)
    want = Small(SINGLE)
    for name, parameter, _ in declared_parameters(model):
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, want.get_parameter(name))


def test_weights_can_be_drawn_anew():
    model = Small(SINGLE)
    first = model.matrix.detach().clone()
    model.initialize_weights(seed=2)
    assert not torch.equal(model.matrix, first)
    model.initialize_weights(seed=1)
    assert torch.equal(model.matrix, first)


def test_a_hidden_parameter_is_refused_also_on_meta():
    with pytest.raises(ShapeError, match=r"extra\.weight has no placement"):
        Small(SINGLE, undeclared=True)
    with torch.device("meta"), pytest.raises(ShapeError, match=r"extra\.weight has no placement"):
        Small(SINGLE, undeclared=True)


def count(tensor: int) -> tuple[int, int]:
    """Parameters of the whole model, and elements that this rank holds."""
    groups = collection(tensor)
    with torch.device("meta"):
        model = Small(groups)
    dtypes = {"compute_dtype": torch.float32, "param_dtype": torch.float32}
    shard_model(model, [], groups, reshard_after_forward=False, **dtypes)
    model.materialize("cpu", seed=1)
    return model.num_parameters(), sum(parameter.to_local().numel() for parameter in model.parameters())


def test_parameters_are_counted_over_all_ranks():
    assert Small(SINGLE).num_parameters() == 48
    answers = ranks(4, count, 2)
    assert [whole for whole, _ in answers] == [48] * 4
    # tp gives 3 and 2 rows, FSDP half of their columns, and half of the gain
    assert [mine for _, mine in answers] == [12 + 4, 8 + 4] * 2
