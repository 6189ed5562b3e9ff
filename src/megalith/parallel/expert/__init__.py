"""Expert parallelism: exchanges of tokens that are fused with what comes before and after them."""
