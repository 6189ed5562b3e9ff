"""dropout: a module draws by its name, a stage draws what the whole model would, and a rank knows its tokens."""

import copy

import pytest
import torch
from torch import nn

from megalith.errors import ConfigError
from megalith.numerics.dropout import DropoutKey, keep_mask, name_number
from megalith.transformer.dropout import DropoutSite, name_dropout_sites_, sequence_parallel_key
from tests.parallel.groups import collection
from tests.rank_pool import ranks

S = 8


def key(seed: int = 1) -> DropoutKey:
    return DropoutKey(seed, 3, torch.arange(100), site=2)


def model(*names: str) -> nn.Module:
    """Modules with these names, each with a dropout of 0.5."""
    return nn.ModuleDict({name: nn.ModuleDict({"drop": DropoutSite(0.5)}) for name in names})


def mask_of(module: nn.Module, name: str, seed: int = 1) -> torch.Tensor:
    dropout = module.get_submodule(name).of(key(seed))
    assert dropout is not None
    return keep_mask(dropout.key, dropout.p, 100)


def test_without_a_key_or_a_share_nothing_is_dropped():
    assert DropoutSite(0.5).of(None) is None
    assert DropoutSite(0.0).of(key()) is None


def test_a_site_gives_its_share_and_the_key_of_its_name():
    named = model("a")
    name_dropout_sites_(named)
    dropout = named["a"]["drop"].of(key())
    assert dropout.p == 0.5
    assert (dropout.key.step, dropout.key.site) == (3, 2)
    assert dropout.key.seed == 1 ^ name_number("a.drop")
    assert dropout.key.tokens is not None


def test_the_number_of_a_name_is_its_blake2b():
    # int.from_bytes(hashlib.blake2b(b"a.drop", digest_size=8).digest(), "little") >> 1
    assert name_number("a.drop") == 8627752439876991640
    assert all(0 <= name_number(str(i)) < 2**63 for i in range(1000))
    assert len({name_number(f"model.layers.{i}.self_attn_dropout") for i in range(1000)}) == 1000


def test_places_of_other_names_drop_other_elements_and_of_one_name_the_same():
    first, second = model("a", "b"), model("b", "c")
    name_dropout_sites_(first)
    name_dropout_sites_(second)
    assert torch.equal(mask_of(first, "b.drop"), mask_of(second, "b.drop")), "a name is all that counts, not a place"
    masks = [mask_of(first, "a.drop"), mask_of(first, "b.drop"), mask_of(second, "c.drop"), mask_of(first, "a.drop", 2)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert (mask == other).float().mean() == pytest.approx(0.5, abs=0.025)  # five standard deviations


def test_a_place_that_nobody_named_is_refused():
    with pytest.raises(
        ConfigError, match=r"needs a name to derive masks from; call name_dropout_sites_\(model\) first"
    ):
        DropoutSite(0.5).of(key())


def test_a_name_survives_copying_and_tensors_are_none():
    named = model("a")
    name_dropout_sites_(named)
    assert torch.equal(mask_of(copy.deepcopy(named), "a.drop"), mask_of(named, "a.drop"))
    assert named.state_dict() == {}


def tokens_on_this_rank() -> list[list[int]]:
    key = DropoutKey(1, 0, torch.arange(2 * S).view(2, S), site=4)
    mine = sequence_parallel_key(key, collection(2).tp)
    assert (mine.seed, mine.step, mine.site) == (1, 0, 4)
    return mine.tokens.tolist()


def test_a_rank_keeps_the_ids_of_its_part_of_the_sequence():
    every = [[s, S + s] for s in range(S)]  # [S, B]
    assert ranks(2, tokens_on_this_rank) == [every[: S // 2], every[S // 2 :]]
    key = DropoutKey(1, 0, torch.arange(2 * S).view(2, S))
    assert sequence_parallel_key(key, None).tokens.tolist() == every
