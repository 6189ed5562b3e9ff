"""The contrastive loss against torch's cross entropy, and over ranks against one process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from megalith.errors import ShapeError
from megalith.models import contrastive
from megalith.models.contrastive import (
    contrastive_losses,
    gather_passages,
    in_batch_contrastive_loss,
    places_of_positives,
)
from tests.rank_pool import ranks

N, P, D, TEMPERATURE = 6, 3, 5, 0.3


def embeddings(num_rows: int = N) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    given = torch.randn(num_rows, 1 + P, D, dtype=torch.float64, generator=random)
    return given[:, 0].clone().requires_grad_(), given[:, 1:].clone().requires_grad_()


@pytest.fixture(params=[1 << 24, 40, 1])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All similarities at once, some rows, and a single row."""
    monkeypatch.setattr(contrastive, "_AT_ONCE", request.param)
    return


def test_losses_and_gradients_are_those_of_torchs_cross_entropy(at_once):
    queries, passages = embeddings()
    found = in_batch_contrastive_loss(queries, passages, temperature=TEMPERATURE)
    scores = queries @ passages.flatten(0, 1).t() / TEMPERATURE
    want = cross_entropy(scores, torch.arange(N) * P, reduction="none")
    torch.testing.assert_close(found, want, rtol=1e-13, atol=0)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    of_found = torch.autograd.grad(found @ weights, (queries, passages))
    of_want = torch.autograd.grad(want @ weights, (queries, passages))
    torch.testing.assert_close(of_found, of_want, rtol=1e-12, atol=1e-14)


def test_answers_that_are_known_are_no_negatives(at_once):
    queries, passages = embeddings()
    texts = torch.arange(N * (1 + P)).view(N, 1 + P)
    texts[1, 1] = texts[0, 1]  # rows 0 and 1 have the same positive
    texts[3, 0] = texts[2, 0]  # rows 2 and 3 have the same query
    texts[4, 3] = texts[5, 1]  # a hard negative of row 4 is the positive of row 5
    found = in_batch_contrastive_loss(queries, passages, temperature=TEMPERATURE, text_ids=texts)
    # query -> the columns of other passages that answer it; a hard negative remains one for its own row's query
    left_out = {0: [3], 1: [0], 2: [9], 3: [6], 5: [14]}
    scores = queries @ passages.flatten(0, 1).t() / TEMPERATURE
    for row in range(N):
        kept = [column for column in range(N * P) if column not in left_out.get(row, [])]
        want = cross_entropy(scores[row, kept], torch.tensor(kept.index(row * P)))
        torch.testing.assert_close(found[row], want, rtol=1e-13, atol=0)


def test_half_precision_is_compared_in_float32():
    queries, passages = (x.detach().bfloat16() for x in embeddings())
    found = in_batch_contrastive_loss(queries, passages, temperature=TEMPERATURE)
    want = in_batch_contrastive_loss(queries.float(), passages.float(), temperature=TEMPERATURE)
    assert found.dtype == torch.float32
    assert torch.equal(found, want)


def of_ranks() -> tuple[Tensor, Tensor, Tensor]:
    queries, passages = embeddings(4)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    texts = torch.arange(4 * (1 + P)).view(4, 1 + P)
    texts[3, 1] = texts[0, 1]  # known answers may be on another rank
    losses = in_batch_contrastive_loss(
        queries[mine], passages[mine], temperature=TEMPERATURE, text_ids=texts[mine], group=dist.group.WORLD
    )
    losses.sum().backward()
    assert queries.grad is not None
    assert passages.grad is not None
    return losses.detach(), queries.grad[mine], passages.grad[mine]


def test_ranks_compare_their_queries_with_the_passages_of_all():
    queries, passages = embeddings(4)
    texts = torch.arange(4 * (1 + P)).view(4, 1 + P)
    texts[3, 1] = texts[0, 1]
    losses = in_batch_contrastive_loss(queries, passages, temperature=TEMPERATURE, text_ids=texts)
    losses.sum().backward()
    found = [torch.cat(parts) for parts in zip(*ranks(2, of_ranks), strict=True)]
    torch.testing.assert_close(found, [losses.detach(), queries.grad, passages.grad], rtol=1e-12, atol=1e-14)


