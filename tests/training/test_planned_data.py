"""How much of each dataset a run will read, in lines that can be read."""

from fractions import Fraction
from typing import Any

from megalith.data.blended_dataset import BlendedDataset
from megalith.training.planned_data import planned_data


class Sized:
    """A dataset that is only counted."""

    def __init__(self, samples_per_epoch: int) -> None:
        self.samples_per_epoch = Fraction(samples_per_epoch)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError


def test_datasets_with_long_names_have_a_wider_column():
    names = ("stack-edu-python-2025-06", "twenty-characters-ab", "web")
    heading, *lines = planned_data(BlendedDataset({name: Sized(25) for name in names}), 75)
    assert heading == "training data         75 samples in total:"
    assert lines == [f"  {name:<25}25 samples, 1 epoch" for name in names]


def test_up_to_four_epochs_are_no_reason_to_warn_and_a_phase_that_begins_at_the_end_is_one():
    dataset = BlendedDataset({"a": Sized(2)}, {"a": 1}, {8: {"a": 2}})
    assert planned_data(dataset, 8)[1:] == [
        f"  {'a':<20}8 samples, 4 epochs",
        "  the phase from sample 8 on begins after the last step",
    ]
    [line] = planned_data(dataset, 9)[1:]
    assert line.startswith(f"  {'a':<20}9 samples, 4.5 epochs, more than the 4 that are nearly as good as new text")
