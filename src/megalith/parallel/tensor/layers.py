"""Linear layers and the embedding, split over tp.

    column     Y = X W^T + b, W [out/tp, in]: each rank computes part of the outputs
    block      Y = X W_i^T + b_i, W [out, in] on every rank: each rank computes the one block of outputs that it uses
    row        Y = (sum over tp of X W^T) + b, W [out, in/tp]: each rank has part of the inputs
    whole      Y = X W^T + b, W [out, in] on every rank: each rank computes all outputs, for the tokens that it has
    embedding  E [V/tp, H]: each rank looks up the tokens whose rows it holds, and the others add zero

The matrix product is ``options.matrix_product``. Sizes need not be divisible by tp: they are split as by torch.chunk.
Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053.
"""

import torch
from torch import Tensor, nn

from megalith.config.draft import divisors
from megalith.errors import ShapeError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.local_ranges import chunk_range
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.parallel.tensor.regions import enter_tensor_parallel, leave_tensor_parallel

__all__ = [
    "BlockReplicatedLinear",
    "ColumnParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]


class ColumnParallelLinear(DeclaringModule):
    """A linear layer that computes out/tp of its outputs on each rank.

    Args:
        in_features, out_features: sizes before the split.
        options: groups, dtype, matrix product, and sequence parallelism (the input is [S/tp, B, in] and is gathered).
        bias: whether to add a bias, which is split like the outputs.
        std: standard deviation of the initial weights; biases are initialized to zero.
        input_is_gathered: the caller has already entered the tensor-parallel region, as for q, k and v, which share
            one input.
        has_weight: False if the weight is passed to each call, as for an output projection with tied embeddings.

    Raises:
        ShapeError: a rank of tp would have no outputs.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        *,
        bias: bool,
        std: float,
        input_is_gathered: bool = False,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        _refuse_empty_rank("out_features", out_features, options)
        self.options = options
        self.input_is_gathered = input_is_gathered
        if has_weight:
            spec = ParameterSpec((out_features, in_features), "normal", std, split={"tp": 0})
            self.declare("weight", spec, options.pg_collection, options.dtype)
        else:
            self.register_parameter("weight", None)
        if bias:
            spec = ParameterSpec((out_features,), "zeros", split={"tp": 0})
            self.declare("bias", spec, options.pg_collection, options.dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, weight: Tensor | None = None, *, skip_bias_add: bool = False) -> Tensor:
        """[S, B, in] ([S/tp, B, in] under sequence parallelism) -> [S, B, out/tp].

        Args:
            x: the input.
            weight: for ``has_weight=False``, another module's parameter [out, in], split as the layer's own would be.
            skip_bias_add: leaves out the bias, which the caller adds in an operation that follows.
        """
        weight = self.weight if weight is None else weight
        assert weight is not None, "a layer built with has_weight=False must be called with a weight"
        if not self.input_is_gathered:
            x = enter_tensor_parallel(x, self.options.pg_collection.tp, self.options.sequence_parallel)
        bias = None if skip_bias_add or self.bias is None else local(self.bias)
        return self.options.matrix_product(x, local(weight), bias)


class BlockReplicatedLinear(DeclaringModule):
    """A linear layer with fewer blocks of outputs than ranks of tp; ranks that use the same block each compute it.

    Rank r of tp computes block r * num_blocks // tp. The weight is replicated, which needs no collective in forward,
    but costs the memory of num_blocks - 1 blocks that the rank does not use. The gradient is summed over tp once a
    step.

    Args:
        in_features: size of the input, which the caller has already gathered.
        block_features: outputs per block.
        num_blocks: blocks of the whole layer, for instance key heads.
        options: groups, dtype and matrix product.
        bias: whether to add a bias.
        std: standard deviation of the initial weights; biases are initialized to zero.

    Raises:
        ShapeError: tp is not divisible by ``num_blocks``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, block_features: int, num_blocks: int, options: BuildOptions, *, bias: bool, std: float
    ) -> None:
        super().__init__()
        tp_size, tp_rank = options.pg_collection.size("tp"), options.pg_collection.rank("tp")
        if tp_size % num_blocks:
            fitting = ", ".join(map(str, divisors(tp_size)))
            raise ShapeError(f"num_blocks ({num_blocks}) must divide the size of tp ({tp_size}); use {fitting}")
        self.options = options
        first = tp_rank * num_blocks // tp_size * block_features
        self.rows = slice(first, first + block_features)
        spec = ParameterSpec((num_blocks * block_features, in_features), "normal", std)
        self.declare("weight", spec, options.pg_collection, options.dtype)
        if bias:
            spec = ParameterSpec((num_blocks * block_features,), "zeros")
            self.declare("bias", spec, options.pg_collection, options.dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, in] -> [S, B, block_features]."""
        # a rank uses only one block, which other ranks may use too, so its gradient is one term of the sum
        weight = local(self.weight, partial=True)[self.rows]
        bias = None if self.bias is None else local(self.bias, partial=True)[self.rows]
        return self.options.matrix_product(x, weight, bias)


class RowParallelLinear(DeclaringModule):
    """A linear layer with in/tp of its inputs on each rank; outputs are summed over tp, then the bias is added once.

    One rank has nothing to sum, and its product adds the bias; in 16 bits that is one rounding less. The arguments are
    those of ColumnParallelLinear. Under sequence parallelism the output is [S/tp, B, out].

    Raises:
        ShapeError: a rank of tp would have no inputs.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, options: BuildOptions, *, bias: bool, std: float) -> None:
        super().__init__()
        _refuse_empty_rank("in_features", in_features, options)
        self.options = options
        spec = ParameterSpec((out_features, in_features), "normal", std, split={"tp": 1})
        self.declare("weight", spec, options.pg_collection, options.dtype)
        if bias:
            self.declare("bias", ParameterSpec((out_features,), "zeros"), options.pg_collection, options.dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, in/tp] -> [S, B, out] ([S/tp, B, out] under sequence parallelism)."""
        if self.options.pg_collection.size("tp") == 1:  # nothing to sum: the product may add the bias itself
            return self.options.matrix_product(x, local(self.weight), None if self.bias is None else local(self.bias))
        y = self.options.matrix_product(x, local(self.weight), None)
        y = leave_tensor_parallel(y, self.options.pg_collection.tp, self.options.sequence_parallel)
        # under sequence parallelism a rank adds the bias to its own tokens only, so its gradient is partial
        return y if self.bias is None else y + local(self.bias, partial=self.options.sequence_parallel)


class ReplicatedLinear(DeclaringModule):
    """A linear layer whose weight, inputs and outputs are not split over tp.

    Under sequence parallelism each rank computes its own tokens, and only the weight gradient is communicated, once a
    step. Without it all ranks of tp compute the same. The arguments are those of ColumnParallelLinear.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, options: BuildOptions, *, std: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.options = options
        spec = ParameterSpec((out_features, in_features), "normal", std)
        self.declare("weight", spec, options.pg_collection, options.dtype)
        if bias:
            self.declare("bias", ParameterSpec((out_features,), "zeros"), options.pg_collection, options.dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, in] -> [S, B, out] ([S/tp, B, in] -> [S/tp, B, out] under sequence parallelism)."""
        partial = self.options.sequence_parallel
        bias = None if self.bias is None else local(self.bias, partial=partial)
        return self.options.matrix_product(x, local(self.weight, partial=partial), bias)


class VocabParallelEmbedding(DeclaringModule):
    """Token embeddings [V, H] with rows split over tp. Raises ShapeError if a rank of tp would have no rows."""

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, embedding_dim: int, options: BuildOptions, *, std: float) -> None:
        super().__init__()
        _refuse_empty_rank("num_embeddings", num_embeddings, options)
        groups = options.pg_collection
        self.options = options
        self.num_embeddings = num_embeddings
        self.first, self.end = chunk_range(num_embeddings, groups.size("tp"), groups.rank("tp"))
        spec = ParameterSpec((num_embeddings, embedding_dim), "normal", std, split={"tp": 0})
        self.declare("weight", spec, groups, options.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, S] -> [S, B, H] ([S/tp, B, H] under sequence parallelism).

        With tp, a token outside [0, V) gives NaN instead of an error: a rank that raised would leave the others
        waiting for it.
        """
        tokens = tokens.t()  # [S, B]
        tp_group = self.options.pg_collection.tp
        if tp_group is None:
            return nn.functional.embedding(tokens, local(self.weight))
        elsewhere = (tokens < self.first) | (tokens >= self.end)
        rows = (tokens - self.first).masked_fill(elsewhere, 0)
        x = nn.functional.embedding(rows, local(self.weight))  # [S, B, H]
        nowhere = (tokens < 0) | (tokens >= self.num_embeddings)
        others = torch.zeros_like(tokens, dtype=x.dtype).masked_fill(nowhere, float("nan"))
        x = torch.where(elsewhere.unsqueeze(-1), others.unsqueeze(-1), x)
        return leave_tensor_parallel(x, tp_group, self.options.sequence_parallel)


def _refuse_empty_rank(what: str, size: int, options: BuildOptions) -> None:
    tp_size = options.pg_collection.size("tp")
    start, stop = chunk_range(size, tp_size, tp_size - 1)
    if start == stop:
        raise ShapeError(f"{what} ({size}) leaves at least one rank of tp ({tp_size}) empty; use fewer ranks")
