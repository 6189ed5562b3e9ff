"""philox: Random123's known answers, the algorithm in plain integers, and keys that never collide."""

import pytest
import torch

from megalith.numerics.philox import counters_per_chunk, key_of, low_and_high, philox4x32

MAX = 0xFFFFFFFF
# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, answer
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MAX, MAX, MAX, MAX), (MAX, MAX), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),  # the digits of pi
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_in_integers(counter: list[int], key: tuple[int, int]) -> list[int]:
    """The same ten rounds in Python integers, which neither wrap around nor have a sign."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [product1 // 2**32 ^ c[1] ^ k0, product1 % 2**32, product0 // 2**32 ^ c[3] ^ k1, product0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter, key, answer, device):
    words = philox4x32(*(torch.tensor([word], device=device) for word in counter), *key)
    assert tuple(word.item() for word in words) == answer


def test_every_word_of_counter_and_key_counts_up_to_its_last_bit():
    torch.manual_seed(0)
    counters, key = torch.randint(0, 2**32, (4, 200)), (0xDEADBEEF, 0x12345678)
    got = torch.stack(philox4x32(*counters, *key), dim=1)
    assert got.tolist() == [philox_in_integers(counter, key) for counter in counters.T.tolist()]


def test_counter_words_broadcast():
    rows, columns, zero = torch.arange(3)[:, None], torch.arange(5), torch.zeros((), dtype=torch.int64)
    words = philox4x32(rows, zero, columns, zero, 1, 2)
    assert [word.shape for word in words] == [(3, 5)] * 4
    assert [word[2, 4].item() for word in words] == philox_in_integers([2, 0, 4, 0], (1, 2))


def test_an_index_past_32_bits_is_split_into_two_words():
    low, high = low_and_high(torch.tensor([0, 2**32 - 1, 2**32, 2**62 + 5]))
    assert low.tolist() == [0, 2**32 - 1, 0, 5]
    assert high.tolist() == [0, 0, 1, 2**30]


def test_a_key_is_the_hash_that_b2sum_prints():
    # printf 1234:model.embed_tokens.weight | b2sum -l 64; a change here changes every first weight of every run
    assert key_of(1234, "model.embed_tokens.weight") == (0x66498FF7, 0xFC0CF270)


def test_keys_differ_by_seed_and_by_name():
    keys = {key_of(seed, name) for seed in range(100) for name in ("a", "b", "1", "1:a")}
    assert len(keys) == 400
    assert all(0 <= word <= MAX for key in keys for word in key)


@pytest.mark.parametrize(("threads", "each"), [(1, 2**14), (2, 2**15), (16, 2**15), (64, 2**13)])
def test_a_chunk_gives_work_to_all_threads_of_a_small_machine_and_stays_small_on_a_large_one(
    threads, each, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert counters_per_chunk(torch.device("cpu")) == threads * each
