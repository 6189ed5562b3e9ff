"""layer_context: the key-value cache stays in place until it grows, and has a maximum size."""

import pytest
import torch

from megalith.errors import ShapeError
from megalith.transformer.layer_context import KVCache


def test_a_cache_gives_all_tokens_so_far_without_moving_them():
    cache = KVCache(6)
    k, v = torch.randn(2, 6, 3, 2, 4), torch.randn(2, 6, 3, 2, 4)
    places = set()
    for start, end in ((0, 3), (3, 4), (4, 6)):
        keys, values = cache.append(k[0, start:end], v[0, start:end])
        assert cache.num_tokens == end
        assert torch.equal(keys, k[0, :end])
        assert torch.equal(values, v[0, :end])
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) == 1


def test_a_cache_that_grows_keeps_what_it_has():
    cache = KVCache(2)
    cache.grow(3)  # before anything is cached
    k, v = torch.randn(2, 6, 3, 2, 4)
    cache.append(k[:3], v[:3])
    cache.grow(6)
    keys, values = cache.append(k[3:], v[3:])
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert keys[:, 1, 1].is_contiguous()


def test_the_keys_of_a_head_follow_each_other_in_memory():
    keys, values = KVCache(6).append(torch.randn(4, 2, 3, 5), torch.randn(4, 2, 3, 5))
    for x in (keys, values):
        assert x[:, 1, 2].is_contiguous()


def test_more_tokens_than_it_has_room_for_are_refused():
    cache = KVCache(4)
    cache.append(torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2))
    with pytest.raises(ShapeError, match="the cache has room for 4 tokens; got 5; increase its capacity"):
        cache.append(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2))
    assert cache.num_tokens == 3
