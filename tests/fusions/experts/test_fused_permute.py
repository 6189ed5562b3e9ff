"""fused_permute and its row map: rows by hand, gaps, drops, the inverse, and refusals."""

import pytest
import torch

from megalith.errors import ConfigError, ShapeError
from megalith.fusions import RowMap, permute, row_map, unpermute
from tests.kernel_reports import in_interpreter

PATHS = ("triton", "blocked", "reference")
NAN = float("nan")


def tokens_of(num: int, device: str, H: int = 2) -> torch.Tensor:
    """Token t is (t + 1, t + 1, ...), so that a row identifies its token."""
    return torch.arange(1.0, num + 1, device=device)[:, None].repeat(1, H)


@pytest.mark.parametrize("path", PATHS)
def test_a_map_worked_out_by_hand(path, device):
    routing_map = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 1]], dtype=torch.bool, device=device)
    probs = torch.tensor([[0.5, 0.0, 0.25], [1.0, 9.0, 9.0], [0.0, 0.0, 2.0]], device=device)
    permuted, weights, rows = permute(tokens_of(3, device), routing_map, probs, backend=path)
    assert permuted[:, 0].tolist() == [1.0, 2.0, 1.0, 3.0]
    assert weights.tolist() == [0.5, 1.0, 0.25, 2.0]
    assert [x.tolist() for x in rows] == [[[0, -1, 2], [1, -1, -1], [-1, -1, 3]], [0, 1, 0, 2], [2, 0, 2]]
    assert {x.dtype for x in rows} == {torch.int32}
    y = unpermute(permuted, rows, (3, 2), probs, backend=path)
    assert y[:, 0].tolist() == [0.75, 2.0, 6.0]


@pytest.mark.parametrize("path", PATHS)
def test_indices_and_their_map_give_the_same_rows(path, device):
    torch.manual_seed(0)
    indices = torch.rand(50, 12, device=device).argsort(dim=1)[:, :4]
    routing_map = torch.zeros(50, 12, dtype=torch.bool, device=device).scatter_(1, indices, True)
    of_indices, of_map = row_map(indices, num_experts=12, backend=path), row_map(routing_map, backend=path)
    assert of_indices.token_of.equal(of_map.token_of)
    assert of_indices.row_of.equal(of_map.row_of.gather(1, indices))
    assert of_indices.rows_per_expert.equal(of_map.rows_per_expert)
    x = torch.randn(200, 24, device=device, dtype=torch.bfloat16)
    assert unpermute(x, of_indices, backend=path).equal(unpermute(x, of_map, backend=path))


@pytest.mark.parametrize("path", PATHS)
def test_each_expert_starts_at_a_multiple_and_gaps_are_zero(path, device):
    indices = torch.tensor([[0, 2], [0, -1], [0, 2], [2, 3]], dtype=torch.int32, device=device)
    weights = torch.full((4, 2), 0.5, device=device, requires_grad=True)
    tokens = tokens_of(4, device).requires_grad_()
    permuted, by_row, rows = permute(tokens, indices, weights, num_experts=3, pad_multiple=4, backend=path)
    assert rows.rows_per_expert.tolist() == [4, 0, 4]
    assert permuted[:, 0].tolist() == [1.0, 2.0, 3.0, 0.0, 1.0, 3.0, 4.0, 0.0]
    assert by_row.tolist() == [0.5, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.0]
    dy = torch.arange(8.0, device=device)
    dtokens, dweights = torch.autograd.grad([permuted, by_row], [tokens, weights], [dy[:, None].repeat(1, 2), dy])
    assert dtokens[:, 0].tolist() == [4.0, 1.0, 7.0, 6.0]
    assert dweights.tolist() == [[0.0, 4.0], [1.0, 0.0], [2.0, 5.0], [6.0, 0.0]]


