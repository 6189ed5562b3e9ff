"""Passes a dropout mask to operators as a 63-bit key in a tensor, token ids and a site, never as the mask itself.

The mask is that of ``megalith.numerics.dropout``. The key is a tensor on the device, so operators never wait for the
host, and neither a new step nor a newly drawn key triggers recompilation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions.core.registration import register_without_gradient
from megalith.numerics.dropout import DropoutKey, keep_mask_of, philox_key
from megalith.numerics.philox import low_and_high

__all__ = ["Mask", "keep", "mask_operands", "rows_of_mask"]


class Mask(NamedTuple):
    """Consecutive operands of an operator that determine what is dropped from rows [T, H]."""

    key: Tensor | None  # int64 []; None if nothing is dropped
    tokens: Tensor | None  # int64 [T], ids; None for row numbers
    site: int | Tensor  # int64 [T] if rows are split into blocks
    p: float
    feature_offset: int = 0

    def at(self, tokens: Tensor | None, sites: Tensor | None) -> "Mask":
        """The mask of a block, given that block's slices of what ``rows_of_mask`` returns."""
        return self._replace(tokens=tokens, site=0 if sites is None else sites)


def mask_operands(key: DropoutKey | None, x: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """The operands for ``key`` and ``x`` [..., H]: the packed key, int64 [], token ids, int64 [T], and the site.

    Without ``key``, one is drawn from torch's generator for the device of ``x``, on that device and without a host
    sync. torch.manual_seed then reproduces the mask, and so does checkpointing that preserves the generator's state.
    The token ids are then None, and row numbers take their place.

    Raises ShapeError unless there is one token id for each row of ``x``, on its device.
    """
    if key is None:
        return torch.randint(2**63 - 1, (), device=x.device), None, 0
    if key.tokens.shape != x.shape[:-1] or key.tokens.device != x.device:
        raise ShapeError(
            f"the key must have one token id for each row of x, {list(x.shape[:-1])} on {x.device}; "
            f"got {list(key.tokens.shape)} on {key.tokens.device}; pass the ids of these rows to DropoutKey"
        )
    pack = _pack_traced if torch.compiler.is_compiling() else _pack
    return pack(key.seed, key.step, key.tokens), key.tokens.reshape(-1), key.site


def keep(
    key: Tensor,
    tokens: Tensor | None,
    site: int | Tensor,
    p: float,
    num_rows: int,
    num_features: int,
    feature_offset: int,
) -> Tensor:
    """The mask in plain torch, bool [num_rows, num_features], True with probability 1 - ``p``."""
    tokens = torch.arange(num_rows, device=key.device) if tokens is None else tokens
    sites = site if isinstance(site, Tensor) else torch.full_like(tokens, site)
    return keep_mask_of(low_and_high(key), tokens, sites, p, num_features, feature_offset)


def rows_of_mask(mask: Mask, x: Tensor) -> tuple[Mask, Tensor | None, Tensor | None]:
    """Returns ``mask`` without its per-row operands, and the token id and site of each row of ``x``.

    Callers split these along with the rows. The site is given per row so that code compiled for one layer serves all.
    Both are None if nothing is dropped.
    """
    if mask.key is None:
        return mask, None, None
    tokens = torch.arange(len(x), device=x.device) if mask.tokens is None else mask.tokens
    return mask._replace(tokens=None, site=0), tokens, torch.full_like(tokens, int(mask.site))


def _pack(seed: int, step: int, tokens: Tensor) -> Tensor:
    """Packs both words of the key into an int64 [] on the device of ``tokens``; a copy from the host would wait."""
    low, high = philox_key(seed, step)
    return torch.full((), low | high << 32, dtype=torch.int64, device=tokens.device)


def _packed(seed: int, step: int, tokens: Tensor) -> Tensor:
    return tokens.new_empty(())


# torch.compile cannot trace the hash; as an operator it takes seed and step as numbers, and no step is recompiled
_pack_traced = register_without_gradient("dropout_key", _pack, _packed, opaque=True)