def test_queries_are_compared_with_passages_of_their_batch_alone(at_once):
    queries, passages = embeddings()
    places = torch.tensor([3, 1, 0, 4, 2, -1])
    gathered = gather_passages(passages, torch.arange(N * (1 + P)).view(N, 1 + P), places, None)
    found = {
        size: contrastive_losses(queries[:5], torch.arange(5), gathered, TEMPERATURE, size) for size in (2, 5, 9, None)
    }
    of_order = [2, 1, 4, 0, 3]  # rows by place
    # batches of two, and the fifth sample with the fourth; all five, also if a batch has more
    cases = [(2, [0, 1], [0, 1]), (2, [2, 3], [2, 3]), (2, [3, 4], [4])]
    cases += [(size, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]) for size in (5, 9, None)]
    for size, batch, own in cases:
        rows = [of_order[place] for place in batch]
        want = in_batch_contrastive_loss(queries[rows], passages[rows], temperature=TEMPERATURE)
        of_own = [batch.index(place) for place in own]
        torch.testing.assert_close(found[size][[rows[n] for n in of_own]], want[of_own], rtol=1e-13, atol=0)


def test_places_count_passages_that_are_at_least_as_similar(at_once):
    queries = torch.tensor([[1.0], [1.0], [-1.0]])
    passages = torch.tensor([[[3.0], [5.0]], [[3.0], [4.0]], [[9.0], [-2.0]]])
    texts = torch.tensor([[0, 10, 11], [1, 12, 13], [2, 14, 15]])
    rows = torch.arange(3)
    gathered = gather_passages(passages, texts, torch.zeros(3, dtype=torch.long), None)
    # 9, 5, 4, 3, 3, -2: the other passage with the same similarity is ahead too
    assert places_of_positives(queries, rows, gathered).tolist() == [5, 5, 6]
    texts[1, 1] = texts[0, 1]
    gathered = gather_passages(passages, texts, torch.zeros(3, dtype=torch.long), None)
    assert places_of_positives(queries, rows, gathered).tolist() == [4, 4, 6]
    gathered = gather_passages(passages, texts, torch.tensor([0, 3, -1]), None)
    assert places_of_positives(queries[:2], rows[:2], gathered).tolist() == [3, 3]


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_model_whose_embeddings_are_all_the_same_finds_nothing(value):
    queries, passages = torch.full((N, D), value), torch.full((N, P, D), value)
    texts = torch.arange(N * (1 + P)).view(N, 1 + P)
    gathered = gather_passages(passages, texts, torch.zeros(N, dtype=torch.long), None)
    assert places_of_positives(queries, torch.arange(N), gathered).tolist() == [N * P] * N


def test_no_queries_have_no_losses():
    queries, passages = embeddings()
    texts = torch.arange(N * (1 + P)).view(N, 1 + P)
    gathered = gather_passages(passages, texts, torch.zeros(N, dtype=torch.long), None)
    none = torch.arange(0)
    found = contrastive_losses(queries[:0], none, gathered, TEMPERATURE)
    assert found.shape == (0,)
    assert places_of_positives(queries[:0], none, gathered).shape == (0,)
    found.sum().backward()
    assert passages.grad is not None
    assert not passages.grad.any()


@pytest.mark.parametrize(
    ("queries", "passages", "text_ids", "match"),
    [
        ((4, 5), (4, 5), None, r"passages \[N, P, D\] .* got \[4, 5\] and \[4, 5\]"),
        ((4, 5), (3, 2, 5), None, r"got \[4, 5\] and \[3, 2, 5\]"),
        ((4, 5), (4, 0, 5), None, r"got \[4, 5\] and \[4, 0, 5\]"),
        ((4, 5), (4, 2, 5), (4, 2), r"text_ids must be \[N, 1 \+ P\], \[4, 3\]; got \[4, 2\]"),
    ],
)
def test_other_shapes_are_refused(queries, passages, text_ids, match):
    ids = None if text_ids is None else torch.zeros(text_ids, dtype=torch.long)
    with pytest.raises(ShapeError, match=match):
        in_batch_contrastive_loss(torch.zeros(queries), torch.zeros(passages), temperature=1.0, text_ids=ids)
