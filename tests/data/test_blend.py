"""blend: each dataset provides its share of any first samples; the order is computed, and what follows changes none."""

import math
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.blend import Blend, BlendPhase, identity_of_first, weights_to_continue
from megalith.data.blended_dataset import BlendedDataset
from megalith.errors import ConfigError


class Numbered:
    """A dataset whose sample i is its name and i."""

    def __init__(self, name, samples_per_epoch=1):
        self.name, self.samples_per_epoch = name, Fraction(samples_per_epoch)

    def __getitem__(self, index):
        return self.name, index

    def identity(self):
        return {"text": f"text of {self.name}", "tokenizer": "t"}


def blend(*phases):
    return Blend([BlendPhase(first, {name: Fraction(str(w)) for name, w in ws.items()}) for first, ws in phases])


def names(found, count):
    return "".join(found.locate(index)[0] for index in range(count))


@settings(max_examples=100)
@given(st.lists(st.decimals("1e-6", 1000, places=6), min_size=1, max_size=32), st.integers(0, 10**15))
def test_of_any_first_samples_each_dataset_provides_its_share_within_two(weights, far):
    weights = {f"d{number}": Fraction(weight) for number, weight in enumerate(weights)}
    found, total = Blend([BlendPhase(0, weights)]), sum(weights.values())
    bound = Fraction(1, 2) if len(weights) < 3 else 2
    for count in (*range(200), far):
        counts = found.counts(count)
        assert sum(counts.values()) == count
        for name, weight in weights.items():
            difference = abs(counts[name] - count * weight / total)
            assert difference <= bound if bound < 1 else difference < bound


def test_shares_are_as_even_as_those_of_megatrons_greedy_rule():
    """argmax_d (w_d max(n, 1) - c_d), the rule of Megatron's blends, stays within 1.5 samples of the shares as well."""
    weights = np.random.default_rng(0).uniform(0.01, 1, 24)
    weights = {f"d{number}": round(weight, 4) for number, weight in enumerate(weights)}
    shares = np.array(list(weights.values())) / sum(weights.values())
    greedy, found, worst = np.zeros(24), blend((0, weights)), np.zeros(2)
    for n in range(2000):
        greedy[np.argmax(shares * max(n, 1) - greedy)] += 1
        ours = np.array([found.counts(n + 1)[name] for name in weights])
        worst = np.maximum(worst, [abs(each - shares * (n + 1)).max() for each in (greedy, ours)])
    assert worst[0] < 1.5
    assert worst[1] < 1.5


@settings(max_examples=50)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 50), min_size=1),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 50), min_size=1),
    st.integers(1, 150),
)
def test_each_dataset_is_read_from_its_beginning_without_gaps_or_repeats_over_all_phases(first, later, start):
    found, read = blend((0, first), (start, later)), dict.fromkeys("abcdefgh", 0)
    for index in range(250):
        assert {name: count for name, count in found.counts(index).items() if count} == {
            name: count for name, count in read.items() if count
        }
        name, place = found.locate(index)
        assert name in (first if index < start else later)
        assert place == read[name]
        read[name] += 1


def test_the_order_is_that_of_rounded_shares():
    # web has 2/3: of the first n samples round(2n/3) are of web: 0 1 1 2 3 3 4
    assert names(blend((0, {"w": 2, "c": 1})), 9) == "wcwwcwwcw"
    assert names(blend((0, {"w": 0.5, "c": 0.5})), 4) == "cwcw"
    # d has 1/2; the rest is split into c with 3/5 and b with 2/5: d takes every other sample, and of those left
    # round(3m/5) of the first m are of c: 0 1 1 2 2 3
    assert names(blend((0, {"b": 2, "c": 3, "d": 5})), 10) == "dcdbdcdbdc"


def test_the_order_depends_on_the_ratio_of_the_weights_alone():
    want = names(blend((0, {"a": 0.7, "b": 0.2, "c": 0.1})), 500)
    for same in ({"a": 7, "b": 2, "c": 1}, {"c": 10, "a": 70, "b": 20}, {"b": 2e-7, "c": 1e-7, "a": 7e-7, "d": 0.0}):
        assert names(blend((0, same)), 500) == want
    assert [want.count(name) for name in "abc"] == [350, 100, 50]


def test_sample_10_to_the_15_is_found_like_any_other():
    found, far = blend((0, {f"d{number}": number + 0.001 for number in range(1000)})), 10**15
    name, place = found.locate(far)
    before, after = found.counts(far), found.counts(far + 1)
    assert place == before[name]
    assert {each: after[each] - count for each, count in before.items() if after[each] != count} == {name: 1}


