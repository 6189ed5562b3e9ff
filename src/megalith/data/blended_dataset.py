"""Samples drawn from several datasets in proportion to weights."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any, Generic, TypedDict, TypeVar

from megalith.config import DataConfig
from megalith.data.blend import Blend, BlendPhase, Weights
from megalith.data.samples import EndlessSamples, Identified, Samples
from megalith.errors import ConfigError

__all__ = ["BlendedDataset", "blended"]

Sample = TypeVar("Sample")


class DatasetProgress(TypedDict):
    """How many samples of a dataset have been read, and how many epochs that is."""

    samples: int
    epochs: float


class BlendedDataset(Generic[Sample]):
    """Samples of ``datasets`` without end: every index from 0 on is valid. A sample depends only on its index.

    Args:
        datasets: by name.
        weights: the ratio in which samples are drawn from the datasets, each named; those of weight 0 are left out.
            None: the ratio of their sizes, so that all reach the end of an epoch at the same time.
        phases: weights from later samples on, by the index of the first; in increasing order. A dataset continues
            where the earlier phases left it.

    Raises:
        ConfigError: weights that are not one number of at least 0 for each dataset, or are all 0; phases out of order.
    """

    def __init__(
        self,
        datasets: Mapping[str, EndlessSamples[Sample]],
        weights: Mapping[str, float] | None = None,
        phases: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        self.datasets = datasets
        sizes = {name: dataset.samples_per_epoch for name, dataset in datasets.items()}
        first = sizes if weights is None else _exact(weights, datasets)
        later = [BlendPhase(start, _exact(others, datasets)) for start, others in (phases or {}).items()]
        starts = [0, *(phase.first_sample for phase in later)]
        if any(following <= start for start, following in pairwise(starts)):
            raise ConfigError(
                f"phases of a blend must begin at increasing samples above 0; got {', '.join(map(str, starts[1:]))}"
            )
        self._blend = Blend([BlendPhase(0, first), *later])

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, from 0 on. Raises IndexError below 0."""
        if index < 0:
            raise IndexError(f"samples are numbered from 0; got {index}")
        name, place = self._blend.locate(index)
        return self.datasets[name][place]

    def identity(self) -> dict[str, Any]:
        """The identities of the datasets, by name, and the weights of each phase."""
        known = {name: data.identity() if isinstance(data, Identified) else {} for name, data in self.datasets.items()}
        return self._blend.identity(known)

    @property
    def phase_starts(self) -> list[int]:
        """The first sample of each phase, from 0 on."""
        return self._blend.firsts

    def progress(self, num_samples: int) -> dict[str, DatasetProgress]:
        """Returns, for each dataset, how many of the first ``num_samples`` it provides and how many epochs that is."""
        counts = self._blend.counts(num_samples)
        return {
            name: DatasetProgress(
                samples=counts.get(name, 0), epochs=float(counts.get(name, 0) / dataset.samples_per_epoch)
            )
            for name, dataset in self.datasets.items()
        }


def blended(data: DataConfig, open_dataset: Callable[[str], EndlessSamples[Sample]]) -> Samples[Sample]:
    """Returns the samples of ``data.train``; ``open_dataset`` returns those of a prefix."""
    assert data.train is not None, "preflight refuses a run without data"
    if isinstance(data.train, str):
        return open_dataset(data.train)
    datasets = {name: open_dataset(prefix) for name, prefix in data.train_sets.items()}
    return BlendedDataset(datasets, data.weights, {phase.first_sample: phase.weights for phase in data.phases})


def _exact(weights: Mapping[str, float], datasets: Mapping[str, object]) -> Weights:
    """Returns the decimal numbers that the user wrote: 0.1 is 1/10."""
    valid = weights.keys() == datasets.keys() and all(0 <= weight < math.inf for weight in weights.values())
    if not valid or not any(weights.values()):
        raise ConfigError(
            f"the weights of a blend must be finite numbers of at least 0, one for each of {', '.join(datasets)}, and "
            f"not all 0; got {dict(weights)}; for example {dict.fromkeys(datasets, 1.0)}"
        )
    return {name: Fraction(str(weight)) for name, weight in weights.items()}
