"""layers: on 2 and 4 ranks, with and without sequence parallelism, equal to one torch Linear or Embedding.

Outputs, gradients of inputs, weights and biases; also for sizes that tp does not divide, and a custom matmul.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from megalith.errors import ShapeError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.tensor.layers import (
    BlockReplicatedLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megalith.parallel.tensor.regions import enter_tensor_parallel
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.parallel.groups import collection, load_, whole
from tests.rank_pool import ranks

S, B = 8, 2
IN, OUT = 10, 13  # over 4 ranks 3, 3, 3 and 1; 4, 4, 4 and 1
V, H = 31, 6
EXACT = 1e-13  # sums of a few dozen terms in float64
SPLITS = [(2, False), (2, True), (4, False), (4, True)]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(rows: int = OUT, columns: int = IN) -> dict[str, Tensor]:
    return {"weight": random(rows, columns, seed=1), "bias": random(rows, seed=2)}


def options(**changes: Any) -> BuildOptions:
    """On a rank, with tp over the whole world; outside of ranks, for one process."""
    groups = collection(dist.get_world_size()) if dist.is_initialized() else ProcessGroupCollection.single()
    return BuildOptions(**{"pg_collection": groups, "dtype": torch.float64} | changes)


def by_torch() -> dict[str, Tensor]:
    """Output and gradients of one nn.Linear."""
    layer = nn.Linear(IN, OUT, dtype=torch.float64)
    layer.load_state_dict(weights())
    x = random(S, B, IN, seed=3).requires_grad_()
    y = layer(x)
    y.backward(random(S, B, OUT, seed=4))
    return {"y": y.detach(), "dx": x.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}


def mine(x: Tensor, dim: int) -> Tensor:
    """This rank's part of ``x``, split as by torch.chunk."""
    start, stop = chunk_range(x.shape[dim], dist.get_world_size(), dist.get_rank())
    return x.narrow(dim, start, stop - start).clone()


