"""Which stage of the model lies where: every rank of a pipeline has the same number of chunks, and each is one stage.

    looped    stage = chunk * p + rank                                  after the last of p ranks comes the first again
    v         chunk 0: stage = rank; chunk 1: stage = 2 p - 1 - rank    down the ranks and back up

Looped placement is that of interleaved schedules (arXiv:2104.04473, section 2.2). In a V (arXiv:2405.15362) the first
and the last stage share a rank, and with them the embedding and the output layer.
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
                f"a V has two chunks per rank, one on the way down and one on the way up; got num_chunks="
                f"{self.num_chunks}; use num_chunks=2, or shape='looped'"
            )

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage at a place."""
        if self.shape == "v" and chunk == 1:
            return self.num_stages - 1 - rank
        return chunk * self.num_ranks + rank

    def place(self, stage: int) -> tuple[int, int]:
        """The rank and the chunk where ``stage`` lies."""
        chunk, position = divmod(stage, self.num_ranks)
        return (self.num_ranks - 1 - position if self.shape == "v" and chunk == 1 else position), chunk

    def previous(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """The place of the previous stage, from which the inputs come; None for the first stage."""
        stage = self.stage(rank, chunk)
        return self.place(stage - 1) if stage > 0 else None

    def next(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """The place of the next stage, which the outputs go to; None for the last stage."""
        stage = self.stage(rank, chunk)
        return self.place(stage + 1) if stage < self.num_stages - 1 else None


def check_sizes(**sizes: int) -> None:
    """Raises for all sizes at once that are not positive integers; bool is refused, although it is an int in Python."""
    if wrong := {name: size for name, size in sizes.items() if type(size) is not int or size < 1}:
        raise ConfigError(
            f"the sizes of a pipeline must be positive integers; got "
            f"{', '.join(f'{name}={size!r}' for name, size in wrong.items())}; use 1 or more"
        )
