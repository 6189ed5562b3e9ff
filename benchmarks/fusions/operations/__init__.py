"""The operations that are measured, a file for each family."""
