"""Protocols of datasets: samples by index."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Identified", "Samples", "SizedSamples"]

Sample = TypeVar("Sample", covariant=True)


class Samples(Protocol[Sample]):
    """Samples without end, indexed from 0; a sample depends only on its index."""

    def __getitem__(self, index: int) -> Sample: ...


class SizedSamples(Samples[Sample], Protocol[Sample]):
    """A finite number of samples."""

    def __len__(self) -> int: ...


@runtime_checkable
class Identified(Protocol):
    """Samples with an identity, so that a run does not resume with different data."""

    def identity(self) -> Mapping[str, Any]:
        """Everything besides ``train.seed`` that determines the sample of an index, as named plain values.

        Equal identities mean equal samples. Independent of the location of the files, batch size and layout.
        """
        ...
