"""moe_layer: shared experts are computed while tokens travel, forward and backward, on real ranks of EP 2.

Tested in two ways: by the order of events on a rank, and by a rank that sends nothing before the other one's shared
experts are done, so that a rank that first waits for its rows would hang.
"""

import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megalith.topology.collectives import PendingAllToAll
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.moe_layer import MoELayer
from tests.rank_pool import RankError, ranks
from tests.transformer.moe.layers import rows_of
from tests.transformer.moe.test_token_dispatcher import H, layer_on_ranks

# rows and their weights, each of them sent and, as gradients, returned
ORDER = ["send", "send", "shared", "arrive", "arrive", "send", "send", "shared", "arrive", "arrive"]
PATIENCE = 10.0  # seconds


def forward_and_backward(on_event: Callable[[str], None], layer: MoELayer) -> None:
    """Reports the start and the end of each exchange, and each completion of the shared experts."""
    start, wait = PendingAllToAll.start, PendingAllToAll.wait

    def starting(self: PendingAllToAll, *args: Any) -> Any:
        on_event("send")
        return start(self, *args)

    def waiting(self: PendingAllToAll) -> None:
        wait(self)
        on_event("arrive")

    assert layer.shared_experts is not None
    layer.shared_experts.register_forward_hook(lambda *_: on_event("shared"))
    # the last of its weights to receive a gradient; those of gate and up are computed in one place
    layer.shared_experts.up_proj.weight.register_post_accumulate_grad_hook(lambda _: on_event("shared"))
    x = rows_of(dist.get_rank(), 6, 1, H).requires_grad_()
    with patch.object(PendingAllToAll, "start", starting), patch.object(PendingAllToAll, "wait", waiting):
        layer(x, LayerContext()).sum().backward()


def events() -> list[str]:
    found: list[str] = []
    forward_and_backward(found.append, layer_on_ranks((2, 1), {}, top_k=2, shared_ffn_hidden_size=8))
    return found


def test_shared_experts_are_computed_between_sending_and_receiving():
    assert ranks(2, events) == [ORDER] * 2


def one_holds_its_tokens_back(folder: Path, late: bool) -> list[str]:
    """Rank 1 sends nothing until rank 0 has computed its shared experts, in forward and again in backward."""
    layer, found = layer_on_ranks((2, 1), {}, top_k=2, shared_ffn_hidden_size=8), list[str]()

    def on_event(event: str) -> None:
        computed = folder / f"computed-{found.count('shared')}"
        if event == "shared" and dist.get_rank() == 0:
            computed.touch()
        if event == "send" and dist.get_rank() == 1:
            ends = time.monotonic() + PATIENCE
            while not computed.exists():
                assert time.monotonic() < ends, "rank 0 waits for rows before it computes its shared experts"
                time.sleep(0.01)
        found.append(event)

    with waiting_at_once(late):
        forward_and_backward(on_event, layer)
    return found


@contextmanager
def waiting_at_once(late: bool) -> Any:
    """If ``late``, injects the fault that the test must catch: an exchange that is waited for where it begins."""
    if not late:
        yield
        return
    start = PendingAllToAll.start

    def start_and_wait(self: PendingAllToAll, *args: Any) -> Any:
        arrived = start(self, *args)
        assert self.work is not None
        self.work.wait()
        return arrived

    with patch.object(PendingAllToAll, "start", start_and_wait):
        yield


def test_no_rank_waits_for_rows_of_another_before_its_shared_experts_are_computed(tmp_path):
    assert ranks(2, one_holds_its_tokens_back, tmp_path, False) == [ORDER] * 2


@pytest.mark.slow  # as long as its timeout
def test_an_exchange_without_overlap_is_seen(tmp_path):
    with pytest.raises(RankError, match="rank 0 waits for rows before it computes its shared experts"):
        ranks(2, one_holds_its_tokens_back, tmp_path, True)
