"""What a dataset is to the rest of the house: samples by number."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Identified", "Samples", "SizedSamples"]

Sample = TypeVar("Sample", covariant=True)


class Samples(Protocol[Sample]):
    """Samples without end, numbered from 0; a sample depends on its number alone."""

    def __getitem__(self, index: int) -> Sample: ...


class SizedSamples(Samples[Sample], Protocol[Sample]):
    """A given number of samples."""

    def __len__(self) -> int: ...


@runtime_checkable
class Identified(Protocol):
    """Samples that tell what they are, so that a run does not go on with others."""

    def identity(self) -> Mapping[str, Any]:
        """What decides which sample a number stands for, besides ``train.seed``: plain values, each under a name.

        Equal identities mean equal samples. It does not depend on where the files lie, nor on batch size or layout.
        """
        ...
