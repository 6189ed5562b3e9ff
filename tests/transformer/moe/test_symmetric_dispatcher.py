"""Experts behind symmetric memory (a stand-in with torch's interface) compute what one process does."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.config import DispatchConfig
from megalith.errors import ConfigError, MissingDependencyError, ShapeError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.expert.symmetric_a2a import (
    ExchangeSizes,
    SymmetricA2A,
    _Nvshmem,
    begin_symmetric_dispatch,
    end_symmetric_dispatch,
    nvshmem_memory,
    symmetric_combine,
)
from megalith.parallel.parameters import local
from megalith.torch_compat.distributed import symmetric_memory
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.moe_layer import MoELayer
from tests.parallel.expert.symmetric_standin import StandInMemory
from tests.parallel.groups import collection
from tests.rank_pool import RankError, ranks
from tests.transformer.moe.layers import layer_of, rows_of
from tests.transformer.shapes import options

H, E, K = 16, 8, 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # the order of sums may differ
EVEN, UNEVEN = [6, 6, 6, 6], [13, 0, 5, 1]
SIGMOID = {"score_function": "sigmoid", "bias": True}
# settings of model.moe and parallel.dispatch, number of tokens on each rank
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "dropless": ({}, {}, EVEN),
    "uneven": ({}, {}, UNEVEN),
    "dropping": ({"capacity": {"factor": 0.5}}, {}, EVEN),
    "shared": ({"shared_ffn_hidden_size": 8}, {}, EVEN),
    "latents": ({"latent_size": 5}, {}, EVEN),
    "all to the same experts": ({"router": SIGMOID}, {}, EVEN),
    "all to one expert": ({"router": SIGMOID, "top_k": 1}, {}, UNEVEN),
    "in turns": ({}, {"max_rows": 0.4}, EVEN),
    "in turns, all to the same experts": ({"router": SIGMOID}, {"max_rows": 0.4}, UNEVEN),
}


def exchange(max_tokens: int, *, top_k: int = K, size: int = H, dtype: torch.dtype = torch.float64) -> SymmetricA2A:
    W = dist.get_world_size()
    return SymmetricA2A(StandInMemory(collection(expert=W).ep), ExchangeSizes(W, E, top_k, max_tokens, size, dtype))


def built_with(a2a: SymmetricA2A | None, **dispatch: Any) -> BuildOptions:
    groups = collection(expert=dist.get_world_size())
    dispatch_config = DispatchConfig(method="symmetric", **dispatch)
    return BuildOptions(groups, torch.float64, dispatch=dispatch_config, symmetric_a2a=a2a)


def made(build: BuildOptions, **moe: Any) -> MoELayer:
    layer = layer_of(build, num_experts=E, **{"top_k": K, **moe})
    if layer.gate.bias is not None:  # experts 1, 2 and 3, on the first rank; with top_k 1, expert 1
        with torch.no_grad():
            local(layer.gate.bias)[1:4] += torch.tensor([40.0, 30.0, 30.0])
    return layer


def tokens_of(counts: list[int], rank: int, batch: int = 0) -> Tensor:
    return rows_of(10 * batch + rank, counts[rank], 1, H).requires_grad_()


def weighted_sum(y: Tensor) -> Tensor:
    return (y * rows_of(100, *y.shape)).sum()


def gradients(layer: MoELayer) -> dict[str, Tensor]:
    return {name: local(p.grad) if hasattr(p.grad, "to_local") else p.grad for name, p in layer.named_parameters()}


def results(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    y = layer(x, LayerContext())
    weighted_sum(y).backward()
    return {"y": y.detach(), "dx": x.grad, **gradients(layer)}


def on_ranks(moe: dict[str, Any], dispatch: dict[str, Any], counts: list[int]) -> dict[str, Tensor]:
    W = dist.get_world_size()
    a2a = exchange(max(counts[:W]), top_k=moe.get("top_k", K), size=moe.get("latent_size", H))
    return results(made(built_with(a2a, **dispatch), **moe), tokens_of(counts, dist.get_rank()))


def compare(found: list[dict[str, Tensor]], alone: list[dict[str, Tensor]]) -> None:
    """Compares each rank's results with those of one process for the tokens of each rank."""
    ep = len(found)
    for rank, mine in enumerate(found):
        for name, got in mine.items():
            want = alone[rank][name]
            if name.startswith("experts."):  # all tokens that were sent to these experts
                want = sum(each[name] for each in alone).chunk(ep)[rank]
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}", **EXACT)


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gives_what_one_process_gives(ep, case):
    moe, dispatch, counts = CASES[case]
    alone = [results(made(options(), **moe), tokens_of(counts, rank)) for rank in range(ep)]
    compare(ranks(ep, on_ranks, moe, dispatch, counts), alone)


