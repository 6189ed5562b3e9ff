"""Reads and writes the rotary position fields of config.json, for transformers 4 and transformers 5.

transformers 4 has ``rope_theta`` and ``rope_scaling``; transformers 5 has both in ``rope_parameters``, and still reads
the old fields. If sliding-window layers have a base of their own (Gemma 3), transformers 4 calls it
``rope_local_base_freq``, and transformers 5 has one object in ``rope_parameters`` for each layer type.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megalith.config import RopeConfig, RopeScalingConfig
from megalith.models.hf.fields import Fields

__all__ = ["read_rope", "read_rope_by_layer", "write_rope", "write_rope_by_layer"]

_LENGTH = "original_max_position_embeddings"
_WHOLE, _LOCAL = "full_attention", "sliding_attention"  # layer types: without a window, and with one


class _Keys(NamedTuple):
    """The keys of one ``rope_type`` in addition to its name; our scaling config has the same fields."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_TYPES: Mapping[str, _Keys] = MappingProxyType(
    {
        "default": _Keys(),
        "linear": _Keys(("factor",)),
        "llama3": _Keys(("factor", _LENGTH, "low_freq_factor", "high_freq_factor")),
        "yarn": _Keys(
            ("factor", _LENGTH),
            ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        ),
    }
)


def read_rope(fields: Fields, base: float = 10000.0) -> dict[str, Any]:
    """Returns the settings of ``model.rope``; records a violation for contradictory fields and unsupported variants.

    ``base`` is the default of the transformers class.
    """
    given = {name: fields.optional(name, dict) or {} for name in ("rope_scaling", "rope_parameters")}
    return _read(fields, "rope_theta", given, base)


def read_rope_by_layer(fields: Fields, base: float, local_base: float) -> dict[str, Any]:
    """Like ``read_rope``, for rotary positions by layer type; the bases are the defaults of the transformers class."""
    by_layer = fields.optional("rope_parameters", dict) or {}
    if by_layer.keys() - {_WHOLE, _LOCAL} or not all(isinstance(one, dict | None) for one in by_layer.values()):
        fields.refuse(f"rope_parameters must have an object for {_WHOLE} and one for {_LOCAL}; got {by_layer!r:.80}")
        by_layer = {}
    of_whole = {
        "rope_scaling": fields.optional("rope_scaling", dict) or {},
        f"rope_parameters.{_WHOLE}": by_layer.get(_WHOLE) or {},
    }
    of_local = {f"rope_parameters.{_LOCAL}": by_layer.get(_LOCAL) or {}}
    local = _read(fields, "rope_local_base_freq", of_local, local_base)
    if local["scaling"] is not None:
        fields.refuse(f"rope_parameters.{_LOCAL} must have rope_type 'default'; got {local['scaling']['type']!r}")
    return {**_read(fields, "rope_theta", of_whole, base), "local_base": local["base"]}


def write_rope(rope: RopeConfig, max_position_embeddings: int) -> dict[str, Any]:
    """Returns the fields for ``rope``, for a model trained on rows of ``max_position_embeddings`` tokens."""
    fields: dict[str, Any] = {"max_position_embeddings": max_position_embeddings, "rope_theta": rope.base}
    if rope.scaling is None:
        return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": rope.base}}
    scaling = _write_scaling(rope.scaling)
    if (length := rope.scaling.original_max_position_embeddings) is not None:
        # transformers warns if yarn's length ratio is not its factor, or if llama3's length is not above the original
        reached = round(rope.scaling.factor * length)
        longest = reached if rope.scaling.type == "yarn" else max(reached, max_position_embeddings)
        fields["max_position_embeddings"] = longest
    return {**fields, "rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": rope.base}}


def write_rope_by_layer(rope: RopeConfig, max_position_embeddings: int) -> dict[str, Any]:
    """Like ``write_rope``, by layer type."""
    whole = write_rope(rope, max_position_embeddings)
    local = rope.base if rope.local_base is None else rope.local_base
    of_local = {"rope_type": "default", "rope_theta": local}
    by_layer = {_WHOLE: whole["rope_parameters"], _LOCAL: of_local}
    return {**whole, "rope_local_base_freq": local, "rope_parameters": by_layer}


def _read(fields: Fields, base_field: str, given: Mapping[str, dict[str, Any]], default: float) -> dict[str, Any]:
    """Returns ``base`` and ``scaling`` from ``base_field`` and the ``given`` objects by name, which must agree."""
    bases: dict[str, float] = {}
    scalings: dict[str, dict[str, Any]] = {}
    if (base := fields.optional(base_field, float)) is not None:
        bases[base_field] = base
    longest = fields.optional("max_position_embeddings", int)  # not a limit: rotary positions have no table
    for name, one in given.items():
        rope = {key: value for key, value in one.items() if value is not None}
        base = rope.pop("rope_theta", None)
        if isinstance(base, int | float):
            bases[f"{name}.rope_theta"] = base
        elif base is not None:
            fields.refuse(f"{name}.rope_theta must be a number; got {base!r:.80}")
        if rope:
            scalings[name] = _read_scaling(fields, name, rope, longest)
    if len(set(bases.values())) > 1:
        fields.refuse(f"the rotary bases (rope_theta) differ: {bases}; delete the wrong one")
    first, *others = scalings.values() or [{}]
    if others not in ([], [first]):
        fields.refuse(f"rope_scaling and rope_parameters must agree; got {scalings}; delete the wrong one")
    base = next(iter(bases.values()), default)
    if abs(base) >= 2**63:
        fields.refuse(f"{base_field} must be below 2^63")
        base = default
    return {"base": float(base), "scaling": first or None}


def _read_scaling(fields: Fields, name: str, rope: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Returns the settings of ``model.rope.scaling``; empty for a ``rope_type`` of "default"."""
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    keys = _TYPES.get(kind) if isinstance(kind, str) else None
    if keys is None:
        fields.refuse(f"{name}.rope_type must be one of {', '.join(_TYPES)}; got {kind!r:.80}")
        return {}
    if _LENGTH in keys.required and longest is not None:
        rope.setdefault(_LENGTH, longest)
    missing = [key for key in keys.required if key not in rope]
    unknown = sorted(rope.keys() - {*keys.required, *keys.optional})
    if missing:
        fields.refuse(f"{name} with rope_type {kind!r} lacks required fields: {', '.join(missing)}")
    if unknown:
        fields.refuse(f"{name} with rope_type {kind!r} has fields that Megalith does not know: {', '.join(unknown)}")
    if missing or unknown or kind == "default":
        return {}
    if "attention_factor" in rope or not (rope.get("mscale") and rope.get("mscale_all_dim")):
        # transformers uses the two only together, and not at all if there is an attention_factor
        rope = {key: value for key, value in rope.items() if key not in ("mscale", "mscale_all_dim")}
    return {"type": kind, **rope}


def _write_scaling(scaling: RopeScalingConfig) -> dict[str, Any]:
    keys = _TYPES[scaling.type]
    found = {"rope_type": scaling.type, **{key: getattr(scaling, key) for key in keys.required}}
    for key in keys.optional:
        if (value := getattr(scaling, key)) != RopeScalingConfig.model_fields[key].default:
            found[key] = value
    return found
