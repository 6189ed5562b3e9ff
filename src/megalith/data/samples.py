"""What a dataset is to the rest of the house: samples by number."""

from typing import Protocol, TypeVar

__all__ = ["Samples", "SizedSamples"]

Sample = TypeVar("Sample", covariant=True)


class Samples(Protocol[Sample]):
    """Samples without end, numbered from 0; a sample depends on its number alone."""

    def __getitem__(self, index: int) -> Sample: ...


class SizedSamples(Samples[Sample], Protocol[Sample]):
    """A given number of samples."""

    def __len__(self) -> int: ...
