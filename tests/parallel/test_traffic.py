"""Counts of collectives: how parts add up, and what counts as zero."""

from collections import Counter

from megalith.parallel.traffic import Collective, Passes, collective, repeated


def test_a_group_of_one_rank_and_an_empty_buffer_exchange_nothing():
    assert collective("tensor", "all_reduce", 8, num_ranks=1) == Counter()
    assert collective("tensor", "all_reduce", 0, num_ranks=2) == Counter()
    assert collective("tensor", "all_reduce", 8, num_ranks=2, times=0) == Counter()
    assert collective("tensor", "all_reduce", 8, num_ranks=2, times=3) == {Collective("tensor", "all_reduce", 8): 3}


def test_recomputation_repeats_what_comes_before_the_last_saved_tensor():
    gather, scatter = (collective("tensor", kind, 8, 2) for kind in ("all_gather", "reduce_scatter"))
    enter, leave = Passes(gather, scatter, unsaved=gather), Passes(scatter, gather, unsaved=scatter)
    part = enter + leave + enter + leave
    assert part.forward == part.backward == repeated(gather + scatter, 2)
    assert part.recomputed == repeated(gather, 2) + scatter
