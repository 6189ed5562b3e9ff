"""Benchmarks: one registry of cases, each compared with its peers in one run. ``python -m benchmarks --help``."""
