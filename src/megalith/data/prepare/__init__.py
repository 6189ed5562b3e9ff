"""Prepares datasets: files of texts or conversations are found, cut into parts, encoded by processes, and joined."""

from megalith.data.prepare.job import PrepareSummary, Progress, prepare

__all__ = ["PrepareSummary", "Progress", "prepare"]
