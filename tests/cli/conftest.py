"""Fixtures of more than one file here."""

from tests.cli.trained_run import original

__all__ = ["original"]
