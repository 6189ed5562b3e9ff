"""What the operations compute, in plain torch: references, their gradients, blocks of them, and declared results."""
