"""Settings that were renamed; files and command lines with the names of earlier versions are still accepted."""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from megalith.config.dotted import look_up, parent, put_, take_out_

__all__ = ["MOVED", "log_moved", "means_not_set", "rename_"]

log = logging.getLogger(__name__)

# old name -> new name
MOVED: Mapping[str, str] = MappingProxyType(
    {
        "model.rotary_base": "model.rope.base",
        "train.eval_every": "train.evaluation.every",
        "train.eval_samples": "train.evaluation.samples",
        "optim.betas": "optim.adamw.betas",
        "optim.eps": "optim.adamw.eps",
        "optim.weight_decay_schedule": "optim.weight_decay_ramp.schedule",
        "optim.end_weight_decay": "optim.weight_decay_ramp.end",
        "optim.wsd_decay_steps": "optim.wsd.decay_steps",
        "optim.wsd_decay_style": "optim.wsd.decay_style",
        "precision.initial_loss_scale": "precision.loss_scale.initial",
        "precision.loss_scale_window": "precision.loss_scale.window",
        "precision.hysteresis": "precision.loss_scale.hysteresis",
        "precision.min_loss_scale": "precision.loss_scale.minimum",
    }
)
# old name -> its value that is now expressed by leaving the group out
_NOT_SET: Mapping[str, str] = MappingProxyType({"optim.weight_decay_schedule": "constant"})


def means_not_set(name: str, value: Any) -> bool:
    """Whether ``value``, given for the old name ``name``, means that the setting is not set."""
    return value is None or value == _NOT_SET.get(name)


def rename_(tree: dict[str, Any]) -> None:
    """Replaces old names in a plain tree by the new ones, and logs a line if there were any.

    An old name given together with its new one stays, and is reported as an unknown setting.
    """
    renamed = []
    for old, new in MOVED.items():
        group, _, leaf = old.rpartition(".")
        place = look_up(tree, group)
        if not isinstance(place, Mapping) or leaf not in place:
            continue
        value = place[leaf]
        if not means_not_set(old, value):
            if look_up(tree, new) is not None or not isinstance(look_up(tree, parent(new)), Mapping | None):
                continue
            put_(tree, new, value)
            renamed.append(old)
        take_out_(tree, old)
    log_moved(renamed)


def log_moved(names: Iterable[str]) -> None:
    """Logs one line that names the new spelling of the old ``names``, if there are any."""
    if moves := [f"{name} is now {MOVED[name]}" for name in names]:
        log.warning("settings have moved: %s", ", ".join(moves))
