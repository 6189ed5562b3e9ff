"""blocks_between: covers every visible pair once, and equally many on every rank."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.blocks import Block, VisibleKeys, blocks_between
from megalith.parallel.context.zigzag import zigzag_spans

S = 24


def pairs_of(block: Block, num_rows: int) -> Tensor:
    """[B, S, S]: the pairs that ``fused_attention`` would compute for the block, given its window and documents."""
    beside = torch.arange(len(block.queries)).unsqueeze(1) + len(block.keys) - len(block.queries)
    distance = torch.arange(len(block.keys)) - beside
    left, right = block.window
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance >= -left) | (left == -1)
    seen &= (distance <= right) | (right == -1)
    whole = torch.zeros(num_rows, S, S, dtype=torch.long)
    inside = seen.expand(num_rows, *seen.shape)
    if block.documents is not None:
        ids = block.documents.document_ids()
        inside = inside & (ids.unsqueeze(2) == ids.unsqueeze(1))
    rows = range(num_rows)[block.rows]
    whole[rows.start : rows.stop, block.queries.start : block.queries.stop, block.keys.start : block.keys.stop] = (
        inside[rows.start : rows.stop].long()
    )
    return whole


@st.composite
def lengths(draw: st.DrawFn) -> list[int]:
    borders = draw(st.sets(st.integers(1, S - 1), max_size=5))
    ends = [*sorted(borders), S]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


SIDE = st.one_of(st.just(-1), st.integers(0, S))


@settings(max_examples=150)
@given(st.sampled_from([1, 2, 4]), st.booleans(), SIDE, SIDE, st.none() | st.lists(lengths(), min_size=1, max_size=3))
def test_every_pair_that_sees_each_other_is_in_one_block(size, causal, left, right, rows):
    documents = None if rows is None else PackedSeqParams.from_lengths(rows)
    num_rows = 1 if rows is None else len(rows)
    window = (left, min(right, 0)) if causal else (left, right)
    visible = VisibleKeys.of(causal, window, documents)
    distance = torch.arange(S) - torch.arange(S).unsqueeze(1)
    want = ((distance >= -left) | (left == -1)) & (distance <= (S if right == -1 else right))
    want = (want & (distance <= 0) if causal else want).expand(num_rows, S, S)
    if documents is not None:
        ids = documents.document_ids()
        want = want & (ids.unsqueeze(2) == ids.unsqueeze(1))
    spans = [span for rank in range(size) for span in zigzag_spans(S, size, rank)]
    found = torch.zeros(num_rows, S, S, dtype=torch.long)
    for queries, keys in product(spans, spans):
        for block in blocks_between(queries, keys, visible):
            assert min(block.window) >= -1
            found += pairs_of(block, num_rows)
    assert torch.equal(found, want.long())
    gathered = [block for queries in spans for block in blocks_between(queries, range(S), visible)]
    assert torch.equal(sum(pairs_of(block, num_rows) for block in gathered), want.long())


def num_pairs(size: int, rank: int, other: int, visible: VisibleKeys) -> int:
    """The number of pairs of a query of ``rank`` and a key of ``other``."""
    spans = product(zigzag_spans(S, size, rank), zigzag_spans(S, size, other))
    blocks = (block for queries, keys in spans for block in blocks_between(queries, keys, visible))
    return sum(int(pairs_of(block, 1).sum()) for block in blocks)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_computes_the_same_number_of_pairs_in_every_step_of_a_ring(size, causal):
    visible, n = VisibleKeys.of(causal, None, None), S // (2 * size)
    for step in range(size):
        counts = {num_pairs(size, rank, (rank - step) % size, visible) for rank in range(size)}
        own = n * (n + 1) + n * n  # two triangles, and the late chunk over the early one
        assert counts == {(own if step == 0 else 2 * n * n) if causal else 4 * n * n}


def test_a_row_of_one_document_needs_no_more_blocks_than_one_without():
    documents = PackedSeqParams.from_lengths([[S], [S], [S]])
    for queries, keys in ((range(12, 18), range(6)), (range(6), range(12, 18))):
        packed = list(blocks_between(queries, keys, VisibleKeys.of(False, None, documents)))
        assert [(block.rows, block.queries, block.keys) for block in packed] == [(slice(0, 3), queries, keys)]
