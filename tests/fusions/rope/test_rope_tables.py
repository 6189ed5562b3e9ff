"""rope_tables: frequencies against transformers' functions; positions of packed tokens by hand."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalith import fusions
from megalith.errors import ConfigError, ShapeError
from megalith.fusions import (
    fused_rope,
    llama3_rope_frequencies,
    positions_from_cu_seqlens,
    rope_cos_sin,
    rope_frequencies,
    yarn_concentration,
    yarn_cos_sin,
    yarn_rope_frequencies,
)

BASE, R = 50000.0, 64


def of_transformers(rope_type: str, **parameters: object) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and concentration for heads of R features."""
    rope = {"rope_type": rope_type, "rope_theta": BASE, **parameters}
    config = LlamaConfig(hidden_size=R, num_attention_heads=1, head_dim=R, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


def test_frequencies_fall_from_1_by_powers_of_the_base():
    want = torch.tensor([BASE ** (-2 * i / R) for i in range(R // 2)])
    torch.testing.assert_close(rope_frequencies(R, BASE), want)


def test_interpolated_frequencies_are_those_of_transformers():
    want, _ = of_transformers("linear", factor=4.0)
    torch.testing.assert_close(rope_frequencies(R, BASE, interpolation=4.0), want)


def test_frequencies_of_llama_3_are_those_of_transformers():
    scaling = {"low_freq_factor": 1.5, "high_freq_factor": 5.0, "original_max_position_embeddings": 4096}
    want, _ = of_transformers("llama3", factor=16.0, **scaling)
    torch.testing.assert_close(llama3_rope_frequencies(rope_frequencies(R, BASE), 16.0, **scaling), want)


@pytest.mark.parametrize(
    ("betas", "rounded", "mscales"),
    [((32.0, 1.0), True, (None, None)), ((32.0, 1.0), False, (None, None)), ((16.0, 2.0), True, (0.7, 1.3))],
)
def test_frequencies_and_concentration_of_yarn_are_those_of_transformers(betas, rounded, mscales):
    scaling = dict(zip(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), (*betas, *mscales), strict=True))
    given = {name: value for name, value in scaling.items() if value is not None}
    original = {"original_max_position_embeddings": 4096}
    frequencies, concentration = of_transformers("yarn", factor=40.0, truncate=rounded, **given, **original)
    options = {"correction_range_round_to_int": rounded}
    torch.testing.assert_close(yarn_rope_frequencies(R, BASE, 40.0, 4096, *betas, **options), frequencies)
    assert yarn_concentration(40.0, *mscales) == pytest.approx(concentration, rel=1e-12)
    cos, sin = yarn_cos_sin(7, R, BASE, 40.0, 4096, *betas, *mscales, **options)
    angles = torch.arange(7)[:, None] * frequencies
    torch.testing.assert_close(cos, angles.cos() * concentration)
    torch.testing.assert_close(sin, angles.sin() * concentration)
    assert cos.dtype == torch.float32


def test_a_ramp_of_no_width_is_a_step():
    frequencies = yarn_rope_frequencies(4, 10000.0, 2.0, 4096, 2000.0, 1000.0)  # the first pair makes 652 rotations
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.005]))


def test_concentrations_by_hand():
    assert yarn_concentration(40.0) == pytest.approx(0.1 * math.log(40.0) + 1.0)
    assert yarn_concentration(40.0, 1.0, 1.0) == 1.0  # DeepSeek-V3
    assert yarn_concentration(1.0) == 1.0


