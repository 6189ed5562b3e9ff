"""Places the stages of a model on ranks: every rank has the same number of chunks, and each chunk is one stage.

    looped    stage = chunk * p + rank                                  the first of p ranks follows the last
    v         chunk 0: stage = rank; chunk 1: stage = 2 p - 1 - rank    down the ranks and back up

Interleaved schedules use the looped placement (arXiv:2104.04473, section 2.2). In a V (arXiv:2405.15362) the first and
the last stage, and thus the embedding and the output layer, are on the same rank.
"""

from dataclasses import dataclass
from typing import Literal

from megalith.errors import ConfigError

__all__ = ["Placement", "check_sizes"]


@dataclass(frozen=True)
class Placement:
    """The stages of ``num_ranks`` ranks with ``num_chunks`` chunks each. A place is a pair (rank, chunk).

    Raises:
        ConfigError: a number that is not a positive integer, or a V without exactly two chunks.
    """

    num_ranks: int
    num_chunks: int = 1
    shape: Literal["looped", "v"] = "looped"

    def __post_init__(self) -> None:
        check_sizes(num_ranks=self.num_ranks, num_chunks=self.num_chunks)
        if self.shape == "v" and self.num_chunks != 2:
            raise ConfigError(
                f"shape='v' needs two chunks per rank, one on the way down and one on the way up; got num_chunks="
                f"{self.num_chunks}; use num_chunks=2, or shape='looped'"
            )

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks together."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Returns the stage at a place."""
        if self.shape == "v" and chunk == 1:
            return self.num_stages - 1 - rank
        return chunk * self.num_ranks + rank

    def place(self, stage: int) -> tuple[int, int]:
        """Returns the (rank, chunk) of ``stage``."""
        chunk, position = divmod(stage, self.num_ranks)
        return (self.num_ranks - 1 - position if self.shape == "v" and chunk == 1 else position), chunk

    def previous(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Returns the place of the previous stage, where the inputs come from; None for the first stage."""
        stage = self.stage(rank, chunk)
        return self.place(stage - 1) if stage > 0 else None

    def next(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Returns the place of the next stage, where the outputs go; None for the last stage."""
        stage = self.stage(rank, chunk)
        return self.place(stage + 1) if stage < self.num_stages - 1 else None


def check_sizes(**sizes: int) -> None:
    """Raises one ConfigError for all sizes that are not positive integers; bool is rejected although it is an int."""
    if wrong := {name: size for name, size in sizes.items() if type(size) is not int or size < 1}:
        raise ConfigError(
            f"pipeline sizes must be positive integers; got "
            f"{', '.join(f'{name}={size!r}' for name, size in wrong.items())}; use 1 or more"
        )
