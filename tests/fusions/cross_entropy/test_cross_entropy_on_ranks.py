"""Cross entropy over a vocabulary split over gloo ranks, with and without the projection, matches one rank."""

import contextlib
from collections.abc import Hashable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from megalith import fusions
from megalith.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from megalith.optional import triton_interprets
from megalith.topology import collectives
from megalith.torch_compat.distributed import all_gather_into
from tests.rank_pool import ranks
from tests.sampling import sampled

T, H = 6, 8
SINGLE = 4e-6  # float32 compared with float64
EVERYTHING = {"label_smoothing": 0.1, "smoothing": "nemo", "z_loss": 1e-2, "softcap": 20.0}
# total columns, words, options; over 4 ranks 127 words are 32, 32, 32 and 31, and 3 words leave one rank empty
SPLITS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "even": (1000, 1000, {}),
    "uneven": (127, 127, {"label_smoothing": 0.1}),
    "more ranks than words": (3, 3, {}),
    "padded": (128, 101, EVERYTHING),
    "padded past a whole rank": (128, 50, EVERYTHING),
}
# ranks are on CPUs, where kernels need the interpreter
PATHS = ("triton", "blocked", "reference") if triton_interprets() else ("blocked", "reference")


class Answer(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    num_gathers: int


def example(columns: int, words: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, target and the gradient of the loss; one row is peaked and one is ignored."""
    generator = torch.Generator().manual_seed(columns)
    x, weight = torch.randn(T, H, generator=generator), torch.randn(columns, H, generator=generator)
    target = torch.randint(words, (T,), generator=generator)
    weight[target[0]] = 3.0 * x[0]
    target[1] = -100
    return x, weight, target, torch.randn(T, generator=generator)


def own_part(columns: int) -> tuple[slice, dist.ProcessGroup | None]:
    """This rank's columns, split as by torch.chunk."""
    if not dist.is_initialized():
        return slice(0, columns), None
    length = -(-columns // dist.get_world_size())
    first = min(dist.get_rank() * length, columns)
    return slice(first, min(first + length, columns)), dist.group.WORLD


@contextlib.contextmanager
def gathers() -> Iterator[list[Tensor]]:
    """The tensors passed to all-gathers in the context."""
    given: list[Tensor] = []

    def gather(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        given.append(x)
        all_gather_into(out, x, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_into", gather)
        yield given


def on_this_rank(path: str, dtype: torch.dtype, projected: bool) -> dict[str, Answer]:
    """The loss of every split, and the gradients of this rank's tensors."""
    answers = {}
    for name, (columns, words, options) in SPLITS.items():
        x, weight, target, dloss = example(columns, words)
        x, weight, dloss = x.to(dtype), weight.to(dtype), dloss.to(dtype)
        part, group = own_part(columns)
        made = {"x": x, "weight": weight[part]} if projected else {"logits": linear(x, weight)[:, part]}
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in made.items()}
        compute = partial(fused_linear_cross_entropy, chunk_size=4) if projected else fused_vocab_parallel_cross_entropy
        with gathers() as given:
            loss = compute(*leaves.values(), target, group, vocab_size=words, backend=path, **options)
            loss.backward(dloss)
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
        answers[name] = Answer(loss.detach(), gradients, len(given))
    return answers


def whole(answers: list[Answer], leaf: str) -> Tensor:
    """The gradient of the tensor that all ranks hold together; that of x must be equal on all."""
    parts = [answer.gradients[leaf].double() for answer in answers]
    if leaf == "x":
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    return torch.cat(parts, dim=0 if leaf == "weight" else -1)


def pairs(one: tuple[int, str, str]) -> set[Hashable]:
    """The combinations that `make test` covers once; four ranks that import triton take too long."""
    num_ranks, path, of = one
    return set() if (num_ranks, path) == (4, "triton") else {(num_ranks, path), (path, of), (num_ranks, of)}


@pytest.mark.parametrize(
    ("num_ranks", "path", "of"), sampled([*product((1, 2, 4), PATHS, ("logits", "projected"))], pairs)
)
def test_ranks_agree_with_one_in_float64_and_with_each_other(num_ranks, path, of):
    projected = of == "projected"
    arguments = (path, torch.float32, projected)
    answers = [on_this_rank(*arguments)] if num_ranks == 1 else ranks(num_ranks, on_this_rank, *arguments)
    # products of H terms, and for x of all columns, precede the loss and follow its gradient
    loss_tolerance = {"rtol": SINGLE * (H if projected else 1), "atol": 1e-6 if projected else 1e-7}
    gradient_tolerance = {"rtol": SINGLE * (H if projected else 1), "atol": 1e-5 if projected else 1e-6}
    for name, want in on_this_rank("reference", torch.float64, projected).items():
        of_ranks = [answer[name] for answer in answers]
        for got in of_ranks:
            assert torch.equal(got.loss, of_ranks[0].loss)
            assert got.num_gathers == (1 if num_ranks > 1 else 0)
            assert got.loss[1] == 0.0
        torch.testing.assert_close(of_ranks[0].loss.double(), want.loss, **loss_tolerance)
        for leaf, expected in want.gradients.items():
            torch.testing.assert_close(whole(of_ranks, leaf), expected, **gradient_tolerance)
        words = SPLITS[name][1]
        padding = whole(of_ranks, "weight")[words:] if projected else whole(of_ranks, "logits")[:, words:]
        assert not padding.any()


def test_ranks_agree_in_float64_to_its_last_digits():
    answers = ranks(4, on_this_rank, "reference", torch.float64, False)
    for name, want in on_this_rank("reference", torch.float64, False).items():
        of_ranks = [answer[name] for answer in answers]
        torch.testing.assert_close(of_ranks[0].loss, want.loss, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(whole(of_ranks, "logits"), want.gradients["logits"], rtol=1e-12, atol=1e-14)


def by_two_collectives() -> tuple[Tensor, Tensor]:
    """The standard algorithm with two all-reduces in between: loss and gradient of this rank's columns."""
    x, weight, target, dloss = example(128, 128)
    target[1] = 5
    part, group = own_part(128)
    logits, top = fusions.calculate_logits_max(linear(x, weight)[:, part])
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    start, end = part.start, part.stop
    mask, column, sums, exponentials = fusions.calculate_predicted_logits(logits, target, top, start, end)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    softmax, loss = fusions.calculate_cross_entropy_loss(exponentials, sums)
    return loss, fusions.calculate_gradients(softmax, dloss, mask, column)


def test_the_two_collective_steps_agree_over_ranks():
    x, weight, target, dloss = example(128, 128)
    target[1] = 5
    logits = linear(x, weight).requires_grad_()
    want = fused_vocab_parallel_cross_entropy(logits, target)
    want.backward(dloss)
    answers = ranks(2, by_two_collectives)
    torch.testing.assert_close(answers[1][0], want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([part for _, part in answers], -1), logits.grad, rtol=1e-5, atol=1e-6)