def test_tables_are_of_a_number_of_positions_or_of_given_ones():
    frequencies = rope_frequencies(R, BASE)
    whole, some = rope_cos_sin(9, frequencies), rope_cos_sin(torch.tensor([[3, 8], [0, 1]]), frequencies)
    for table, rows in zip(whole, some, strict=True):
        assert table.shape == (9, R // 2)
        assert torch.equal(rows, table[torch.tensor([[3, 8], [0, 1]])])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_positions_begin_anew_in_each_document_and_padding_has_0(dtype):
    positions = positions_from_cu_seqlens(torch.tensor([0, 3, 3, 5], dtype=dtype), 7)
    assert positions.dtype == torch.int32
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert positions_from_cu_seqlens(torch.tensor([0, 3], dtype=dtype), 3).tolist() == [0, 1, 2]


def test_ranks_hold_an_early_and_a_late_chunk_of_each_document():
    borders = torch.tensor([0, 8, 12])
    assert positions_from_cu_seqlens(borders, 7, 0, 2).tolist() == [0, 1, 6, 7, 0, 3, 0]
    assert positions_from_cu_seqlens(borders, 7, 1, 2).tolist() == [2, 3, 4, 5, 1, 2, 0]


@pytest.mark.parametrize(
    ("borders", "T", "cp", "error", "message"),
    [
        ([0, 3], 4, (2, 2), ConfigError, r"cp_rank must be at least 0 and below cp_size \(2\); got 2"),
        ([0], 4, (0, 1), ShapeError, r"the boundaries of at least one document; got torch.int64 \[1\]"),
        ([0, 2.0], 4, (0, 1), ShapeError, r"int32 or int64 \[N\+1\].*got torch.float32 \[2\]"),
        ([0, 4, 3], 4, (0, 1), ShapeError, r"non-decreasing, from 0 to at most 4 tokens; got \[0, 4, 3\]"),
        ([0, 5], 4, (0, 1), ShapeError, r"non-decreasing, from 0 to at most 4 tokens; got \[0, 5\]"),
        ([1, 4], 4, (0, 1), ShapeError, r"non-decreasing, from 0 to at most 4 tokens; got \[1, 4\]"),
        ([0, 4, 10], 8, (0, 2), ShapeError, r"padded to a multiple of 2 \* cp_size = 4 tokens.*lengths \[4, 6\]"),
    ],
)
def test_borders_that_are_none_are_refused(borders, T, cp, error, message):
    with pytest.raises(error, match=message):
        positions_from_cu_seqlens(torch.tensor(borders), T, *cp)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rope_frequencies(7), "rotary_dim must be even and positive.*got 7"),
        (lambda: rope_frequencies(8, -1.0), "base must be positive; got -1.0"),
        (lambda: rope_frequencies(8, interpolation=0.0), "interpolation must be positive; got 0.0"),
        (lambda: yarn_rope_frequencies(8, scaling_factor=0.0), "scaling_factor must be positive; got 0.0"),
        (lambda: llama3_rope_frequencies(torch.ones(4), 0.0), "factor must be positive; got 0.0"),
        (
            lambda: llama3_rope_frequencies(torch.ones(4), low_freq_factor=4.0),
            r"high_freq_factor must be above low_freq_factor \(4.0\).*got 4.0",
        ),
    ],
)
def test_numbers_that_make_no_table_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("backend", ["triton", "blocked", "reference", None])
def test_tables_that_require_a_gradient_are_refused_on_every_path(backend, device):
    q, kv = torch.randn(4, 2, 3, 8, device=device), torch.randn(4, 2, 3, 12, device=device)
    k_pe = torch.randn(4, 2, 1, 8, device=device)
    cos = torch.rand(4, 4, device=device, requires_grad=True)
    sin = cos.detach()
    calls = (
        lambda cos: fused_rope(q, None, cos, sin, backend=backend),
        lambda cos: fused_rope(q, None, sin, cos, backend=backend),
        lambda cos: fusions.fused_apply_mla_rope_for_q(q[..., :8].repeat(1, 1, 1, 2), cos, sin, 8, 8, backend=backend),
        lambda cos: fusions.fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, 8, 5, 7, backend=backend),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"must not require grad.*pass cos.detach"):
            call(cos)
        call(cos.detach())
        with torch.no_grad():
            call(cos)
