"""Protocols of datasets: samples by index."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["EndlessSamples", "Identified", "Samples", "SizedSamples"]

Sample = TypeVar("Sample", covariant=True)


class Samples(Protocol[Sample]):
    """Samples without end, indexed from 0; a sample depends only on its index."""

    def __getitem__(self, index: int) -> Sample: ...


class EndlessSamples(Samples[Sample], Protocol[Sample]):
    """Samples of a dataset that is repeated without end."""

    @property
    def samples_per_epoch(self) -> Fraction:
        """How many samples read the dataset once; not a whole number if a sample may span two epochs."""
        ...


class SizedSamples(Samples[Sample], Protocol[Sample]):
    """A finite number of samples."""

    def __len__(self) -> int: ...


@runtime_checkable
class Identified(Protocol):
    """Samples with an identity, so that a run does not resume with different data."""

    def identity(self) -> Mapping[str, Any]:
        """The text that the sample of an index is made from, besides ``train.seed``, as named plain values.

        Settings that change what is made of that text, such as fill-in-the-middle, are not part of it: they may change
        when a run is resumed. Independent of the location of the files, batch size and layout.
        """
        ...
