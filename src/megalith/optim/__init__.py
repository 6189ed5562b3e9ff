"""How parameters move: the optimizer's parameter groups, norms and clipping, and the schedules of its rates."""
