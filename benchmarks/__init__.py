"""Benchmarks: one registry of cases, peers side by side in one run. ``python -m benchmarks --help``."""