@pytest.mark.parametrize("path", PATHS)
def test_rows_past_the_number_asked_for_are_dropped_and_rows_left_over_are_zero(path, device):
    routing_map = torch.ones(3, 2, dtype=torch.bool, device=device)
    permuted, _, rows = permute(tokens_of(3, device), routing_map, None, 4, backend=path)
    assert permuted[:, 0].tolist() == [1.0, 2.0, 3.0, 1.0]
    assert rows.rows_per_expert.tolist() == [3, 1]
    assert rows.row_of.tolist() == [[0, 3], [1, -1], [2, -1]]
    permuted, _, rows = permute(tokens_of(3, device), routing_map, None, 8, backend=path)
    assert permuted[:, 0].tolist() == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 0.0, 0.0]
    assert rows.rows_per_expert.tolist() == [3, 3]


@pytest.mark.parametrize("path", PATHS)
def test_garbage_in_gaps_reaches_nobody(path, device):
    rows = row_map(torch.tensor([[0], [1]], device=device), num_experts=2, pad_multiple=2, backend=path)
    permuted = torch.tensor([[1.0], [NAN], [2.0], [NAN]], device=device, requires_grad=True)
    probs = torch.tensor([[3.0], [5.0]], device=device, requires_grad=True)
    y = unpermute(permuted, rows, None, probs, backend=path)
    assert y.tolist() == [[3.0], [10.0]]
    dpermuted, dprobs = torch.autograd.grad(y, [permuted, probs], torch.tensor([[NAN], [1.0]], device=device))
    assert str(dpermuted.tolist()) == "[[nan], [0.0], [5.0], [0.0]]"
    assert str(dprobs.tolist()) == "[[nan], [2.0]]"


