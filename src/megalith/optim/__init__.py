"""Optimizers, their parameter groups, gradient norm and clipping, and learning rate and weight decay schedules."""
