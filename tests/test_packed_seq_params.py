"""packed_seq_params: boundaries from lengths and from documents, derived values, and every wrong boundary."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import ShapeError
from megalith.packed_seq_params import PackedSeqParams


def packed(borders: list[int], batch_size: int = 2, seq_length: int = 4, **changes) -> PackedSeqParams:
    """Two rows of 4 tokens by default, with ``changes`` to otherwise valid arguments."""
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    longest = max((end - start for start, end in pairwise(borders)), default=0)
    fields = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "batch_size": batch_size,
        "seq_length": seq_length,
    }
    return PackedSeqParams(**fields | changes)


def test_borders_of_0_5_7_11_and_16_tokens_number_the_documents():
    params = packed([0, 5, 7, 11, 16], batch_size=1, seq_length=16)
    assert params.document_ids().tolist() == [[0] * 5 + [1] * 2 + [2] * 4 + [3] * 5]
    assert params.position_ids().tolist() == [[*range(5), *range(2), *range(4), *range(5)]]
    assert params.rows() == [[(0, 5), (5, 7), (7, 11), (11, 16)]]


def test_every_row_counts_for_itself():
    params = PackedSeqParams.from_lengths([[3, 1], [4], [1, 1, 2]])
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 4, 8, 9, 10, 12]
    assert (params.batch_size, params.seq_length, params.max_seqlen_q, params.max_seqlen_kv) == (3, 4, 4, 4)
    assert params.rows() == [[(0, 3), (3, 4)], [(0, 4)], [(0, 1), (1, 2), (2, 4)]]
    assert params.position_ids().tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 1]]
    assert params.document_ids().tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 2, 2]]


def test_every_token_knows_the_bounds_of_its_document_in_its_row():
    params = PackedSeqParams.from_lengths([[3, 1], [4], [1, 1, 2]])
    assert params.document_bounds.dtype == torch.int32
    assert params.document_bounds.tolist() == [
        [[0, 3], [0, 3], [0, 3], [3, 4]],
        [[0, 4]] * 4,
        [[0, 1], [1, 2], [2, 4], [2, 4]],
    ]
    assert params.to("meta").document_bounds.device.type == "meta"


def test_documents_may_be_numbered_from_anywhere():
    documents = torch.tensor([[7, 7, 9, 9], [9, 9, 9, 9]], dtype=torch.int32)
    params = PackedSeqParams.from_documents(documents)
    assert params.rows() == [[(0, 2), (2, 4)], [(0, 4)]]
    assert params.document_ids().tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("row", "documents"),
    [
        ("ttt..", [(0, 3), (3, 5)]),  # padded on the right
        ("..ttt", [(0, 2), (2, 5)]),  # on the left
        (".ttt.", [(0, 1), (1, 4), (4, 5)]),
        ("ttttt", [(0, 5)]),
        (".....", [(0, 5)]),  # padding alone is one document
        ("t....", [(0, 1), (1, 5)]),
        ("....t", [(0, 4), (4, 5)]),
    ],
)
def test_the_tokens_of_a_padded_row_are_one_document_and_its_padding_is_others(row, documents):
    is_token = torch.tensor([[place == "t" for place in row]])
    assert PackedSeqParams.from_padding(is_token).rows() == [documents]
    # also next to other rows, each with its own padding
    together = PackedSeqParams.from_padding(torch.cat((is_token, torch.ones(1, 5, dtype=torch.bool), is_token)))
    assert together.rows() == [documents, [(0, 5)], documents]


def test_positions_of_a_padded_row_begin_with_its_tokens():
    params = PackedSeqParams.from_padding(torch.tensor([[False, False, True, True, True]]))
    assert params.position_ids().tolist() == [[0, 1, 0, 1, 2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["tt.t."], r"must be contiguous; row 0 has padding between them"),
        (["ttttt", "....t", "t...t"], r"row 2 has padding between them"),
        (["t.t.t"], r"row 0 has padding"),
    ],
)
def test_padding_between_the_tokens_of_a_row_is_refused(rows, message):
    with pytest.raises(ShapeError, match=message):
        PackedSeqParams.from_padding(torch.tensor([[place == "t" for place in row] for row in rows]))


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, 3), torch.ones(3, dtype=torch.bool), torch.ones(0, 3, dtype=torch.bool)]
)
def test_what_does_not_say_of_each_place_whether_it_is_a_token_is_refused(wrong):
    with pytest.raises(ShapeError, match=r"is_token must be bool \[B, S\]; got"):
        PackedSeqParams.from_padding(wrong)


@given(st.lists(st.lists(st.booleans(), min_size=11, max_size=11), min_size=1, max_size=4))
def test_lengths_documents_and_rows_tell_the_same(begins):
    # a document begins at each True; every row has 12 tokens
    documents = torch.tensor([[False, *row] for row in begins]).cumsum(dim=1)
    params = PackedSeqParams.from_documents(documents)
    lengths = [[end - start for start, end in row] for row in params.rows()]
    assert torch.equal(params.document_ids(), documents)
    assert torch.equal(PackedSeqParams.from_lengths(lengths).cu_seqlens_q, params.cu_seqlens_q)
    assert params.position_ids().tolist() == [[i for length in row for i in range(length)] for row in lengths]
    assert params.max_seqlen_q == max(max(row) for row in lengths)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (3, 9), (4, 5), (8, 9)])
def test_documents_are_cut_off_at_the_ends_of_a_range_of_columns(start, stop):
    params = PackedSeqParams.from_lengths([[2, 3, 4], [9], [1] * 9])
    part = params.within(start, stop)
    ids = params.document_ids()[:, start:stop]
    assert torch.equal(part.document_ids(), ids - ids[:, :1])
    assert (part.batch_size, part.seq_length) == (3, stop - start)
    assert params.within(start, stop) is part, "made once for all layers"
    assert params.within(0, 9) is params


def test_moving_keeps_the_rows_and_asks_the_device_for_nothing(monkeypatch):
    params = PackedSeqParams.from_lengths([[3, 1], [4]])
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # operations that would synchronize with a device
    monkeypatch.setattr(torch.Tensor, "item", None)
    moved = params.to("meta")
    assert moved.rows() == params.rows()
    assert moved.cu_seqlens_q.device.type == moved.cu_seqlens_kv.device.type == "meta"
    assert moved.position_ids().shape == moved.document_ids().shape == (2, 4)
    assert params.cu_seqlens_q.device.type == "cpu"


def test_copies_travel_between_processes():
    params = PackedSeqParams.from_lengths([[3, 1], [4]])
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other.rows() == params.rows()
        assert torch.equal(other.cu_seqlens_q, params.cu_seqlens_q)


@pytest.mark.parametrize(
    ("borders", "changes", "message"),
    [
        ([1, 4, 8], {}, r"cu_seqlens_q must begin at 0 and end at B\*S = 8; got \[1, 4, 8\]"),
        ([0, 4, 7], {}, r"end at B\*S = 8; got \[0, 4, 7\]"),
        ([0, 4, 9], {}, r"end at B\*S = 8; got \[0, 4, 9\]"),
        ([0], {}, r"begin at 0 and end at"),
        ([0, 3, 3, 4, 8], {}, r"must be strictly increasing.*got \[0, 3, 3, 4, 8\]"),
        ([0, 4, 2, 8], {}, r"must be strictly increasing"),
        ([0, 3, 8], {}, r"at every row, 4 tokens apart.*without \[4\]"),
        ([0, 4, 8], {"cu_seqlens_q": torch.tensor([0, 4, 8])}, r"cu_seqlens_q must be int32 \[N\+1\]; got torch.int64"),
        (
            [0, 4, 8],
            {"cu_seqlens_kv": torch.tensor([[0, 8]], dtype=torch.int32)},
            r"cu_seqlens_kv.*got torch.int32 \[1, 2\]",
        ),
        ([0, 4, 8], {"cu_seqlens_kv": torch.tensor([0, 2, 4, 8], dtype=torch.int32)}, r"must equal cu_seqlens_q"),
        ([0, 4, 8], {"max_seqlen_q": 5}, r"must be 4, the length of the longest document; got 5 and 4"),
        ([0, 4, 8], {"max_seqlen_kv": 3}, r"got 4 and 3"),
        ([0, 4, 8], {"batch_size": 0}, r"must be positive; got 0 and 4"),
        ([0, 4, 8], {"qkv_format": "sbhd"}, r"must be 'thd'.*got 'sbhd'"),
    ],
)
def test_wrong_borders_are_refused(borders, changes, message):
    with pytest.raises(ShapeError, match=message):
        packed(borders, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedSeqParams.from_lengths([[3, 1], [5]]), r"must have the same sum; got sums \[4, 5\]"),
        (lambda: PackedSeqParams.from_lengths([]), r"got sums \[\]"),
        (lambda: PackedSeqParams.from_lengths([[]]), r"must be positive; got 1 and 0"),
        (lambda: PackedSeqParams.from_lengths([[2, 0, 2]]), r"no document is empty"),
        (lambda: PackedSeqParams.from_documents(torch.tensor([[0, 1, 0]])), r"must not decrease along a row"),
        (
            lambda: PackedSeqParams.from_documents(torch.tensor([0, 1])),
            r"int32 or int64 \[B, S\]; got torch.int64 \[2\]",
        ),
        (lambda: PackedSeqParams.from_documents(torch.zeros(2, 3)), r"got torch.float32 \[2, 3\]"),
        (lambda: PackedSeqParams.from_documents(torch.zeros(0, 3, dtype=torch.int64)), r"got torch.int64 \[0, 3\]"),
    ],
)
def test_lengths_and_documents_that_fill_no_rows_are_refused(make, message):
    with pytest.raises(ShapeError, match=message):
        make()
