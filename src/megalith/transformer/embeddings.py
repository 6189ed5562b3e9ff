"""Learned embeddings other than those of the vocabulary: positions and token types."""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.topology.collectives import scatter_to_sequence_parallel_region

__all__ = ["LearnedPositions", "ReplicatedEmbedding"]


class ReplicatedEmbedding(DeclaringModule):
    """An embedding with ``num_embeddings`` rows, replicated on every rank of tp."""

    weight: nn.Parameter

    def __init__(self, num_embeddings: int, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        self.sequence_group = options.pg_collection.tp if options.sequence_parallel else None
        spec = ParameterSpec((num_embeddings, config.hidden_size), "normal", config.init_method_std)
        self.declare("weight", spec, options.pg_collection, options.dtype)

    def forward(self, numbers: Tensor) -> Tensor:
        """int64 [S] or [B, S] -> [S, 1 or B, H]; [S/tp, 1 or B, H] under sequence parallelism."""
        rows = numbers if numbers.dim() == 2 else numbers.unsqueeze(0)
        mine = scatter_to_sequence_parallel_region(rows.t(), self.sequence_group)  # [S/tp, 1 or B]
        return nn.functional.embedding(mine, local(self.weight, partial=self.sequence_group is not None))


class LearnedPositions(ReplicatedEmbedding):
    """Learned position embeddings; the first ``config.position_offset`` rows are not used."""

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        assert config.max_position_embeddings is not None, "validated together with learned_absolute"
        super().__init__(config.position_offset + config.max_position_embeddings, config, options)
        self.offset = config.position_offset

    def forward(self, positions: Tensor) -> Tensor:
        """Same shapes as ``ReplicatedEmbedding``."""
        return super().forward(positions + self.offset if self.offset else positions)
