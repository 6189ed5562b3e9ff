"""Data parallelism by FSDP2: replicated, sharded, and hybrid."""
