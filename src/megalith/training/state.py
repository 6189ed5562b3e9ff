"""The non-tensor part of a checkpoint (``state.json``): progress, data identity and settings.

A state written by an earlier version is upgraded step by step with the table of upgrades: adding or removing a field
means adding an entry there, so that old checkpoints stay readable.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from megalith.checkpoint.load import read_state
from megalith.checkpoint.save import STATE
from megalith.data.class_names import class_names
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
    "read_class_names",
    "read_saved_state",
    "read_train_state",
    "upgraded",
]

State = dict[str, Any]


def _without_consumed_tokens(state: State) -> State:
    """Drops a counter that left out tokens without a loss; the number of tokens follows from the samples."""
    train = state.get("train")
    if not isinstance(train, Mapping):
        return state  # reported when the fields are checked
    return {**state, "train": {name: value for name, value in train.items() if name != "consumed_tokens"}}


def _with_nothing_known_of_data(state: State) -> State:
    """Adds null for data and settings, which were not stored; null is not compared with anything."""
    return {**state, "data": None, "settings": None, "layout": None}


# from version n to n + 1; the first version wrote no version number
_UPGRADES: Mapping[int, Callable[[State], State]] = MappingProxyType(
    {1: _without_consumed_tokens, 2: _with_nothing_known_of_data}
)
STATE_VERSION = max(_UPGRADES) + 1


@dataclass
class TrainState:
    """Counters that only grow. ``consumed_samples`` is the position in the data: the index of the next sample."""

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0

    def state_dict(self) -> dict[str, int]:
        """The counters, by name."""
        return asdict(self)

    @classmethod
    def read(cls, fields: JsonFields) -> "TrainState":
        """Reads the counters of ``state_dict()``. Raises CheckpointError for other counters, or contradictory ones.

        A step consumes at least one sample, and is skipped at most once.
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
    """A state whose fields have all been checked.

    Attributes:
        train: the counters.
        scheduler, loss_scale: arguments for their ``load_state_dict``; ``loss_scale`` is None for a run without one.
        seed: of weights, data order and dropout.
        data: the result of ``Task.data_identity``; None if an earlier version wrote the state without it.
        settings: the tree of all settings; None likewise.
        layout: such as ``tp2 dp1``; None likewise.
    """

    train: TrainState
    scheduler: Mapping[str, Any]
    loss_scale: Mapping[str, Any] | None
    seed: int
    data: Mapping[str, Any] | None
    settings: Mapping[str, Any] | None
    layout: str | None


def read_saved_state(checkpoint: Store) -> SavedState:
    """Reads the state of ``checkpoint``, written by this or an earlier version, and checks every field. Collective.

    Raises:
        CheckpointError: on every rank; names the file, the field, the expected and the actual value, or says that a
            later version wrote the state.
    """
    content = read_state(checkpoint)
    with agreed(f"{checkpoint / STATE}"):
        return checked_state(content)


def read_train_state(checkpoint: Store) -> TrainState:
    """Reads only the counters of ``checkpoint``. Otherwise like ``read_saved_state``."""
    content = read_state(checkpoint)
    with agreed(f"{checkpoint / STATE}"):
        return TrainState.read(JsonFields(upgraded(content)).object("train"))


def read_class_names(checkpoint: Store) -> tuple[str, ...]:
    """Returns the names of the classes that the model was trained on; empty if unknown. As ``read_saved_state``."""
    content = read_state(checkpoint)
    with agreed(f"{checkpoint / STATE}"):
        fields = JsonFields({"data": None, **upgraded(content)})  # a new run at step 0 may have no data
        return () if fields.is_null("data") else class_names(fields.object("data").object("identity").values)


def checked_state(state: State) -> SavedState:
    """Implements ``read_saved_state`` for the file's content. Raises CheckpointError."""
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
    """Returns ``state`` as this version writes it.

    Raises:
        CheckpointError: a later version wrote it.
    """
    version = JsonFields({"version": 1, **state}).count("version", at_least=1)
    if version > wanted:
        raise CheckpointError(
            f"the checkpoint's state is of version {version}, but this version of Megalith only reads up to {wanted}; "
            "use the version that wrote it, or a newer one"
        )
    for step in range(version, wanted):
        state = upgrades[step](state)
    return {**state, "version": wanted}


def _loss_scale(fields: JsonFields, steps: int) -> Mapping[str, Any]:
    """Reads the loss scale's state; rejects more clean steps than ``steps``: a count past the window never resets."""
    fields.count("clean_steps", at_most=steps)
    return checked_loss_scale_state(fields)


def _identity(fields: JsonFields, consumed_samples: int) -> Mapping[str, Any]:
    """Returns the identity of the data in ``fields``, whose position in tokens must match that in samples."""
    tokens_per_sample = fields.count("tokens_per_sample", at_least=1)
    tokens = fields.count("tokens", at_most=MOST_COUNTED * tokens_per_sample)
    if tokens != consumed_samples * tokens_per_sample:
        raise fields.wrong(
            "tokens",
            f"{consumed_samples * tokens_per_sample} ({consumed_samples} samples of {tokens_per_sample} tokens)",
        )
    identity = fields.object("identity")
    for name, value in identity.values.items():
        if isinstance(value, Mapping | list):
            raise identity.wrong(name, "a plain value")
    return {"tokens_per_sample": tokens_per_sample, **identity.values}
