"""module: models built on meta and allocated, reinitialized, counted; hidden parameters or buffers are refused."""

import pytest
import torch
from torch import nn

from megalith.errors import ShapeError
from megalith.numerics.dropout import name_number
from megalith.parallel.parameters import ParameterSpec, declared_parameters
from megalith.parallel.sharding.fsdp import shard_model
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.module import ModelModule
from tests.parallel.groups import collection
from tests.rank_pool import ranks


class Small(ModelModule):
    def __init__(self, groups: ProcessGroupCollection, *, undeclared: nn.Module | None = None) -> None:
        super().__init__()
        self.declare("matrix", ParameterSpec((5, 8), "normal", 1.0, split={"tp": 0}), groups, torch.float32)
        self.declare("gain", ParameterSpec((8,), "ones"), groups, torch.float32)
        self.declare_buffer("table", lambda: torch.arange(3.0))
        self.parts = nn.ModuleList([DotProductAttention(0.5, head_offset=0), DropoutSite(0.1)])
        if undeclared is not None:
            self.extra = undeclared
        self.finish(seed=1)

    def layers(self) -> list[nn.Module]:
        return list(self.parts)


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
    assert model.table.tolist() == [0.0, 1.0, 2.0]


def test_weights_can_be_drawn_anew():
    model = Small(SINGLE)
    first = model.matrix.detach().clone()
    model.initialize_weights(seed=2)
    assert not torch.equal(model.matrix, first)
    model.initialize_weights(seed=1)
    assert torch.equal(model.matrix, first)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2), r"parameter extra\.weight is not declared"),
        (nn.BatchNorm1d(2, affine=False), r"buffer extra\.running_mean is not declared"),
    ],
    ids=["a parameter", "a buffer"],
)
def test_what_nobody_declared_is_refused_also_on_meta(module, message, device):
    with torch.device(device), pytest.raises(ShapeError, match=message):
        Small(SINGLE, undeclared=module)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dropouts_have_their_names_when_it_is_built(device):
    with torch.device(device):
        model = Small(SINGLE)
    assert model.parts[0].dropout.number == name_number("parts.0.dropout")
    assert model.parts[1].number == name_number("parts.1")


def test_layers_are_what_fsdp_gathers_and_attention_is_found_within():
    model = Small(SINGLE)
    assert model.fsdp_units() == model.layers() == list(model.parts)
    assert model.recomputable() == {"core_attn": [model.parts[0]]}


def test_a_model_that_does_not_say_its_layers_is_none():
    with pytest.raises(TypeError, match="abstract"):
        ModelModule()


def count(tensor: int) -> tuple[int, int]:
    """The parameters of the whole model, and the elements that this rank holds."""
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