def run(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y = layer(x.requires_grad_())
    y.backward(dy)
    gradients = {f"d{name}": whole(parameter.grad) for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def column_on_this_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    layer = ColumnParallelLinear(IN, OUT, options(sequence_parallel=sequence_parallel), bias=True, std=1.0)
    load_(layer, weights())
    x, dy = random(S, B, IN, seed=3), mine(random(S, B, OUT, seed=4), -1)
    return run(layer, mine(x, 0) if sequence_parallel else x, dy)


def row_on_this_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    layer = RowParallelLinear(IN, OUT, options(sequence_parallel=sequence_parallel), bias=True, std=1.0)
    load_(layer, weights())
    x, dy = mine(random(S, B, IN, seed=3), -1), random(S, B, OUT, seed=4)
    return run(layer, x, mine(dy, 0) if sequence_parallel else dy)


def assert_joined(answers: list[dict[str, Tensor]], want: dict[str, Tensor], split: dict[str, int]) -> None:
    """Concatenates the ranks' tensors along the dimension in ``split``; those not in it must be equal on all ranks."""
    for name, value in want.items():
        parts = [answer[name] for answer in answers]
        for got in [torch.cat(parts, dim=split[name])] if name in split else parts:
            torch.testing.assert_close(
                got, value, rtol=EXACT, atol=EXACT, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(("num_ranks", "sequence_parallel"), SPLITS)
def test_a_column_parallel_linear_is_a_linear_whose_outputs_are_split(num_ranks, sequence_parallel):
    answers = ranks(num_ranks, column_on_this_rank, sequence_parallel)
    assert_joined(answers, by_torch(), {"y": -1, "dx": 0} if sequence_parallel else {"y": -1})


@pytest.mark.parametrize(("num_ranks", "sequence_parallel"), SPLITS)
def test_a_row_parallel_linear_is_a_linear_whose_inputs_are_split_and_adds_its_bias_once(num_ranks, sequence_parallel):
    answers = ranks(num_ranks, row_on_this_rank, sequence_parallel)
    assert_joined(answers, by_torch(), {"y": 0, "dx": -1} if sequence_parallel else {"dx": -1})


def blocks_on_this_rank(num_blocks: int, sequence_parallel: bool) -> dict[str, Tensor]:
    """Each rank takes its own share of the gradient of the block that it computes."""
    layer = BlockReplicatedLinear(IN, OUT, num_blocks, options(), bias=True, std=1.0)
    load_(layer, weights(num_blocks * OUT))
    x = random(S, B, IN, seed=3)
    x = (mine(x, 0) if sequence_parallel else x).requires_grad_()
    y = layer(enter_tensor_parallel(x, options().pg_collection.tp, sequence_parallel))
    y.backward(random(dist.get_world_size(), S, B, OUT, seed=4)[dist.get_rank()])
    gradients = {f"d{name}": whole(parameter.grad) for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_read_the_same_block_sum_their_gradients(num_blocks, sequence_parallel):
    layer = nn.Linear(IN, num_blocks * OUT, dtype=torch.float64)
    layer.load_state_dict(weights(num_blocks * OUT))
    x = random(S, B, IN, seed=3).requires_grad_()
    blocks = layer(x).chunk(num_blocks, dim=-1)
    y = torch.stack([blocks[rank * num_blocks // 4] for rank in range(4)])  # [tp, S, B, OUT]
    y.backward(random(4, S, B, OUT, seed=4))
    want = {"dx": x.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
    answers = ranks(4, blocks_on_this_rank, num_blocks, sequence_parallel)
    assert_joined(answers, want, {"dx": 0} if sequence_parallel else {})
    torch.testing.assert_close(torch.stack([answer["y"] for answer in answers]), y, rtol=EXACT, atol=EXACT)


def two_columns_on_this_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    """Two layers that share one gathered input, as q, k and v do."""
    first, second = (
        ColumnParallelLinear(IN, OUT, options(), bias=False, std=1.0, input_is_gathered=True) for _ in range(2)
    )
    for layer in (first, second):
        load_(layer, weights())
    x = random(S, B, IN, seed=3)
    x = (mine(x, 0) if sequence_parallel else x).requires_grad_()
    gathered = enter_tensor_parallel(x, options().pg_collection.tp, sequence_parallel)
    y = torch.stack((first(gathered), 2.0 * second(gathered)))
    y.backward(torch.stack([mine(random(S, B, OUT, seed=4), -1)] * 2))
    return {"y": y[0].detach(), "dx": x.grad, "dweight": whole(first.weight.grad)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_that_share_a_gathered_input_sum_their_gradients(sequence_parallel):
    want = by_torch()
    want = {"y": want["y"] - weights()["bias"], "dx": 3.0 * want["dx"], "dweight": want["dweight"]}
    answers = ranks(2, two_columns_on_this_rank, sequence_parallel)
    assert_joined(answers, want, {"y": -1, "dx": 0} if sequence_parallel else {"y": -1})


def tokens() -> Tensor:
    return (torch.arange(B * S) * 5 % V).view(B, S)  # without repetitions, and on every rank


def embedding_on_this_rank(sequence_parallel: bool, repeat: int) -> dict[str, Tensor]:
    layer = VocabParallelEmbedding(V, H, options(sequence_parallel=sequence_parallel), std=1.0)
    load_(layer, weights(V, H))
    y = layer(tokens() // repeat)
    dy = random(S, B, H, seed=4)
    y.backward(mine(dy, 0) if sequence_parallel else dy)
    return {"y": y.detach(), "dweight": whole(layer.weight.grad)}


@pytest.mark.parametrize("repeat", [1, 4])
@pytest.mark.parametrize(("num_ranks", "sequence_parallel"), SPLITS)
def test_a_vocabulary_parallel_embedding_is_an_embedding(num_ranks, sequence_parallel, repeat):
    weight = weights(V, H)["weight"].requires_grad_()
    y = nn.functional.embedding((tokens() // repeat).t(), weight)  # [S, B, H]
    y.backward(random(S, B, H, seed=4))
    answers = ranks(num_ranks, embedding_on_this_rank, sequence_parallel, repeat)
    assert_joined(answers, {"y": y.detach(), "dweight": weight.grad}, {"y": 0} if sequence_parallel else {})


def embed_what_is_no_token() -> list[list[int]]:
    layer = VocabParallelEmbedding(V, H, options(dtype=torch.float32), std=1.0)
    load_(layer, {"weight": weights(V, H)["weight"].float()})
    y = layer(torch.tensor([[0, -1, 30, 31]]))  # [S, B, H]
    return y.isnan().all(dim=-1).nonzero().tolist() if y.isnan().any() else []


def test_a_token_that_no_rank_holds_is_not_taken_for_zeros():
    assert ranks(2, embed_what_is_no_token) == [[[1, 0], [3, 0]]] * 2


@pytest.mark.parametrize("layer_class", [ColumnParallelLinear, RowParallelLinear])
def test_one_process_computes_what_torch_does(layer_class):
    layer = layer_class(IN, OUT, options(), bias=True, std=0.5)
    load_(layer, weights())
    got = run(layer, random(S, B, IN, seed=3), random(S, B, OUT, seed=4))
    assert_joined([got], by_torch(), {})


@pytest.mark.parametrize("layer_class", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_without_bias_registers_none(layer_class):
    layer = layer_class(IN, OUT, options(), bias=False, std=0.5)
    assert layer.bias is None
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def tied_on_this_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    """Tokens looked up and projected with one weight: the output, and the gradient of both uses."""
    here = options(sequence_parallel=sequence_parallel)
    embedding = VocabParallelEmbedding(V, H, here, std=1.0)
    head = ColumnParallelLinear(H, V, here, bias=False, std=1.0, has_weight=False)
    assert list(head.parameters()) == []
    load_(embedding, weights(V, H))
    y = head(embedding(tokens()), embedding.weight)
    y.backward(mine(random(S, B, V, seed=4), -1))
    return {"y": y.detach(), "dweight": whole(embedding.weight.grad)}


@pytest.mark.parametrize(("num_ranks", "sequence_parallel"), SPLITS)
def test_a_column_parallel_linear_without_a_weight_takes_the_embeddings(num_ranks, sequence_parallel):
    weight = weights(V, H)["weight"].requires_grad_()
    y = nn.functional.embedding(tokens().t(), weight) @ weight.t()
    y.backward(random(S, B, V, seed=4))
    answers = ranks(num_ranks, tied_on_this_rank, sequence_parallel)
    assert_joined(answers, {"y": y.detach(), "dweight": weight.grad}, {"y": -1})


def test_one_without_a_weight_that_is_given_none_says_so():
    head = ColumnParallelLinear(H, V, options(), bias=False, std=1.0, has_weight=False)
    with pytest.raises(AssertionError, match="has_weight=False must be called with a weight"):
        head(random(S, B, H, seed=3))


def tripled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return 3.0 * linear(x, weight) if bias is None else 3.0 * linear(x, weight) + bias


def tripled_on_this_rank() -> dict[str, Tensor]:
    here = options(matrix_product=tripled)
    column = ColumnParallelLinear(IN, OUT, here, bias=True, std=1.0)
    row = RowParallelLinear(IN, OUT, here, bias=True, std=1.0)
    without_weight = ColumnParallelLinear(IN, OUT, here, bias=False, std=1.0, has_weight=False)
    for layer in (column, row):
        load_(layer, weights())
    x = random(S, B, IN, seed=3)
    found = {"column": column(x), "row": row(mine(x, -1) if dist.is_initialized() else x)}
    return {name: y.detach() for name, y in {**found, "tied": without_weight(x, column.weight)}.items()}


def test_every_linear_layer_computes_the_product_that_its_options_name():
    x, w = random(S, B, IN, seed=3), weights()
    want = {"column": 3.0 * linear(x, w["weight"]) + w["bias"], "tied": 3.0 * linear(x, w["weight"])}
    want["row"] = want["column"]  # its bias is added after the sum over ranks, outside of the product
    assert_joined([tripled_on_this_rank()], want, {})
    assert_joined(ranks(2, tripled_on_this_rank), want, {"column": -1, "tied": -1})


def biases_in_the_product_of_a_row() -> list[bool]:
    seen: list[bool] = []

    def noting(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(bias is not None)
        return linear(x, weight, bias)

    row = RowParallelLinear(IN, OUT, options(matrix_product=noting), bias=True, std=1.0)
    row(mine(random(S, B, IN, seed=3), -1) if dist.is_initialized() else random(S, B, IN, seed=3))
    return seen


def test_a_row_parallel_linear_of_one_rank_adds_its_bias_in_the_product():
    assert biases_in_the_product_of_a_row() == [True]
    assert ranks(2, biases_in_the_product_of_a_row) == [[False], [False]]


def refuse_an_empty_rank() -> None:
    with pytest.raises(
        ShapeError, match=r"out_features \(9\) leaves at least one rank of tp \(4\) empty; use fewer ranks"
    ):
        ColumnParallelLinear(8, 9, options(), bias=False, std=1.0)  # 3, 3, 3 and none
    with pytest.raises(ShapeError, match=r"in_features \(2\) leaves at least one rank"):
        RowParallelLinear(2, 8, options(), bias=False, std=1.0)
    with pytest.raises(ShapeError, match=r"num_embeddings \(6\) leaves at least one rank"):
        VocabParallelEmbedding(6, 8, options(), std=1.0)
    with pytest.raises(ShapeError, match=r"num_blocks \(3\) must divide the size of tp \(4\); use 1, 2, 4"):
        BlockReplicatedLinear(8, 8, 3, options(), bias=False, std=1.0)


def test_a_size_that_leaves_a_rank_empty_is_refused_on_every_rank():
    ranks(4, refuse_an_empty_rank)
