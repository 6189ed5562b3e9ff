"""Memory for time, and time for memory: recomputation of activations."""
