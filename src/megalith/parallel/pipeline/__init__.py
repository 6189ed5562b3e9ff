"""The order in which a rank runs micro-batches forward and backward: plans as data, and the executor of any plan."""
