"""Expert parallelism: token exchanges that are fused with the operations before and after them."""
