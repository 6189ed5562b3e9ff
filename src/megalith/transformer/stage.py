"""Which part of a model a process builds: some of its layers, and whether it holds the embedding and the head."""

from dataclasses import dataclass

from megalith.errors import ConfigError

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """Layers [first, last) by global index. Without the embedding it is given hidden states, without the head it gives
    them.

    Raises:
        ConfigError: no layers, or indices below 0.
    """

    first: int
    last: int
    has_embedding: bool
    has_head: bool

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ConfigError(f"a stage holds layers [first, last), one or more; got [{self.first}, {self.last})")

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        """All of a model."""
        return cls(0, num_layers, has_embedding=True, has_head=True)

    @property
    def layers(self) -> range:
        """The global indices of its layers."""
        return range(self.first, self.last)