def test_what_rounding_owes_to_a_dataset_is_made_up_for_in_the_next_phases():
    ramp = {8 * k: {"code": 1 + k * 0.005, "web": 99 - k * 0.005} for k in range(1000)}  # 279.8 samples of 8000
    assert blend(*ramp.items()).counts(8000)["code"] == 280
    changing = {32 * k: {"math": 10, "a": 30 + k, "b": 60 - k} for k in range(50)}
    assert blend(*changing.items()).counts(1600)["math"] == 160


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.dictionaries(st.sampled_from("abcde"), st.integers(1, 30), min_size=1)),
        min_size=1,
        max_size=25,
    )
)
def test_over_phases_of_any_length_each_dataset_provides_its_shares_within_three(phases):
    starts = np.cumsum([0, *(length for length, _ in phases)]).tolist()
    found = blend(*zip(starts, (weights for _, weights in phases), strict=False))
    due = dict.fromkeys("abcde", Fraction())
    for start, (length, weights) in zip(starts, phases, strict=False):
        for count in range(1, length + 1):
            for name, weight in weights.items():
                due[name] += Fraction(weight, sum(weights.values()))
            counts = found.counts(start + count)
            assert all(abs(counts.get(name, 0) - share) < 3 for name, share in due.items())


def test_a_later_phase_changes_no_earlier_sample():
    one, two = blend((0, {"a": 1, "b": 2})), blend((0, {"a": 1, "b": 2}), (90, {"a": 1, "b": 0, "c": 1}))
    assert [one.locate(index) for index in range(90)] == [two.locate(index) for index in range(90)]
    assert [two.locate(index) for index in range(90, 94)] == [("a", 30), ("c", 0), ("a", 31), ("c", 1)]
    assert two.counts(94) == {"a": 32, "b": 60, "c": 2}


def test_without_weights_all_datasets_end_their_epochs_together():
    sizes = {"a": Fraction(7, 2), "b": 40, "c": Fraction(131, 2)}
    dataset = BlendedDataset({name: Numbered(name, size) for name, size in sizes.items()})
    progress = dataset.progress(109 * 50)
    assert {name: each["epochs"] for name, each in progress.items()} == {"a": 50.0, "b": 50.0, "c": 50.0}
    assert {name: each["samples"] for name, each in progress.items()} == {"a": 175, "b": 2000, "c": 3275}


def test_a_sample_of_a_blend_is_that_of_its_dataset():
    dataset = BlendedDataset({name: Numbered(name) for name in "wc"}, {"w": 2, "c": 1}, {4: {"w": 0, "c": 1}})
    want = [("w", 0), ("c", 0), ("w", 1), ("w", 2), ("c", 1), ("c", 2)]
    assert [dataset[index] for index in range(6)] == want
    assert dataset.progress(5) == {"w": {"samples": 3, "epochs": 3.0}, "c": {"samples": 2, "epochs": 2.0}}
    with pytest.raises(IndexError, match="numbered from 0; got -1"):
        dataset[-1]


@pytest.mark.parametrize(
    ("weights", "phases"),
    [
        ({"w": 1}, None),
        ({"w": 1, "c": 1, "d": 1}, None),
        ({"w": 0, "c": 0}, None),
        ({"w": -1, "c": 2}, None),
        ({"w": math.inf, "c": 2}, None),
        ({"w": math.nan, "c": 2}, None),
        (None, {4: {"w": 1}}),
        (None, {0: {"w": 1, "c": 1}}),
        (None, {4: {"w": 1, "c": 1}, 3: {"w": 1, "c": 1}}),
    ],
)
def test_invalid_weights_and_phases_are_refused(weights, phases):
    with pytest.raises(ConfigError, match=r"the weights of a blend must be .* one for each of w, c|phases of a blend"):
        BlendedDataset({name: Numbered(name) for name in "wc"}, weights, phases)


# ---- identity


def identity(weights, **phases):
    later = {int(first.removeprefix("at_")): weights for first, weights in phases.items()}
    names = dict.fromkeys(name for each in (weights, *later.values()) for name in each)
    whole = {name: weights.get(name, 0) for name in names}
    filled = {first: {name: each.get(name, 0) for name in names} for first, each in later.items()}
    return BlendedDataset({name: Numbered(name) for name in names}, whole, filled).identity()


def test_the_identity_has_plain_values_for_each_dataset_and_the_weights():
    assert identity({"web": 0.6, "code": 0.2}, at_800={"web": 1, "code": 1}) == {
        "tokenizer": "t",
        "blend": "0: code 1, web 3; 800: code 1, web 1",
        "web/text": "text of web",
        "code/text": "text of code",
    }


def test_datasets_without_a_tokenizer_have_none_in_the_identity():
    plain = Numbered("w")
    plain.identity = lambda: {"text": "x", "tokenizer": None}
    assert BlendedDataset({"w": plain, "c": plain}).identity()["tokenizer"] is None
    assert BlendedDataset({"w": plain, "c": Numbered("c")}).identity()["tokenizer"] == "t"