def two_at_a_time(layers: list[MoELayer], batches: list[Tensor]) -> dict[str, Tensor]:
    """Two micro-batches go through all layers before the first backward."""
    outputs = []
    for x in batches:
        y = x
        for layer in layers:
            y = y + layer(y, LayerContext())
        outputs.append(y)
    for y in outputs:
        weighted_sum(y).backward()
    found = {f"y{number}": y.detach() for number, y in enumerate(outputs)}
    found |= {f"dx{number}": x.grad for number, x in enumerate(batches)}
    return found | {f"{name} {at}": grad for at, each in enumerate(layers) for name, grad in gradients(each).items()}


def two_at_a_time_on_ranks() -> dict[str, Tensor]:
    build = built_with(exchange(max(EVEN)))
    return two_at_a_time([made(build), made(build)], [tokens_of(EVEN, dist.get_rank(), batch) for batch in (1, 2)])


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_and_micro_batches_in_flight_share_the_buffers(ep):
    alone = [
        two_at_a_time([made(options()), made(options())], [tokens_of(EVEN, rank, batch) for batch in (1, 2)])
        for rank in range(ep)
    ]
    compare(ranks(ep, two_at_a_time_on_ranks), alone)


def compiled_on_ranks(counts: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results of the layer as it is, and traced by torch.compile; those of the second call."""
    build, x = built_with(exchange(max(counts))), tokens_of(counts, dist.get_rank())
    plain, traced = results(made(build), x), made(build)
    traced.compile(backend="aot_eager")
    for _ in range(2):
        traced.zero_grad()
        found = results(traced, tokens_of(counts, dist.get_rank()))
    return plain, found


def test_torch_compile_leaves_the_exchange_as_it_is():
    for plain, traced in ranks(2, compiled_on_ranks, EVEN):
        for name, want in plain.items():
            torch.testing.assert_close(traced[name], want, **EXACT)


def there_and_back() -> dict[str, Tensor]:
    """Dispatches bfloat16 rows, one for each expert and two that are not sent, and combines them."""
    a2a, rank = exchange(E + 2, top_k=1, size=3, dtype=torch.bfloat16), dist.get_rank()
    rows = torch.arange(3.0 * (E + 2), dtype=torch.bfloat16).view(E + 2, 3).requires_grad_()
    weights = (torch.arange(E + 2.0) + rank + 1 / 3).requires_grad_()
    left = begin_symmetric_dispatch(a2a, rows, weights, torch.ones(E, dtype=torch.int32))
    there, weights_there, way = end_symmetric_dispatch(a2a, left)
    back = symmetric_combine(a2a, there, way)
    ((weights_there / 3).sum() + 2 * back.sum()).backward()
    return {
        "weights": weights_there.detach(),
        "back": back.detach(),
        "dweights": weights.grad,
        "drows": rows.grad,
        "counts": way.rows_per_expert,
    }


def test_weights_of_bfloat16_rows_keep_their_float32_and_rows_that_are_not_sent_have_no_gradient():
    for rank, found in enumerate(ranks(2, there_and_back)):
        experts = torch.arange(4 * rank, 4 * rank + 4)
        want = torch.stack([experts + source + 1 / 3 for source in range(2)], dim=1).flatten()
        assert torch.equal(found["weights"], want.float())
        assert torch.equal(found["back"], torch.arange(3.0 * E, dtype=torch.bfloat16).view(E, 3))
        assert torch.equal(found["dweights"], torch.tensor([1 / 3] * E + [0.0] * 2))
        assert torch.equal(found["drows"], torch.tensor([[2.0] * 3] * E + [[0.0] * 3] * 2, dtype=torch.bfloat16))
        assert found["counts"].tolist() == [2] * 4
        assert found["counts"].dtype == torch.int32


class Hasty(StandInMemory):
    """Skips one barrier, after ``after`` others."""

    def __init__(self, after: int) -> None:
        super().__init__(collection(expert=dist.get_world_size()).ep)
        self.after = after

    def barrier(self) -> None:
        self.after -= 1
        if self.after != -1:
            super().barrier()


def layer_without_a_barrier(after: int) -> None:
    a2a = SymmetricA2A(Hasty(after), ExchangeSizes(2, E, K, 6, H, torch.float64))
    results(made(built_with(a2a)), tokens_of(EVEN, dist.get_rank()))


def two_dispatches(after: int) -> Tensor:
    """The rows of the second of two dispatches with nothing in between."""
    a2a = SymmetricA2A(Hasty(after), ExchangeSizes(2, E, 1, E, H, torch.float64))
    rows, counts = rows_of(0, E, H), torch.ones(E, dtype=torch.int32)
    for _ in range(2):
        left = begin_symmetric_dispatch(a2a, rows, rows[:, 0], counts)
        arrived, _, _ = end_symmetric_dispatch(a2a, left)
    return arrived


@pytest.mark.parametrize("after", range(6))  # two for the constructor, then dispatch, combine, and their gradients
def test_no_barrier_of_a_layer_can_be_left_out(after):
    with pytest.raises(RankError, match="no barrier since"):
        ranks(2, layer_without_a_barrier, after)


def test_a_dispatch_after_a_dispatch_waits_until_the_first_is_read():
    for rank, arrived in enumerate(ranks(2, two_dispatches, 100)):
        assert torch.equal(arrived, rows_of(0, E, H)[4 * rank : 4 * rank + 4].repeat_interleave(2, dim=0))
    with pytest.raises(RankError, match="written while peers read"):
        ranks(2, two_dispatches, 3)


def refused_rows(num_tokens: int, dtype: torch.dtype) -> str:
    layer = made(built_with(exchange(6)))
    with pytest.raises(ShapeError) as caught:
        layer.to(dtype)(rows_of(0, num_tokens, 1, H).to(dtype), LayerContext())
    return str(caught.value)


def test_rows_that_do_not_fit_the_buffers_are_refused():
    for message in ranks(2, refused_rows, 7, torch.float64):
        assert "has room for 18 rows of torch.float64, one micro-batch" in message
        assert "got 21 of torch.float64; use fewer tokens at a time, or parallel.dispatch.method=all_to_all" in message
    assert all("got 18 of torch.float32" in message for message in ranks(2, refused_rows, 6, torch.float32))


def something_between() -> None:
    a2a = exchange(E, top_k=1)
    rows, counts = torch.zeros(E, H, dtype=torch.float64), torch.ones(E, dtype=torch.int32)
    first, _ = (begin_symmetric_dispatch(a2a, rows, rows[:, 0], counts) for _ in range(2))
    end_symmetric_dispatch(a2a, first)


def test_rows_that_another_dispatch_has_overwritten_are_not_read():
    with pytest.raises(RankError, match=r"another batch has since been sent"):
        ranks(2, something_between)


def test_alone_nothing_travels():
    symmetric = options(dispatch=DispatchConfig(method="symmetric"))
    for moe in ({}, {"capacity": {"factor": 0.5}}):
        found, want = (results(made(build, **moe), tokens_of(EVEN, 0)) for build in (symmetric, options()))
        compare([found], [want])


def without_an_exchange() -> str:
    with pytest.raises(ConfigError) as caught:
        made(built_with(None))
    return str(caught.value)


def test_without_an_exchange_it_is_refused():
    assert all("pass one, or use all_to_all" in message for message in ranks(2, without_an_exchange))


def test_without_gpus_or_nvshmem_the_error_says_what_to_use(monkeypatch):
    with pytest.raises(ConfigError, match=r"GPU memory, but this run is on cpu; use .*method=all_to_all"):
        nvshmem_memory(None, torch.device("cpu"))
    monkeypatch.setattr(symmetric_memory, "is_nvshmem_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"needs NVSHMEM, .*pip install.*or use .*method=all_to_all"):
        nvshmem_memory(None, torch.device("cuda"))


@pytest.mark.parametrize(
    ("said", "kind"), [("nvshmem_malloc failed", torch.OutOfMemoryError), ("another defect", RuntimeError)]
)
def test_of_torchs_errors_that_alone_which_says_so_is_a_lack_of_memory(said, kind, monkeypatch):
    def fail(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError(said)

    monkeypatch.setattr(symmetric_memory, "empty", fail)
    with pytest.raises(RuntimeError, match=said) as caught:
        _Nvshmem(None, torch.device("cpu")).empty((4, 8), torch.float64)
    assert type(caught.value) is kind


def torchs_calls() -> float:
    """Calls the kernels with CPU tensors, which they do not support; returns the seconds rank 1 waited for rank 0."""
    memory = _Nvshmem(dist.group.WORLD, torch.device("cpu"))
    rows, splits = torch.zeros(4, 8), torch.zeros(2, E, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"'symm_mem::all_to_all_vdev_2d' with arguments from the 'CPU'"):
        memory.all_to_all_vdev_2d(rows, rows, splits[0], splits)
    with pytest.raises(
        NotImplementedError, match=r"'symm_mem::all_to_all_vdev_2d_offset' with arguments from the 'CPU"
    ):
        memory.all_to_all_vdev_2d_offset(rows, rows, splits, splits)
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(0.2)
    memory.barrier()
    return time.monotonic() - begin


def test_torch_has_the_kernels_that_are_called_and_a_barrier_waits_for_all_ranks():
    assert min(ranks(2, torchs_calls)) > 0.1
