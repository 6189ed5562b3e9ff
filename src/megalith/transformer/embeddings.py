"""Learned positions, and the ids of the tokens that a rank holds."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalith.config import TransformerConfig
from megalith.numerics.dropout import DropoutKey
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.topology.collectives import scatter_to_sequence_parallel_region
from megalith.transformer.build_options import BuildOptions

__all__ = ["LearnedPositions", "sequence_parallel_key"]


class LearnedPositions(DeclaringModule):
    """One learned vector for each position, whole on every rank of tp."""

    weight: nn.Parameter

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        assert config.max_position_embeddings is not None, "the config was validated"
        self.sequence_group = options.pg_collection.tp if options.sequence_parallel else None
        shape = (config.max_position_embeddings, config.hidden_size)
        spec = ParameterSpec(shape, None, "normal", config.init_method_std)
        self.declare("weight", spec, options.pg_collection, options.dtype)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [S], or [B, S] -> [S, 1 or B, H]; [S/tp, 1 or B, H] under sequence parallelism."""
        rows = positions if positions.dim() == 2 else positions.unsqueeze(0)
        mine = scatter_to_sequence_parallel_region(rows.t(), self.sequence_group)  # [S/tp, 1 or B]
        return nn.functional.embedding(mine, local(self.weight, partial=self.sequence_group is not None))


def sequence_parallel_key(key: DropoutKey, tp_group: ProcessGroup | None) -> DropoutKey:
    """``key`` for all tokens [B, S] -> the key for this rank's, [S/tp, B]; ``tp_group`` None: [S, B]."""
    tokens = key.tokens.t()
    if tp_group is not None:
        tokens = torch.chunk(tokens, tp_group.size())[tp_group.rank()]
    return replace(key, tokens=tokens)
