"""layout: every degree is resolved, the last axis gets the remaining ranks, wrong degrees are refused."""

import subprocess
import sys
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.config.layout import Layout
from megalith.errors import TopologyError


def test_shard_takes_what_is_left_of_the_world():
    layout = Layout.resolve(48, tensor=2, context=2, pipeline=3, replicate=2)
    assert (layout.shard, layout.data_parallel, layout.world_size) == (2, 4, 48)
    assert (layout.expert, layout.expert_tensor) == (1, 2)  # etp follows tensor
    assert (layout.edp_replicate, layout.edp_shard) == (2, 4)  # 48 / (etp 2 x pp 3) = 8


def test_a_world_that_is_not_known_is_the_product_of_the_degrees():
    assert Layout.resolve(tensor=2, pipeline=3, replicate=2, shard=4).world_size == 48
    assert Layout.resolve(48, tensor=2, pipeline=3, replicate=2, shard=4) == Layout.resolve(
        tensor=2, pipeline=3, replicate=2, shard=4
    )
    with pytest.raises(TopologyError, match="shard=-1 takes the remaining ranks of the world; give world_size"):
        Layout.resolve(tensor=2)


DEGREE = st.integers(1, 6)


@settings(max_examples=60)
@given(DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, st.data())
def test_both_factorisations_multiply_to_the_world(tensor, context, pipeline, replicate, shard, data):
    stage = tensor * context * replicate * shard
    expert_tensor = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    expert = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage // expert_tensor % n == 0]))
    degrees = {"tensor": tensor, "context": context, "pipeline": pipeline, "replicate": replicate}
    layout = Layout.resolve(stage * pipeline, **degrees, expert=expert, expert_tensor=expert_tensor)
    assert (layout.shard, layout.world_size) == (shard, stage * pipeline)
    edp = layout.edp_replicate * layout.edp_shard
    assert layout.expert_tensor * layout.expert * layout.pipeline * edp == layout.world_size
    assert layout.edp_replicate == gcd(replicate, edp)
    assert (
        Layout.resolve(layout.world_size, **degrees, shard=shard, expert=expert, expert_tensor=expert_tensor) == layout
    )


@pytest.mark.parametrize(
    ("world_size", "degrees", "message"),
    [
        (0, {}, r"sizes must be positive integers.*got world_size=0;"),
        (4, {"tensor": 0, "shard": 0}, r"got tensor=0, shard=0; use 1 for an unused axis"),
        (4, {"replicate": True}, r"got replicate=True"),
        (7, {"tensor": 2}, r"= 2 must divide world_size \(7\); use sizes.*multiple of 2"),
        (8, {"tensor": 2, "shard": 3}, r"= 6 must equal world_size \(8\); use shard=4, or -1"),
        (8, {"expert": 3}, r"expert_tensor \(1\) x expert \(3\) x pipeline \(1\) = 3 must divide world_size \(8\)"),
        (None, {"tensor": 2, "shard": 0}, r"shard may be -1.*got shard=0"),
    ],
)
def test_wrong_degrees_are_refused(world_size, degrees, message):
    with pytest.raises(TopologyError, match=message):
        Layout.resolve(world_size, **degrees)


def test_it_needs_no_torch():
    code = "import sys, megalith.config.layout; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
