"""What a checkpoint holds besides tensors (``state.json``): how far a run has come, on which data, in which settings.

A state that an earlier version wrote is brought up step by step by the table of upgrades: a field that is added, or
taken away, is an entry there, and old checkpoints stay readable.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from megalith.checkpoint.load import read_state
from megalith.checkpoint.save import STATE
from megalith.errors import CheckpointError
from megalith.optim.loss_scale import checked_loss_scale_state
from megalith.optim.optimizer_param_scheduler import checked_scheduler_state
from megalith.storage import MOST_COUNTED, JsonFields, Store
from megalith.topology.agreement import agreed

__all__ = [
    "STATE_VERSION",
    "SavedState",
    "TrainState",
    "checked_state",
    "read_saved_state",
    "read_train_state",
    "upgraded",
]

State = dict[str, Any]


def _without_consumed_tokens(state: State) -> State:
    """Tokens follow from the samples; the counter had left out those without a loss."""
    train = state.get("train")
    if not isinstance(train, Mapping):
        return state  # the check of the fields says so
    return {**state, "train": {name: value for name, value in train.items() if name != "consumed_tokens"}}


def _with_nothing_known_of_data(state: State) -> State:
    """Neither data nor settings were stored: null, which nothing is compared with."""
    return {**state, "data": None, "settings": None, "layout": None}


# from version n to n + 1; the first version wrote no number
_UPGRADES: Mapping[int, Callable[[State], State]] = MappingProxyType(
    {1: _without_consumed_tokens, 2: _with_nothing_known_of_data}
)
STATE_VERSION = max(_UPGRADES) + 1


@dataclass
class TrainState:
    """Counters that only grow. ``consumed_samples`` is the position in the data: the next sample's number."""

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0

    def state_dict(self) -> dict[str, int]:
        """The counters, by name."""
        return asdict(self)

    @classmethod
    def read(cls, fields: JsonFields) -> "TrainState":
        """The counters of ``state_dict()``. Raises CheckpointError if there are others, or they contradict each other.

        A step consumes a sample at least, and is skipped at most once.
        """
        fields.only("step", "consumed_samples", "skipped_steps")
        step = fields.count("step")
        return cls(
            step,
            consumed_samples=fields.count("consumed_samples", at_least=step),
            skipped_steps=fields.count("skipped_steps", at_most=step),
        )


@dataclass(frozen=True)
class SavedState:
    """A state whose every field has been checked.

    Attributes:
        train: the counters.
        scheduler, loss_scale: what theirs load; ``loss_scale`` is None for a run without.
        seed: of weights, data order and dropout.
        data: what ``Task.data_identity`` said; None: an earlier version wrote the state, and did not say.
        settings: the tree of all settings; None likewise.
        layout: as ``tp2 dp1``; None likewise.
    """

    train: TrainState
    scheduler: Mapping[str, Any]
    loss_scale: Mapping[str, Any] | None
    seed: int
    data: Mapping[str, Any] | None
    settings: Mapping[str, Any] | None
    layout: str | None


def read_saved_state(checkpoint: Store) -> SavedState:
    """The state of ``checkpoint``, of this or an earlier version, with every field checked; all ranks call it.

    Raises:
        CheckpointError: on every rank; it names the file, the field, what is wanted and what is there, or says that a
            later version wrote it.
    """
    content = read_state(checkpoint)
    with agreed(f"{checkpoint / STATE}"):
        return checked_state(content)


def read_train_state(checkpoint: Store) -> TrainState:
    """The counters of ``checkpoint`` alone, for who wants no more of its state. As ``read_saved_state``."""
    content = read_state(checkpoint)
    with agreed(f"{checkpoint / STATE}"):
        return TrainState.read(JsonFields(upgraded(content)).object("train"))


def checked_state(state: State) -> SavedState:
    """``read_saved_state`` of what the file holds. Raises CheckpointError."""
    fields = JsonFields(upgraded(state))
    train = TrainState.read(fields.object("train"))
    scheduler, rng = fields.object("scheduler"), fields.object("rng")
    scheduler.count("num_steps", at_most=train.step)
    rng.count("step")
    return SavedState(
        train,
        scheduler=checked_scheduler_state(scheduler),
        loss_scale=None if fields.is_null("loss_scale") else _loss_scale(fields.object("loss_scale"), train.step),
        seed=rng.count("seed", at_most=2**63 - 1),
        data=None if fields.is_null("data") else _identity(fields.object("data"), train.consumed_samples),
        settings=None if fields.is_null("settings") else fields.object("settings").values,
        layout=None if fields.is_null("layout") else fields.text("layout"),
    )


def upgraded(
    state: State, *, upgrades: Mapping[int, Callable[[State], State]] = _UPGRADES, wanted: int = STATE_VERSION
) -> State:
    """``state`` as this version writes it.

    Raises:
        CheckpointError: a later version wrote it.
    """
    version = JsonFields({"version": 1, **state}).count("version", at_least=1)
    if version > wanted:
        raise CheckpointError(
            f"the checkpoint's state is of version {version} and this Megalith reads up to {wanted}; "
            "use the Megalith that wrote it, or a newer one"
        )
    for step in range(version, wanted):
        state = upgrades[step](state)
    return {**state, "version": wanted}


def _loss_scale(fields: JsonFields, steps: int) -> Mapping[str, Any]:
    """The loss scale's state after so many ``steps``: past its window, a count of clean ones would never be reset."""
    fields.count("clean_steps", at_most=steps)
    return checked_loss_scale_state(fields)


def _identity(fields: JsonFields, consumed_samples: int) -> Mapping[str, Any]:
    """The identity of the data in ``fields``, whose position in tokens must be that of the samples."""
    tokens_per_sample = fields.count("tokens_per_sample", at_least=1)
    tokens = fields.count("tokens", at_most=MOST_COUNTED * tokens_per_sample)
    if tokens != consumed_samples * tokens_per_sample:
        raise fields.wrong(
            "tokens", f"{consumed_samples * tokens_per_sample}, of {consumed_samples} samples of {tokens_per_sample}"
        )
    identity = fields.object("identity")
    for name, value in identity.values.items():
        if isinstance(value, Mapping | list):
            raise identity.wrong(name, "a plain value")
    return {"tokens_per_sample": tokens_per_sample, **identity.values}
