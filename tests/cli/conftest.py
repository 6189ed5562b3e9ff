"""Fixtures shared by several files."""

from tests.cli.trained_run import original

__all__ = ["original"]
