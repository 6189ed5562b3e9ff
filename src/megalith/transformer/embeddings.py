"""Learned positions."""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.topology.collectives import scatter_to_sequence_parallel_region

__all__ = ["LearnedPositions"]


class LearnedPositions(DeclaringModule):
    """One learned vector for each position, whole on every rank of tp."""

    weight: nn.Parameter

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        assert config.max_position_embeddings is not None, "the config was validated"
        self.sequence_group = options.pg_collection.tp if options.sequence_parallel else None
        shape = (config.max_position_embeddings, config.hidden_size)
        spec = ParameterSpec(shape, "normal", config.init_method_std)
        self.declare("weight", spec, options.pg_collection, options.dtype)

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [S], or [B, S] -> [S, 1 or B, H]; [S/tp, 1 or B, H] under sequence parallelism."""
        rows = positions if positions.dim() == 2 else positions.unsqueeze(0)
        mine = scatter_to_sequence_parallel_region(rows.t(), self.sequence_group)  # [S/tp, 1 or B]
        return nn.functional.embedding(mine, local(self.weight, partial=self.sequence_group is not None))
