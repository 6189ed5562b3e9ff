"""Hands a dropout mask to operators: a 63-bit key in a tensor, the ids of tokens, and a site, but never the mask.

The mask is that of ``megalith.numerics.dropout``. Its key lies on the device, so that no operator waits for the host,
and that neither a new step nor a newly drawn key compiles anything again.
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
    """Operands of an operator, in its order, that decide what is dropped of rows [T, H]."""

    key: Tensor | None  # int64 []; None where nothing is dropped
    tokens: Tensor | None  # int64 [T], ids; None for the numbers of the rows
    site: int | Tensor  # int64 [T] where rows are cut into blocks
    p: float
    feature_offset: int = 0

    def at(self, tokens: Tensor | None, sites: Tensor | None) -> "Mask":
        """The mask of a block, by its part of what ``rows_of_mask`` gives."""
        return self._replace(tokens=tokens, site=0 if sites is None else sites)


def mask_operands(key: DropoutKey | None, x: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """What operators take of ``key`` for ``x`` [..., H]: the packed key, int64 [], token ids, int64 [T], and the site.

    Without a ``key`` one is drawn from torch's generator of the device of ``x``, on that device and without a wait for
    it. torch.manual_seed then repeats the mask, and so does checkpointing that preserves the generator's state. There
    are no token ids then: a token's id is the number of its row.

    Raises ShapeError unless there is one token id for each row of ``x``, on its device.
    """
    if key is None:
        return torch.randint(2**63 - 1, (), device=x.device), None, 0
    if key.tokens.shape != x.shape[:-1] or key.tokens.device != x.device:
        raise ShapeError(
            f"the key must have one token id for each row of x, {list(x.shape[:-1])} on {x.device}; "
            f"got {list(key.tokens.shape)} on {key.tokens.device}; give DropoutKey the ids of these rows"
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
    """``mask`` without what is of rows, and the id and the site of each row of ``x``, to be cut into blocks with them.

    The site too, so that what is compiled for one layer serves all. None for both where nothing is dropped.
    """
    if mask.key is None:
        return mask, None, None
    tokens = torch.arange(len(x), device=x.device) if mask.tokens is None else mask.tokens
    return mask._replace(tokens=None, site=0), tokens, torch.full_like(tokens, int(mask.site))


def _pack(seed: int, step: int, tokens: Tensor) -> Tensor:
    """Both words of the key in one int64 [] beside ``tokens``; filled, where a copy from the host would wait."""
    low, high = philox_key(seed, step)
    return torch.full((), low | high << 32, dtype=torch.int64, device=tokens.device)


def _packed(seed: int, step: int, tokens: Tensor) -> Tensor:
    return tokens.new_empty(())


# torch.compile cannot trace a hash; in an operator it takes seed and step as numbers, and compiles no step anew
_pack_traced = register_without_gradient("dropout_key", _pack, _packed, opaque=True)
