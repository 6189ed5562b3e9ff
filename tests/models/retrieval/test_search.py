"""Exact search: the same as sorting all inner products, whatever is in memory at a time."""

import numpy as np
import pytest
import torch

from megalith.errors import ConfigError, DataError, ShapeError
from megalith.models.retrieval import search as search_module
from megalith.models.retrieval.search import search
from tests.models.retrieval.indexes import embeddings, made


def sorted_by_numpy(passages, queries, k):
    """Scores and ids of the best k of all passages, of equal ones the lowest id first."""
    scores = (queries.double().numpy() @ passages.double().numpy().T).astype(np.float32)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, ids, 1), ids


def agree(found, want):
    scores, ids = found
    assert (scores.dtype, ids.dtype) == (torch.float32, torch.int64)
    np.testing.assert_array_equal(ids.numpy(), want[1])
    np.testing.assert_array_equal(scores.numpy(), want[0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("elements", "scores"), [(1, 1), (24, 10), (1 << 22, 1 << 22)])
@pytest.mark.parametrize("k", [1, 20, 50])
def test_it_finds_what_sorting_all_passages_finds(k, elements, scores, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(search_module, "_ELEMENTS_AT_ONCE", elements)
    monkeypatch.setattr(search_module, "_SCORES_AT_ONCE", scores)
    passages, queries = embeddings(), embeddings(11, seed=1)
    index = made(tmp_path / "index", passages, dtype)
    stored = passages.to(getattr(torch, dtype))
    want = sorted_by_numpy(stored, queries, k)
    assert k == 1 or (want[0][:, 0] == want[0][:, 1]).any()  # there are equal scores
    agree(search(index, queries, k), want)


def test_of_equal_scores_the_lowest_id_comes_first(tmp_path):
    index = made(tmp_path / "index", torch.ones(40, 3))
    scores, ids = search(index, torch.tensor([[1.0, 0.5, 0.0], [-1.0, 0.0, 0.0]]), 25)
    assert ids.tolist() == [list(range(25))] * 2
    assert scores.tolist() == [[1.5] * 25, [-1.0] * 25]


def test_negative_zero_is_not_below_zero(tmp_path):
    index = made(tmp_path / "index", torch.tensor([[-1e-30], [1e-30], [-1.0], [1.0]]))
    # the first two products are -0.0 and 0.0 in float32
    agree(search(index, torch.tensor([[1e-30]]), 4), ([np.float32([1e-30, 0, 0, -1e-30])], [[3, 0, 1, 2]]))


def test_scores_of_every_size_and_sign_keep_their_order(tmp_path):
    values = torch.tensor([1e-45, -1e-45, 1e38, -1e38, 3.4e38, 0.0, 1.0, -1.0, 1 + 2**-23, -1 - 2**-23]).unsqueeze(1)
    index = made(tmp_path / "index", values)
    agree(search(index, torch.ones(1, 1), 10), sorted_by_numpy(values, torch.ones(1, 1), 10))


def test_a_query_finds_the_same_alone_as_with_others(tmp_path):
    index, queries = made(tmp_path / "index", embeddings(300, 33)), embeddings(40, 33, seed=1)
    scores, ids = search(index, queries, 9)
    for row, query in enumerate(queries):
        agree(search(index, query.unsqueeze(0), 9), (scores[row : row + 1].numpy(), ids[row : row + 1].numpy()))


def test_a_small_index_has_all_its_passages_in_the_result(tmp_path):
    passages, queries = embeddings(5), embeddings(3, seed=1)
    agree(search(made(tmp_path / "index", passages), queries, 99), sorted_by_numpy(passages, queries, 5))


def test_no_queries_find_nothing(tmp_path):
    scores, ids = search(made(tmp_path / "index", embeddings()), torch.empty(0, 8), 4)
    assert (len(scores), len(ids)) == (0, 0)


def test_progress_counts_passages(tmp_path, monkeypatch):
    monkeypatch.setattr(search_module, "_ELEMENTS_AT_ONCE", 5 * 8)
    seen = []
    search(made(tmp_path / "index", embeddings(12)), embeddings(1), 1, lambda *each: seen.append(each))
    assert seen == [(0, 12), (5, 12), (7, 12), (12, 12)]  # seven passages in each file


def test_other_queries_are_refused(tmp_path):
    index = made(tmp_path / "index", embeddings())
    with pytest.raises(ConfigError, match="must be 1 or more; got 0"):
        search(index, torch.ones(1, 8), 0)
    for wrong in (torch.ones(8), torch.ones(1, 9)):
        with pytest.raises(ShapeError, match=r"must be \[Q, D\] with D = 8"):
            search(index, wrong, 1)
    with pytest.raises(ShapeError, match="must be finite"):
        search(index, torch.full((1, 8), float("nan")), 1)


def test_a_file_that_vanishes_or_shrinks_in_between_is_an_error(tmp_path):
    index = made(tmp_path / "index", embeddings())
    (tmp_path / "index" / "embeddings-00003.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=r"embeddings-00003.safetensors is damaged"):
        search(index, torch.ones(1, 8), 1)
