"""Learning rate and weight decay as functions of n, the steps taken so far, and a scheduler that applies them.

With warm-up W, decay end D, peak M, minimum m, start I, and x = (n - W) / (D - W):

    n <= W, W > 0        I + (M - I) n / W
    constant             M
    n > D                m
    linear               m + (M - m) (1 - x)
    cosine               m + (M - m) (1 + cos(pi x)) / 2            Loshchilov and Hutter 2016, arXiv:1608.03983
    inverse-square-root  max(m, M sqrt(max(W, 1) / max(n, 1)))      Vaswani et al. 2017, arXiv:1706.03762
    WSD, n <= D - A      M                                          Hu et al. 2024, arXiv:2404.06395
    WSD, after that      m + (M - m) k(y), y = (n - (D - A)) / A, where k(y) is 1 - y (linear),
                         (1 + cos(pi y)) / 2 (cosine), 2 * 0.5^y - 1 (exponential) or 1 - sqrt(y) (minus_sqrt)

Weight decay goes from s to e over S steps with u = n / S: s + u (e - s) (linear) or s + (e - s) (1 - cos(pi u)) / 2
(cosine), and stays at e. Names, formulas and state are Megatron's; all values are checked at construction.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

from megalith.config import OptimConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.storage import JsonFields

__all__ = [
    "LearningRateSchedule",
    "OptimizerParamScheduler",
    "WeightDecaySchedule",
    "checked_scheduler_state",
    "lr",
    "weight_decay",
]

log = logging.getLogger(__name__)

_WSD_DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda y: 1.0 - y,
        "cosine": lambda y: 0.5 * (1.0 + math.cos(math.pi * y)),
        "exponential": lambda y: 2.0 * 0.5**y - 1.0,
        "minus_sqrt": lambda y: 1.0 - math.sqrt(y),
    }
)
_LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_WD_STYLES = ("constant", "linear", "cosine")

# the fields of a state except its position, by type, and those that may be null
_RATES = ("init_lr", "max_lr", "min_lr", "start_wd", "end_wd")
_LENGTHS = ("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps", "wd_incr_steps")  # may be fractions in Megatron's
_TEXTS = ("unit", "lr_decay_style", "lr_wsd_decay_style", "wd_incr_style")
_NULLABLE = ("lr_decay_steps", "wsd_decay_steps", "lr_wsd_decay_style")

# names of state entries in older Megatron checkpoints
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "start_lr": "max_lr",
        "warmup_iter": "lr_warmup_steps",
        "warmup_steps": "lr_warmup_steps",
        "end_iter": "lr_decay_steps",
        "decay_steps": "lr_decay_steps",
        "decay_style": "lr_decay_style",
        "num_iters": "num_steps",
    }
)


@dataclass(frozen=True)
class LearningRateSchedule:
    """The constants of a learning rate schedule. Raises ConfigError at construction, listing everything that is wrong.

    ``decay_steps`` may be None for constant and inverse-square-root, which then never end. With ``decay_steps``, an
    inverse-square-root schedule drops to ``min_lr`` after them, as Megatron's does.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int | None = None
    style: str = "constant"
    wsd_decay_steps: int | None = None
    wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        end = math.inf if self.decay_steps is None else self.decay_steps
        room = end - self.warmup_steps
        problems = []
        if self.style not in _LR_STYLES:
            problems.append(f"lr_decay_style must be one of {', '.join(_LR_STYLES)}; got {self.style!r}")
        if not 0.0 <= self.min_lr <= self.max_lr < math.inf:
            problems.append(f"min_lr ({self.min_lr}) must be from 0 to max_lr ({self.max_lr}), which must be finite")
        if not 0.0 <= self.init_lr <= self.max_lr:
            problems.append(f"init_lr ({self.init_lr}) must be from 0 to max_lr ({self.max_lr})")
        if not 0 <= self.warmup_steps < end:
            problems.append(
                f"lr_warmup_steps ({self.warmup_steps}) must be at least 0 and below lr_decay_steps ({end})"
            )
        if self.decay_steps is None and self.style in ("linear", "cosine", "WSD"):
            problems.append(f"lr_decay_steps must be set with lr_decay_style={self.style!r}, which ends there")
        if self.style == "WSD":
            if self.wsd_decay_style not in _WSD_DECAYS:
                names = ", ".join(_WSD_DECAYS)
                problems.append(f"lr_wsd_decay_style must be one of {names}; got {self.wsd_decay_style!r}")
            if not 1 <= (self.wsd_decay_steps or 0) <= room:
                problems.append(
                    f"wsd_decay_steps must be from 1 to {room}, between warm-up and lr_decay_steps; "
                    f"got {self.wsd_decay_steps}"
                )
        _refuse(problems)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """The constants of a weight decay schedule, which may rise or fall. Raises ConfigError at construction."""

    start_wd: float
    end_wd: float
    style: str = "constant"
    steps: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.style not in _WD_STYLES:
            problems.append(f"wd_incr_style must be one of {', '.join(_WD_STYLES)}; got {self.style!r}")
        if not (0.0 <= self.start_wd < math.inf and 0.0 <= self.end_wd < math.inf):
            problems.append(f"start_wd ({self.start_wd}) and end_wd ({self.end_wd}) must be at least 0 and finite")
        if self.style == "constant" and self.start_wd != self.end_wd:
            problems.append(
                f"start_wd ({self.start_wd}) and end_wd ({self.end_wd}) must be equal with wd_incr_style='constant'; "
                "use 'linear' or 'cosine' for a ramp"
            )
        if self.style != "constant" and self.steps < 1:
            problems.append(f"wd_incr_steps must be at least 1 with wd_incr_style={self.style!r}; got {self.steps}")
        _refuse(problems)


