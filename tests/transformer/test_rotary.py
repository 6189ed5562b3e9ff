"""rotary: complex numbers rotated by their position, whatever the tables' layout."""

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, LlamaConfig, Qwen2VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from megalith.config import RopeConfig
from megalith.fusions import fused_rope
from megalith.transformer.rotary import RotaryTable, rotary_tables

S, B, A, D = 7, 2, 3, 8
EXACT = 1e-14


def x_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(S, B, A, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def rotary_table(positions: Tensor, head_size: int, base: float, dtype: torch.dtype, **settings: object) -> RotaryTable:
    return rotary_tables(positions, head_size, RopeConfig(base=base, **settings), dtype).whole


def turned(x: Tensor, table: RotaryTable) -> Tensor:
    return fused_rope(x, None, *table)[0]


def by_complex_numbers(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Features i and i + D/2 form one complex number, rotated by positions[b, s] * base^(-2i / D)."""
    half = x.shape[-1] // 2
    number = torch.complex(x[..., :half], x[..., half:])
    frequency = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(()).double(), positions.t()[..., None, None].double() * frequency)
    turned = number * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_features_turn_as_complex_numbers(base):
    positions = torch.arange(S)
    got = turned(x_of(), rotary_table(positions, D, base, torch.float64))
    want = by_complex_numbers(x_of(), positions.expand(B, S), base)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


def test_rows_may_have_positions_of_their_own():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11]])
    got = turned(x_of(), rotary_table(positions, D, 100.0, torch.float64))
    torch.testing.assert_close(got, by_complex_numbers(x_of(), positions, 100.0), rtol=EXACT, atol=EXACT)


def test_a_score_depends_on_the_distance_alone():
    q, k = x_of()[0, 0, 0], x_of()[1, 0, 0]

    def score(query_position: int, key_position: int) -> float:
        table = rotary_table(torch.tensor([query_position, key_position]), D, 10000.0, torch.float64)
        y = turned(torch.stack((q, k)).view(2, 1, 1, D), table)
        return float(y[0, 0, 0] @ y[1, 0, 0])

    assert score(5, 2) == pytest.approx(score(1003, 1000), abs=1e-12)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_position_0_and_lengths_stay():
    table = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
    y = turned(x_of(), table)
    assert torch.equal(y[0], x_of()[0])
    torch.testing.assert_close(y.norm(dim=-1), x_of().norm(dim=-1), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_features_are_turned_in_float32_and_rounded_once(dtype):
    table = rotary_table(torch.arange(S), D, 10000.0, dtype)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    assert table.cos.shape == (S, D // 2)
    got = turned(x_of(dtype), table)
    want = by_complex_numbers(x_of(dtype).double(), torch.arange(S).expand(B, S), 10000.0)
    assert got.dtype == dtype
    half_an_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), want, rtol=1.01 * half_an_ulp, atol=1e-6)


def test_far_positions_keep_their_angle_in_float32():
    # float32 angles near 100,000 radians are 8e-3 apart
    far = torch.tensor([100_000])
    wide, narrow = (rotary_table(far, 64, 10000.0, dtype) for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(narrow.cos.double(), wide.cos, rtol=0, atol=1.2e-2)


# published values: head size, base, and scaling
SCALED = {
    "linear": (128, 10000.0, {"type": "linear", "factor": 4.0}),
    "Llama 3.1": (128, 5e5, {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}),
    "Llama 3.2": (64, 5e5, {"type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}),
    "Qwen2.5": (128, 1e6, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "gpt-oss": (
        64,
        150000.0,
        {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "DeepSeek-V2": (
        64,
        10000.0,
        {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
        },
    ),
    "an attention factor": (
        64,
        10000.0,
        {
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.3,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
        },
    ),
}


@pytest.mark.parametrize(("head_size", "base", "scaling"), SCALED.values(), ids=SCALED)
def test_scaled_frequencies_and_their_attention_factor_are_those_of_transformers(head_size, base, scaling):
    positions = torch.tensor([0, 1, 17, 300])
    table = rotary_table(positions, head_size, base, torch.float32, scaling=scaling)
    kind = scaling["type"]
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope = {"rope_type": kind, "rope_theta": base, **factors, **{k: v for k, v in scaling.items() if k != "type"}}
    theirs = LlamaConfig(hidden_size=2 * head_size, num_attention_heads=2, rope_parameters=rope)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs)
    assert (attention_factor != 1.0) == (kind == "yarn")
    angles = positions.unsqueeze(1) * frequencies
    # angles of up to 300 radians are rounded to 3e-5 in float32
    torch.testing.assert_close(table.cos, angles.cos() * attention_factor, rtol=0, atol=6e-5)
    torch.testing.assert_close(table.sin, angles.sin() * attention_factor, rtol=0, atol=6e-5)


def test_layers_with_a_window_have_a_base_of_their_own_and_no_scaling():
    rope = RopeConfig(base=1e6, local_base=10000.0, scaling={"type": "linear", "factor": 8.0})
    tables = rotary_tables(torch.arange(S), D, rope, torch.float64)
    plain = rotary_table(torch.arange(S), D, 10000.0, torch.float64)
    scaled = rotary_table(torch.arange(S), D, 1e6, torch.float64, scaling={"type": "linear", "factor": 8.0})
    assert all(torch.equal(got, want) for got, want in zip(tables.of(4), plain, strict=True))
    assert all(torch.equal(got, want) for got, want in zip(tables.of(None), scaled, strict=True))
    assert tables.of(4) is not tables.of(None)
    alike = rotary_tables(torch.arange(S), D, RopeConfig(), torch.float64)
    assert alike.of(4) is alike.of(None)


def test_a_share_of_the_features_is_rotated_as_in_gpt_neox():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=2 * 16, num_attention_heads=2, rope_parameters=rope)
    q, k = (torch.randn(B, 2, S, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))  # [B, A, S, D]
    positions = torch.arange(S)
    want = gpt_neox.apply_rotary_pos_emb(q, k, *gpt_neox.GPTNeoXRotaryEmbedding(config)(q, positions.unsqueeze(0)))
    table = rotary_table(positions, 16, 10000.0, torch.float32, percent=0.25)
    assert table.cos.shape == (S, 2)
    got = fused_rope(q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), *table, rotary_dim=4)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.permute(1, 2, 0, 3), theirs, rtol=0, atol=1e-6)


def test_neighbouring_features_are_rotated_as_in_gpt_j():
    x, positions = x_of(torch.float32), torch.arange(S)
    sin, cos = gptj.create_sinusoidal_positions(S, D).unsqueeze(0).split(D // 2, dim=-1)  # [1, S, D/2]
    want = gptj.apply_rotary_pos_emb(x.transpose(0, 1), sin, cos)  # [B, S, A, D]
    got, _ = fused_rope(x, None, *rotary_table(positions, D, 10000.0, torch.float32), layout="interleaved")
    torch.testing.assert_close(got.transpose(0, 1), want, rtol=0, atol=1e-6)


def test_time_height_and_width_rotate_sections_of_pairs_as_in_qwen2_vl():
    sections = [1, 2, 1]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = Qwen2VLTextConfig(hidden_size=2 * D, num_attention_heads=2, num_key_value_heads=2, rope_parameters=rope)
    positions = torch.randint(50, (3, B, S), generator=torch.Generator().manual_seed(3))
    q, k = (torch.randn(B, 2, S, D, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))  # [B, A, S, D]
    want = qwen2_vl.apply_rotary_pos_emb(q, k, *qwen2_vl.Qwen2VLRotaryEmbedding(config)(q, positions))
    table = rotary_table(positions, D, 10000.0, torch.float32, sections=sections)
    assert table.cos.shape == (S, B, D // 2)
    got = fused_rope(q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), *table)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.permute(1, 2, 0, 3), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(S,), (B, S)])
def test_text_has_one_position_for_time_height_and_width(shape):
    positions = torch.arange(S).expand(shape)
    of_text = rotary_table(positions, D, 10000.0, torch.float64, sections=[2, 1, 1])
    of_three = rotary_table(positions.expand(3, B, S), D, 10000.0, torch.float64, sections=[2, 1, 1])
    for one, three in zip(of_text, of_three, strict=True):
        assert torch.equal((one if one.dim() == 3 else one.unsqueeze(1)).expand_as(three), three)
