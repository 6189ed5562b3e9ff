"""embeddings: learned positions as torch's Embedding, split over the sequence."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.embeddings import LearnedPositions
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, H = 8, 16
POSITIONS = {
    "the same for all rows": torch.arange(S),
    "of each row": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], list(range(S))]),
}


def built(**changes: object) -> LearnedPositions:
    layer = LearnedPositions(config("gpt2"), options(**changes))
    initialize_parameters_(layer, seed=1)
    return layer


def results(layer: LearnedPositions, positions: Tensor, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's part of the output, and the unsharded gradient of the weight."""
    y = layer(positions)
    rows = positions.shape[0] if positions.dim() == 2 else 1
    y.backward(torch.arange(S * rows * H, dtype=torch.float64).view(S, rows, H).chunk(size)[rank])
    return y.detach(), whole(layer.weight.grad)


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_rows_of_the_weight_along_the_sequence(name):
    layer, positions = built(), POSITIONS[name]
    rows = positions if positions.dim() == 2 else positions[None]
    assert torch.equal(layer(positions), embedding(rows, layer.weight).transpose(0, 1))


def on_this_rank(name: str, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    groups = collection(2)
    layer = built(pg_collection=groups, sequence_parallel=sequence_parallel)
    return results(layer, POSITIONS[name], *((groups.rank("tp"), 2) if sequence_parallel else (0, 1)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_split_over_the_sequence_they_are_the_same(name, sequence_parallel):
    y, dweight = results(built(), POSITIONS[name])
    answers = ranks(2, on_this_rank, name, sequence_parallel)
    for got in [torch.cat([part for part, _ in answers])] if sequence_parallel else [part for part, _ in answers]:
        assert torch.equal(got, y)
    for _, got in answers:
        assert torch.equal(got, dweight)
