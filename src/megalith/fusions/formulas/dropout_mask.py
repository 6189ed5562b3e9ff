"""Hands a dropout mask to operators: a 64-bit key in a tensor, the ids of tokens, and a site, but never the mask.

The mask is that of ``megalith.numerics.dropout``. Its key lies on the device, so that no operator waits for the host,
and that neither a new step nor a newly drawn key compiles anything again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.fusions.paths.library import register_without_gradient
from megalith.numerics.dropout import DropoutKey, keep_mask_of, philox_key
from megalith.numerics.philox import low_and_high

__all__ = ["Mask", "ids_of_rows", "keep", "mask_operands"]


class Mask(NamedTuple):
    """Operands of an operator, in its order, that decide what is dropped of rows [T, H]."""

    key: Tensor | None  # int64 []; None where nothing is dropped
    tokens: Tensor | None  # int64 [T], ids; None for the numbers of the rows
    site: int
    p: float
    feature_offset: int = 0


def mask_operands(key: DropoutKey | None, x: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """What operators take of ``key`` for ``x`` [..., H]: the packed key, int64 [], token ids, int64 [T], and the site.

    Without a ``key`` one is drawn from torch's generator of the device of ``x``, on that device and without a wait for
    it. torch.manual_seed then repeats the mask, and so does checkpointing that preserves the generator's state. There
    are no token ids then: a token's id is the number of its row.

    Raises ShapeError unless there is one token id for each row of ``x``, on its device.
    """
    if key is None:
        return torch.randint(-(2**63), 2**63 - 1, (), device=x.device), None, 0
    if key.tokens.shape != x.shape[:-1] or key.tokens.device != x.device:
        raise ShapeError(
            f"the key must have one token id for each row of x, {list(x.shape[:-1])} on {x.device}; "
            f"got {list(key.tokens.shape)} on {key.tokens.device}; give DropoutKey the ids of these rows"
        )
    pack = _pack_traced if torch.compiler.is_compiling() else _pack
    return pack(key.seed, key.step, key.tokens), key.tokens.reshape(-1), key.site


def keep(
    key: Tensor, tokens: Tensor | None, site: int, p: float, num_rows: int, num_features: int, feature_offset: int
) -> Tensor:
    """The mask in plain torch, bool [num_rows, num_features], True with probability 1 - ``p``."""
    tokens = torch.arange(num_rows, device=key.device) if tokens is None else tokens
    return keep_mask_of(low_and_high(key), tokens, torch.full_like(tokens, site), p, num_features, feature_offset)


def ids_of_rows(mask: Mask, x: Tensor) -> Tensor | None:
    """One id for each row of ``x``, to be cut into blocks with them; None where nothing is dropped."""
    if mask.key is None or mask.tokens is not None:
        return mask.tokens
    return torch.arange(len(x), device=x.device)


def _pack(seed: int, step: int, tokens: Tensor) -> Tensor:
    """Both words of the key in one int64 [] beside ``tokens``; filled, where a copy from the host would wait."""
    low, high = philox_key(seed, step)
    unsigned = low | high << 32
    return torch.full((), unsigned - (unsigned >> 63 << 64), dtype=torch.int64, device=tokens.device)


def _packed(seed: int, step: int, tokens: Tensor) -> Tensor:
    return tokens.new_empty(())


# torch.compile cannot trace a hash; in an operator it takes seed and step as numbers, and compiles no step anew
_pack_traced = register_without_gradient("dropout_key", _pack, _packed, opaque=True)