@pytest.mark.parametrize("path", PATHS)
def test_a_token_without_an_expert_gets_zeros_and_no_tokens_give_gaps(path, device):
    rows = row_map(torch.tensor([[-1], [0]], device=device), 1, num_experts=1, backend=path)
    assert unpermute(torch.ones(1, 3, device=device), rows, backend=path).tolist() == [[0.0] * 3, [1.0] * 3]
    none = torch.zeros(0, 4, dtype=torch.bool, device=device)
    permuted, _, rows = permute(torch.ones(0, 3, device=device), none, None, 2, backend=path)
    assert permuted.tolist() == [[0.0] * 3] * 2
    assert rows.token_of.tolist() == [-1, -1]
    assert unpermute(permuted, rows, backend=path).shape == (0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_permute_and_unpermute_are_each_others_adjoint(path, device):
    torch.manual_seed(0)
    routing_map = torch.rand(30, 5, device=device) < 0.4
    x = torch.randn(30, 16, device=device)
    permuted, _, rows = permute(x, routing_map, pad_multiple=8, backend=path)
    y = torch.randn_like(permuted)
    left, right = (permuted * y).sum(), (x * unpermute(y, rows, backend=path)).sum()
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_experts", [5, 100])  # a tile of tokens at once, and block by block
def test_many_tiles_of_tokens_place_as_one_would(num_experts, path, device):
    torch.manual_seed(0)
    indices = torch.randint(-1, num_experts, (700, 2), device=device)
    rows = row_map(indices, num_experts=num_experts, pad_multiple=16, backend=path)
    start = 0
    for expert, size in enumerate(rows.rows_per_expert.tolist()):
        owners = (indices == expert).nonzero()[:, 0]
        assert size == -(-len(owners) // 16) * 16
        assert rows.token_of[start : start + len(owners)].equal(owners.int())
        assert (rows.token_of[start + len(owners) : start + size] == -1).all()
        start += size
    assert start == len(rows.token_of)


@pytest.mark.parametrize("path", PATHS)
def test_leading_dimensions_come_back(path, device):
    tokens = torch.randn(4, 3, 8, device=device)
    permuted, _, rows = permute(tokens, torch.ones(12, 1, dtype=torch.bool, device=device), backend=path)
    assert permuted.shape == (12, 8)
    assert unpermute(permuted, rows, tokens.shape, backend=path).equal(tokens)


@in_interpreter
def test_rows_are_addressed_in_64_bits(tmp_path):
    # rows 2^30 apart in the upper half of a sparse file; a 32-bit product would wrap into the lower half, all zero
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 4, dtype=torch.float16)
    far = memory.as_strided((3, 4), (2**30, 1), 2**31).fill_(2.0)
    rows = row_map(torch.tensor([[0], [1], [0]]), 3, num_experts=2)
    permuted, _, _ = permute(far, torch.tensor([[0], [1], [0]]), None, 3, num_experts=2, backend="triton")
    leaf, probs = far.detach().requires_grad_(), torch.ones(3, 1, requires_grad=True)
    y = unpermute(leaf, rows, None, probs, backend="triton")
    dpermuted, dprobs = torch.autograd.grad(y, [leaf, probs], far)
    assert permuted.tolist() == y.tolist() == dpermuted.tolist() == [[2.0] * 4] * 3
    assert dprobs.tolist() == [[16.0]] * 3


@pytest.mark.parametrize("path", PATHS)
def test_nothing_waits_for_the_device_when_the_rows_are_given(path, device):
    # a full-graph trace would fail if a number were read from the device
    torch.compiler.reset()

    def layer(tokens, indices, probs):
        permuted, weights, rows = permute(tokens, indices, probs, 24, num_experts=4, pad_multiple=2, backend=path)
        return unpermute(permuted * weights[:, None], rows, tokens.shape, backend=path)

    given = (
        torch.randn(8, 16, device=device),
        torch.randint(0, 4, (8, 2), device=device),
        torch.rand(8, 2, device=device),
    )
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(got, given[0] * given[2].sum(dim=1, keepdim=True))


MAP, X = torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 4)
ROWS = RowMap(
    torch.zeros(3, 1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
)


@pytest.mark.parametrize(
    ("given", "settings", "error", "message"),
    [
        ((X.int(), MAP), {}, ShapeError, r"tokens must be float16, .*got torch.int32"),
        (
            (X, MAP[:2]),
            {},
            ShapeError,
            r"one for each row of routing_map; got tokens \[3, 4\] and routing_map \[2, 2\]",
        ),
        ((X, MAP, X), {}, ShapeError, r"probs must be \[3, 2\], one for each entry of routing_map; got \[3, 4\]"),
        ((X, MAP.to("meta")), {}, ShapeError, r"got tokens on cpu, routing_map on meta"),
        ((X, MAP.float()), {}, ShapeError, r"routing_map must be int32 or int64; got torch.float32"),
        ((X, MAP.int()), {}, ConfigError, r"num_experts must be 1 or more for indices; got None \(.* bool\)"),
        ((X, MAP), {"num_experts": 2}, ConfigError, r"num_experts is only for indices; leave it out"),
        ((X, MAP), {"pad_multiple": 0}, ConfigError, r"pad_multiple must be 1 or more rows; got 0"),
        ((X, MAP, None, -1), {}, ConfigError, r"num_out_tokens must be 0 or more rows, .*got -1"),
        ((X, MAP[:, :, None]), {}, ShapeError, r"routing_map must be \[T, E\], or indices \[T, K\]; got \[3, 2, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_permute(given, settings, error, message):
    with pytest.raises(error, match=message):
        permute(*given, **settings)


@pytest.mark.parametrize(
    ("permuted", "restore_shape", "probs", "message"),
    [
        (torch.ones(4, 8), None, None, r"permuted_tokens must be \[5, H\], .*each row of row_map; got \[4, 8\]"),
        (torch.ones(5, 8), (2, 8), None, r"restore_shape must hold 3 tokens of 8 columns; got \[2, 8\]"),
        (torch.ones(5, 8), (), None, r"restore_shape must hold .*got \[\]"),
        (torch.ones(5, 8), None, torch.ones(5), r"probs must be \[3, 1\], one for each slot of row_map; got \[5\]"),
        (torch.ones(5, 8).long(), None, None, r"permuted_tokens must be float16"),
    ],
)
def test_what_does_not_fit_is_refused_by_unpermute(permuted, restore_shape, probs, message):
    with pytest.raises(ShapeError, match=message):
        unpermute(permuted, ROWS, restore_shape, probs)
