"""initialization: any slice has the bits of the whole, numbers are normally distributed, memory is the slice's."""

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.errors import ShapeError
from megalith.numerics import initialization
from megalith.numerics.initialization import normal_shard
from megalith.numerics.philox import key_of, philox4x32

SEED, NAME = 1234, "model.layers.0.self_attn.q_proj.weight"
BITS = "efd2898b0225a439894abc165604e98b73862258a9d6a45eaa4b250421293e2b"  # SHA-256 of 300 rows of 1001 numbers


def whole(*shape: int, **options) -> torch.Tensor:
    return normal_shard(SEED, NAME, shape, [0] * len(shape), shape, 1.0, **options)


@st.composite
def slices(draw) -> tuple[list[int], list[int], list[int]]:
    """A shape of one to four dimensions, and the offset and size of a slice of it, possibly empty."""
    largest = draw(st.sampled_from([[300], [40, 40], [3, 300], [8, 12, 20], [4, 2, 6, 20]]))
    shape = [draw(st.integers(1, n)) for n in largest]
    offset = [draw(st.integers(0, n)) for n in shape]
    return shape, offset, [draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)]


@settings(max_examples=200)
@given(slices(), st.sampled_from([1, 3, 64, 2**14]))
def test_any_slice_has_the_bits_of_the_whole(where, num_counters):
    shape, offset, size = where
    want = whole(*shape)[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialization, "counters_per_chunk", lambda device: num_counters)
        got = normal_shard(SEED, NAME, shape, offset, size, 1.0)
    assert torch.equal(got, want)


def test_the_number_of_threads_does_not_matter():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = whole(300, 1001)
        torch.set_num_threads(2)
        assert torch.equal(whole(300, 1001), one)
    finally:
        torch.set_num_threads(threads)


def test_the_bits_are_the_same_on_every_processor_and_device(device):
    x = whole(300, 1001, device=device).cpu()
    assert hashlib.sha256(x.numpy().astype("<f4").tobytes()).hexdigest() == BITS


def test_values_are_those_of_the_box_muller_formula():
    got = whole(3, 6)
    for row in range(3):
        for quad in range(2):  # 6 columns take two counters per row
            zero = torch.zeros(1, dtype=torch.int64)
            words = philox4x32(zero + row * 2 + quad, zero, zero, zero, *key_of(SEED, NAME))
            w = [word.item() >> 8 for word in words]
            want = []
            for radius, angle in ((w[0], w[1]), (w[2], w[3])):
                r, t = math.sqrt(-2 * math.log((radius + 1) / 2**24)), 2 * math.pi * angle / 2**24
                want += [r * math.cos(t), r * math.sin(t)]
            columns = slice(4 * quad, min(4 * quad + 4, 6))
            # one rounding to float32
            torch.testing.assert_close(
                got[row, columns].tolist(), want[: columns.stop - columns.start], rtol=6e-8, atol=1e-9
            )


def test_the_largest_radius_word_gives_0_and_the_smallest_a_finite_number():
    """The computed logarithm of 1 is slightly above 0; the root of a negative number would be NaN."""
    largest, smallest, angle = torch.tensor([2**32 - 1]), torch.tensor([0]), torch.tensor([2**30])
    assert initialization._box_muller(largest, angle, largest, smallest).tolist() == [[0.0] * 4]
    got = initialization._box_muller(smallest, smallest, smallest, angle)
    want = math.sqrt(-2 * math.log(2**-24))
    torch.testing.assert_close(got, torch.tensor([[want, 0.0, 0.0, want]]), rtol=6e-8, atol=1e-8)


def test_values_are_normal():
    x = whole(1000, 1000).double().flatten()
    assert abs(x.mean()) < 4e-3  # four standard deviations of the mean of a million; likewise below
    assert abs(x.var() - 1) < 4 * 2**0.5 * 1e-3
    assert abs((x**3).mean()) < 4 * 15**0.5 * 1e-3
    assert abs((x**4).mean() - 3) < 4 * 96**0.5 * 1e-3
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand
    steps = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    assert (torch.special.ndtr(x.sort().values) - steps).abs().max() < 1.95e-3


def test_neighbours_are_not_correlated():
    x = whole(1000, 1000).double()
    for y, z in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x[:, 2:], x[:, :-2])):
        assert abs((y * z).mean()) < 4e-3


def test_seeds_and_names_give_other_tensors():
    tensors = [normal_shard(seed, name, [1000], [0], [1000], 1.0) for seed in (1, 2) for name in ("a", "b")]
    for i, x in enumerate(tensors):
        assert all(abs((x * y).mean()) < 0.15 for y in tensors[:i])


def test_the_deviation_scales_and_other_dtypes_are_casts():
    x = whole(7, 9)
    assert torch.equal(normal_shard(SEED, NAME, [7, 9], [0, 0], [7, 9], 0.02), x * 0.02)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(whole(7, 9, dtype=dtype), x.to(dtype))


def test_a_rank_computes_little_more_than_its_slice(monkeypatch):
    sizes = []

    def counted(c0, *rest):
        sizes.append(c0.numel())
        return philox4x32(c0, *rest)

    monkeypatch.setattr(initialization, "philox4x32", counted)
    size = [7, 300_000]
    normal_shard(SEED, NAME, [2**30, 2**30], [2**29, 2**20 + 2], size, 1.0)
    assert max(sizes) <= 2**14
    assert sum(sizes) <= 7 * (300_000 // 4 + 1)


@pytest.mark.parametrize(
    ("shape", "offset", "size", "message"),
    [
        ([], [], [], r"w: the tensor must have at least one dimension; got shape \[\]"),
        ([4, 4], [0], [4, 4], r"one number for each dimension of shape \[4, 4\]; got offset \[0\]"),
        ([4, 4], [0, 2], [4, 3], r"inside shape \[4, 4\]; got offset \[0, 2\] and size \[4, 3\]"),
        ([4], [-1], [2], r"inside shape \[4\]; got offset \[-1\]"),
    ],
)
def test_slices_that_do_not_fit_are_refused(shape, offset, size, message):
    with pytest.raises(ShapeError, match=message):
        normal_shard(1, "w", shape, offset, size, 1.0)