SAME = {
    "a phase to come": (identity({"w": 1, "c": 2}), identity({"w": 1, "c": 2}, at_9={"w": 1, "c": 1})),
    "a dataset to come": (identity({"w": 1, "c": 2}), identity({"w": 1, "c": 2}, at_9={"w": 1, "d": 1})),
    "other files of a dataset to come": (
        identity({"w": 1, "c": 2}, at_9={"d": 1}),
        identity({"w": 1, "c": 2}, at_9={"d": 1}) | {"d/text": "another"},
    ),
    "the same ratio": (identity({"w": 1, "c": 2}), identity({"c": 0.5, "w": 0.25})),
    "one dataset so far": (Numbered("w").identity(), identity({"w": 1}, at_9={"w": 1, "c": 1})),
    "the one dataset so far has another name": (identity({"w": 1}), identity({"w": 1}, at_9={"c": 1})),
}
OTHERS = {
    "other weights": (identity({"w": 1, "c": 2}), identity({"w": 1, "c": 1})),
    "other files": (identity({"w": 1, "c": 2}), identity({"w": 1, "c": 2}) | {"c/text": "another"}),
    "a phase that has begun": (identity({"w": 1, "c": 2}), identity({"w": 1, "c": 2}, at_8={"w": 1, "c": 1})),
    "no phase where there was one": (identity({"w": 1}, at_8={"c": 1}), identity({"w": 1})),
    "a blend of what was one": (Numbered("w").identity(), identity({"w": 1, "c": 2})),
    "one of what was a blend": (identity({"w": 1, "c": 2}), Numbered("w").identity()),
}


@pytest.mark.parametrize("name", SAME)
def test_changes_of_what_is_read_later_leave_the_identity_as_it_is(name):
    before, now = (identity_of_first(each, 9) for each in SAME[name])
    assert before == now


@pytest.mark.parametrize("name", OTHERS)
def test_changes_of_what_was_read_change_the_identity(name):
    before, now = (identity_of_first(each, 9) for each in OTHERS[name])
    assert any(before[key] != now[key] for key in before.keys() & now.keys())


ONE = Numbered("w").identity()
CONTINUED = {
    "other weights": (
        identity({"w": 1, "c": 2}),
        identity({"w": 1, "c": 1}),
        [(0, {"w": 1, "c": 2}), (9, {"w": 1, "c": 1})],
    ),
    "a phase too early": (
        identity({"w": 1, "c": 2}, at_4={"w": 1}),
        identity({"w": 1, "c": 2}, at_5={"c": 1}, at_20={"w": 2, "c": 3}),
        [(0, {"w": 1, "c": 2}), (4, {"w": 1, "c": 0}), (9, {"w": 0, "c": 1}), (20, {"w": 2, "c": 3})],
    ),
    "a phase that begins here": (
        identity({"w": 1, "c": 2}),
        identity({"w": 1, "c": 1}, at_9={"c": 1}),
        [(0, {"w": 1, "c": 2}), (9, {"w": 0, "c": 1})],
    ),
    "a phase that was to begin here": (
        identity({"w": 1, "c": 2}, at_9={"w": 1}),
        identity({"w": 1, "c": 1}),
        [(0, {"w": 1, "c": 2}), (9, {"w": 1, "c": 1})],
    ),
    "one dataset": (ONE, identity({"w": 1, "d": 4}), [(0, {"w": 1, "d": 0}), (9, {"w": 1, "d": 4})]),
    "one dataset that is gone": (ONE, identity({"c": 1, "d": 4}), None),
    "another name": (identity({"w": 1, "c": 2}), identity({"x": 1, "c": 2}), None),
    "no identity": ({}, identity({"w": 1, "c": 2}), None),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_is_told_with_which_weights_it_goes_on(name):
    before, now, want = CONTINUED[name]
    assert weights_to_continue(before, now, 9) == want
    if want is not None:  # with these, what was read is the same
        (_, first), *later = want
        followed = identity(first, **{f"at_{start}": weights for start, weights in later})
        assert identity_of_first(followed, 9) == identity_of_first(before, 9)


@pytest.mark.parametrize("damaged", ["", "x", "0: ", "0: web", ";;; 9", "0: web 3; 99999999999999999999: c 1", 3, None])
def test_a_damaged_order_is_read_without_an_error(damaged):
    assert isinstance(identity_of_first({"blend": damaged, "web/text": "x"}, 10), dict)


def test_counting_the_first_samples_reads_nothing():
    class Unread(Numbered):
        def __getitem__(self, index):
            raise AssertionError

    dataset = BlendedDataset({name: Unread(name) for name in "wc"})
    assert sum(each["samples"] for each in dataset.progress(10**12).values()) == 10**12
    assert list(islice(dataset.identity(), 2)) == ["tokenizer", "blend"]
