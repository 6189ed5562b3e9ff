"""Linear layers and the embedding, split over tp.

    column  Y = X W^T + b, W [out/tp, in]: each rank computes some of the outputs
    row     Y = sum over tp of X W^T, + b, W [out, in/tp]: each rank has some of the inputs
    embedding  E [V/tp, H]: each rank looks up the tokens that it holds, the others add zero

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053. V and out may be uneven over tp: the split is torch.chunk's.
"""

import torch
from torch import Tensor, nn

from megalith.errors import ShapeError
from megalith.parallel.boxes import split_evenly
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.parallel.tensor.regions import enter_tensor_parallel, leave_tensor_parallel
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]


class ColumnParallelLinear(DeclaringModule):
    """A linear layer that computes out/tp of its outputs on each rank.

    Args:
        in_features, out_features: sizes before the split.
        bias: whether there is one; it is split as the outputs are.
        sequence_parallel: the input is [S/tp, B, in] and is gathered first.
        input_is_gathered: the caller has entered the region already, as for q, k and v that share one input.
        std: standard deviation of the first weights; biases begin at zero.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        dtype: torch.dtype,
        pg_collection: ProcessGroupCollection,
        sequence_parallel: bool = False,
        input_is_gathered: bool = False,
    ) -> None:
        super().__init__()
        _refuse_empty_rank("out_features", out_features, pg_collection)
        self.tp_group = pg_collection.tp
        self.sequence_parallel = sequence_parallel
        self.input_is_gathered = input_is_gathered
        self.declare("weight", ParameterSpec((out_features, in_features), 0, "normal", std), pg_collection, dtype)
        if not bias:
            self.register_parameter("bias", None)
        else:
            self.declare("bias", ParameterSpec((out_features,), 0, "zeros"), pg_collection, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, in] ([S/tp, B, in] under sequence parallelism) -> [S, B, out/tp]."""
        if not self.input_is_gathered:
            x = enter_tensor_parallel(x, self.tp_group, self.sequence_parallel)
        return nn.functional.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowParallelLinear(DeclaringModule):
    """A linear layer that has in/tp of its inputs on each rank; the outputs are summed, then the bias is added once.

    Args are those of ColumnParallelLinear.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        dtype: torch.dtype,
        pg_collection: ProcessGroupCollection,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        _refuse_empty_rank("in_features", in_features, pg_collection)
        self.tp_group = pg_collection.tp
        self.sequence_parallel = sequence_parallel
        self.declare("weight", ParameterSpec((out_features, in_features), 1, "normal", std), pg_collection, dtype)
        if not bias:
            self.register_parameter("bias", None)
        else:
            self.declare("bias", ParameterSpec((out_features,), None, "zeros"), pg_collection, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, in/tp] -> [S, B, out] ([S/tp, B, out] under sequence parallelism)."""
        y = nn.functional.linear(x, local(self.weight))
        y = leave_tensor_parallel(y, self.tp_group, self.sequence_parallel)
        # under sequence parallelism a rank adds the bias to its own tokens only, so its gradient is partial
        return y if self.bias is None else y + local(self.bias, partial=self.sequence_parallel)


class VocabParallelEmbedding(DeclaringModule):
    """Token embeddings [V, H], rows split over tp."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        std: float,
        dtype: torch.dtype,
        pg_collection: ProcessGroupCollection,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        _refuse_empty_rank("num_embeddings", num_embeddings, pg_collection)
        self.tp_group = pg_collection.tp
        self.sequence_parallel = sequence_parallel
        self.num_embeddings = num_embeddings
        self.first, self.end = split_evenly(num_embeddings, pg_collection.tp_size, pg_collection.tp_rank)
        spec = ParameterSpec((num_embeddings, embedding_dim), 0, "normal", std)
        self.declare("weight", spec, pg_collection, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, S] -> [S, B, H] ([S/tp, B, H] under sequence parallelism).

        With tp a token outside [0, V) gives NaN: a rank that raised would leave the others waiting for it.
        """
        tokens = tokens.t()  # [S, B]
        if self.tp_group is None:
            return nn.functional.embedding(tokens, local(self.weight))
        elsewhere = (tokens < self.first) | (tokens >= self.end)
        rows = (tokens - self.first).masked_fill(elsewhere, 0)
        x = nn.functional.embedding(rows, local(self.weight))  # [S, B, H]
        nowhere = (tokens < 0) | (tokens >= self.num_embeddings)
        others = torch.zeros_like(tokens, dtype=x.dtype).masked_fill(nowhere, float("nan"))
        x = torch.where(elsewhere.unsqueeze(-1), others.unsqueeze(-1), x)
        return leave_tensor_parallel(x, self.tp_group, self.sequence_parallel)


def _refuse_empty_rank(what: str, size: int, pg_collection: ProcessGroupCollection) -> None:
    start, stop = split_evenly(size, pg_collection.tp_size, pg_collection.tp_size - 1)
    if start == stop:
        raise ShapeError(f"{what} ({size}) leaves a rank of tp ({pg_collection.tp_size}) with nothing; use fewer ranks")