def lr(n: int, schedule: LearningRateSchedule) -> float:
    """Returns the learning rate after ``n`` steps."""
    warmup, end, highest, lowest = schedule.warmup_steps, schedule.decay_steps, schedule.max_lr, schedule.min_lr
    if warmup > 0 and n <= warmup:
        return schedule.init_lr + (highest - schedule.init_lr) * n / warmup
    if schedule.style == "constant":
        return highest
    if end is not None and n > end:
        return lowest
    if schedule.style == "inverse-square-root":
        return max(lowest, highest * math.sqrt(max(warmup, 1) / max(n, 1)))
    assert end is not None, f"{schedule} has no end"
    if schedule.style == "WSD":
        assert schedule.wsd_decay_steps is not None, f"{schedule} has no decay"
        y = (n - (end - schedule.wsd_decay_steps)) / schedule.wsd_decay_steps
        share = 1.0 if y <= 0 else _WSD_DECAYS[schedule.wsd_decay_style or ""](y)
    else:
        x = (n - warmup) / (end - warmup)
        share = 1.0 - x if schedule.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))
    return lowest + (highest - lowest) * share


def weight_decay(n: int, schedule: WeightDecaySchedule) -> float:
    """Returns the weight decay after ``n`` steps."""
    if schedule.style == "constant" or n > schedule.steps:
        return schedule.end_wd
    u = n / schedule.steps
    share = u if schedule.style == "linear" else 0.5 * (1.0 - math.cos(math.pi * u))
    return schedule.start_wd + (schedule.end_wd - schedule.start_wd) * share


