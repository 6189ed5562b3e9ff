"""The part of a model that a process builds: a range of layers, and whether it has the embedding and the head."""

from dataclasses import dataclass

from megalith.errors import ConfigError

__all__ = ["Stage"]


@dataclass(frozen=True)
class Stage:
    """Layers [first, last) by global index.

    Without the embedding, its input is hidden states; without the head, its output is hidden states.

    Raises:
        ConfigError: no layers, or indices below 0.
    """

    first: int
    last: int
    has_embedding: bool
    has_head: bool

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ConfigError(f"a stage must have at least one layer, [first, last); got [{self.first}, {self.last})")

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        """Returns the stage that is the whole model."""
        return cls(0, num_layers, has_embedding=True, has_head=True)

    @property
    def layers(self) -> range:
        """The global indices of the layers."""
        return range(self.first, self.last)

    def check_fits(self, num_layers: int) -> None:
        """Raises ConfigError if a model of ``num_layers`` layers cannot have this stage."""
        if self.last > num_layers:
            raise ConfigError(f"the stage [{self.first}, {self.last}) extends past the model's {num_layers} layers")
        if (self.has_embedding and self.first != 0) or (self.has_head and self.last != num_layers):
            raise ConfigError(
                f"the embedding must be in the stage with layer 0 and the head in the one with layer {num_layers - 1}; "
                f"the stage [{self.first}, {self.last}) has "
                f"{'the embedding' if self.has_embedding and self.first != 0 else 'the head'}"
            )
