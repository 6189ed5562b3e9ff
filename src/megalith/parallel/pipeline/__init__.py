"""The order in which ranks run micro-batches forward and backward: schedules as data, and the executor of any plan."""
