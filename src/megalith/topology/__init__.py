"""Where each rank sits: the rank grid, lazily created process groups, and differentiable collectives."""