class HasParamGroups(Protocol):
    """What a scheduler needs from an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class OptimizerParamScheduler:
    """Writes ``lr`` and ``weight_decay`` into every parameter group of ``optimizer``, at construction and at each step.

    A group may have its own ``max_lr``, ``min_lr``, ``start_wd``, ``end_wd`` and ``wd_mult`` (a factor, 1 by default).
    ``init_lr`` is scaled with the group's ``max_lr``, so that the rate never falls during warm-up. A learning rate that
    is a tensor is filled in place.

    Args:
        optimizer: anything with ``param_groups``, a list of dicts.
        wd_incr_steps: number of steps over which weight decay goes from ``start_wd`` to ``end_wd``.
        use_checkpoint_opt_param_scheduler: a loaded state replaces the constants given here.
        override_opt_param_scheduler: the constants given here are kept, and only the position is loaded. With neither
            option, a loaded state must have the same constants.
        wsd_decay_steps: length of WSD's decay, which ends at ``lr_decay_steps``.
        unit: what all lengths here and the increments of ``step`` count; loading a state with another unit is an error.

    Raises:
        ConfigError: the constants are inconsistent, including those of a single group, or both options are set.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int | None,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        unit: Literal["steps", "samples", "tokens"] = "steps",
    ) -> None:
        if use_checkpoint_opt_param_scheduler and override_opt_param_scheduler:
            raise ConfigError(
                "use_checkpoint_opt_param_scheduler and override_opt_param_scheduler are mutually exclusive; set one"
            )
        self.optimizer = optimizer
        self.num_steps = 0
        self.unit = unit
        self._use_checkpoint = use_checkpoint_opt_param_scheduler
        self._override = override_opt_param_scheduler
        self.lr_schedule = LearningRateSchedule(
            max_lr,
            min_lr,
            init_lr,
            lr_warmup_steps,
            lr_decay_steps,
            lr_decay_style,
            wsd_decay_steps,
            lr_wsd_decay_style,
        )
        self.wd_schedule = WeightDecaySchedule(start_wd, end_wd, wd_incr_style, wd_incr_steps)
        self.step(0)

    @classmethod
    def from_config(cls, optimizer: HasParamGroups, config: OptimConfig, steps: int) -> Self:
        """Returns the scheduler for a run of ``steps`` steps; on resuming, the run's settings take precedence."""
        ramp, wsd = config.weight_decay_ramp, config.wsd
        return cls(
            optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=config.decay_steps,
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay if ramp is None else ramp.end,
            wd_incr_steps=0 if ramp is None else steps,
            wd_incr_style="constant" if ramp is None else ramp.schedule,
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
            wsd_decay_steps=None if wsd is None else wsd.decay_steps,
            lr_wsd_decay_style=None if wsd is None else wsd.decay_style,
        )

    @property
    def lr(self) -> float:
        """The learning rate of groups without their own, defined even if this rank has no such group."""
        return lr(self.num_steps, self.lr_schedule)

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Returns the current learning rate of ``param_group``."""
        highest = _own(param_group, "max_lr", self.lr_schedule.max_lr)
        lowest = _own(param_group, "min_lr", self.lr_schedule.min_lr)
        first = self.lr_schedule.init_lr and self.lr_schedule.init_lr * (highest / self.lr_schedule.max_lr)
        return lr(self.num_steps, replace(self.lr_schedule, max_lr=highest, min_lr=lowest, init_lr=first))

    def get_wd(self, param_group: Mapping[str, Any]) -> float:
        """Returns the current weight decay of ``param_group``."""
        start = _own(param_group, "start_wd", self.wd_schedule.start_wd)
        end = _own(param_group, "end_wd", self.wd_schedule.end_wd)
        factor = _own(param_group, "wd_mult", 1.0)
        return weight_decay(self.num_steps, replace(self.wd_schedule, start_wd=start, end_wd=end)) * factor

    def step(self, increment: int) -> None:
        """Advances by ``increment`` units and writes the new rates."""
        if increment < 0:
            raise ConfigError(f"increment must be at least 0; got {increment}")
        self.num_steps += increment
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and all constants, as plain values."""
        rate, decay = self.lr_schedule, self.wd_schedule
        return {
            "num_steps": self.num_steps,
            "unit": self.unit,
            "init_lr": rate.init_lr,
            "max_lr": rate.max_lr,
            "min_lr": rate.min_lr,
            "lr_warmup_steps": rate.warmup_steps,
            "lr_decay_steps": rate.decay_steps,
            "lr_decay_style": rate.style,
            "wsd_decay_steps": rate.wsd_decay_steps,
            "lr_wsd_decay_style": rate.wsd_decay_style,
            "start_wd": decay.start_wd,
            "end_wd": decay.end_wd,
            "wd_incr_steps": decay.steps,
            "wd_incr_style": decay.style,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the position of ``state``, and its constants by the policy set at construction; writes both rates.

        Entries missing from ``state`` keep their values; Megatron's states, old and new, can be loaded.

        Raises:
            CheckpointError: the state has no position, a field of another type, or counts in another unit.
            ConfigError: the constants differ and no policy decides between them, or they are inconsistent.
        """
        ours = self.state_dict()
        loaded = checked_scheduler_state(JsonFields(state, "scheduler"))
        if loaded.get("unit", self.unit) != self.unit:
            raise CheckpointError(f"this scheduler counts {self.unit}, but the loaded state counts {loaded['unit']}")
        constants = ours.keys() - {"num_steps", "unit"}
        changed = sorted(name for name in constants & loaded.keys() if loaded[name] != ours[name])
        listed = ", ".join(f"{name} {ours[name]} (loaded: {loaded[name]})" for name in changed)
        if changed and not self._use_checkpoint and not self._override:
            raise ConfigError(
                f"the loaded state has different constants: {listed}; use the same ones, "
                "or set use_checkpoint_opt_param_scheduler or override_opt_param_scheduler"
            )
        if changed and self._override:
            # debug only: the run reports changed settings itself, by their own names
            log.debug("the schedule continues with changed constants: %s", listed)
        if self._use_checkpoint:
            self._set_constants(ours | {name: loaded[name] for name in changed})
        self.num_steps = loaded["num_steps"]
        self._write()

    def _set_constants(self, state: Mapping[str, Any]) -> None:
        rate = LearningRateSchedule(
            max_lr=state["max_lr"],
            min_lr=state["min_lr"],
            init_lr=state["init_lr"],
            warmup_steps=state["lr_warmup_steps"],
            decay_steps=state["lr_decay_steps"],
            style=state["lr_decay_style"],
            wsd_decay_steps=state["wsd_decay_steps"],
            wsd_decay_style=state["lr_wsd_decay_style"],
        )
        self.wd_schedule = WeightDecaySchedule(
            state["start_wd"], state["end_wd"], state["wd_incr_style"], state["wd_incr_steps"]
        )
        self.lr_schedule = rate

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        rates = [(self.get_lr(group), self.get_wd(group)) for group in groups]  # compute all before writing the first
        for group, (rate, decay) in zip(groups, rates, strict=True):
            if hasattr(group.get("lr"), "fill_"):  # a tensor that a CUDA graph has captured
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            group["weight_decay"] = decay


def checked_scheduler_state(state: JsonFields) -> dict[str, Any]:
    """Returns ``state`` under current names, type-checked. Raises CheckpointError naming the first bad field."""
    given = JsonFields({_ALIASES.get(name, name): value for name, value in state.values.items()}, state.name)
    given.count("num_steps")
    for names, check in ((_RATES + _LENGTHS, given.number), (_TEXTS, given.text)):
        for name in names:
            if name in given.values and not (name in _NULLABLE and given.is_null(name)):
                check(name)
    return dict(given.values)


def _own(param_group: Mapping[str, Any], name: str, default: float) -> float:
    value = param_group.get(name)
    return default if value is None else float(value)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))
