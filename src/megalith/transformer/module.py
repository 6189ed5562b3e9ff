"""The base of whole models: built on meta, made real, initialised, counted."""

import torch

from megalith.parallel.parameters import DeclaringModule, declared_parameters, initialize_parameters_

__all__ = ["ModelModule"]


class ModelModule(DeclaringModule):
    """A model whose every parameter is declared.

    Built under ``torch.device("meta")`` it takes no memory; then it is sharded, and ``materialize`` gives this rank its
    part alone, so that no rank ever holds the whole. Built elsewhere, its constructor ends with ``finish``.
    """

    def finish(self, seed: int) -> None:
        """Called at the end of a model's constructor: checks declarations, and draws weights unless on meta."""
        parameters = [parameter for _, parameter, _ in declared_parameters(self)]
        if not any(parameter.is_meta for parameter in parameters):
            self.initialize_weights(seed)

    def materialize(self, device: torch.device | str, seed: int) -> None:
        """Allocates this rank's part of a model built on meta, on ``device``, and draws its first weights."""
        self.to_empty(device=device)
        self.initialize_weights(seed)

    def initialize_weights(self, seed: int) -> None:
        """Draws every weight anew: the same numbers for the same ``seed``, however the model is split."""
        initialize_parameters_(self, seed)

    def num_parameters(self) -> int:
        """Number of parameters of the whole model over all ranks; tied ones count once."""
        return sum(parameter.numel() for _, parameter, _ in declared_parameters(self))
