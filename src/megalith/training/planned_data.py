"""Says how much of each dataset a run will read, before it reads any."""

from typing import Any

from megalith.config import RunConfig
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.chat.dataset import ChatDataset
from megalith.data.samples import Samples
from megalith.training.num_microbatches_calculator import build_num_microbatches_calculator
from megalith.wording import counted

__all__ = ["planned_data", "planned_samples"]

_MOST_SHOWN = 20  # datasets
_WIDTH = 20  # characters of their column of names, if none is longer
# repeating text up to four times is nearly as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)
_MOST_EPOCHS = 4.0


def planned_samples(config: RunConfig, data_parallel_size: int) -> int:
    """Returns the number of samples in all steps of the run."""
    return build_num_microbatches_calculator(config, data_parallel_size).consumed_after(config.train.steps)


def planned_data(dataset: Samples[Any], num_samples: int) -> list[str]:
    """Returns lines about a run that reads ``num_samples`` of a blend or of conversations; none for other data."""
    if isinstance(dataset, ChatDataset):  # users think of fine-tuning in epochs
        epochs = float(num_samples / dataset.samples_per_epoch)
        read = f"{counted(num_samples, 'row')} of conversations in total, {_written(epochs)}"
        return [f"training data         {read}{_repeated(epochs)}"]
    if not isinstance(dataset, BlendedDataset):
        return []
    progress = dataset.progress(num_samples)
    lines = [f"training data         {counted(num_samples, 'sample')} in total:"]
    shown = list(progress.items())[:_MOST_SHOWN]
    width = max(_WIDTH, *(len(name) + 1 for name, _ in shown))
    for name, part in shown:
        remark = "" if part["samples"] else ": none is drawn before the last step"
        remark += _repeated(part["epochs"])
        lines.append(f"  {name:<{width}}{counted(part['samples'], 'sample')}, {_written(part['epochs'])}{remark}")
    if len(progress) > _MOST_SHOWN:
        lines.append(f"  and {len(progress) - _MOST_SHOWN} more")
    for start in dataset.phase_starts:
        if start >= num_samples:
            lines.append(f"  the phase from sample {start:,} on begins after the last step")
    return lines


def _written(epochs: float) -> str:
    """Returns the number in at most three digits: 1 epoch, 0.25 epochs."""
    number = f"{epochs:.3g}"
    return f"{number} epoch{'' if number == '1' else 's'}"


def _repeated(epochs: float) -> str:
    """Returns a remark on a dataset that is read more often than helps."""
    if epochs <= _MOST_EPOCHS:
        return ""
    return ", more than the 4 that are nearly as good as new text (arXiv:2305.16264)"
