"""Forward of attention by products on a CPU with instructions for bfloat16, but without AMX: against float64."""

import pytest
import torch

from megalith.fusions import fused_attention
from megalith.fusions.attention import products_for_cpu
from megalith.fusions.attention.products_for_cpu import attention_by_products
from megalith.packed_seq_params import PackedSeqParams
from tests.fusions.attention.cases_of_attention import formula
from tests.fusions.attention.cpus import AVX512_BF16, CPUS, lengths_given_to_products, pretend

S = 150


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def lengths(monkeypatch):
    """The numbers of queries that forward computes by products."""
    pretend(monkeypatch, AVX512_BF16)
    return lengths_given_to_products(monkeypatch, function=attention_by_products)


def operands(S, B, A, G, Dv):
    return [torch.randn(S, B, *heads).bfloat16() for heads in ((A, 16), (G, 16), (G, Dv))]


def assert_close(got, want):
    """``got`` has the error of a bfloat16 out, whose probabilities may have been rounded, and of a float32 lse."""
    (out, lse), (exact_out, exact_lse) = got, want
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - exact_out).norm() <= 3e-3 * exact_out.norm()
    assert (lse.double() - exact_lse).abs().max() <= 5e-6


@pytest.mark.parametrize("has_sink", [True, False], ids=["sink", "no sink"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("G", "Dv"), [(6, 16), (2, 16), (1, 24), (3, 8)])
def test_out_and_lse_match_float64(G, Dv, causal, has_sink, lengths, monkeypatch):
    monkeypatch.setattr(products_for_cpu, "_QUERIES", 60)  # blocks of 60, 60 and 30 of 150 queries
    monkeypatch.setattr(products_for_cpu, "_ELEMENTS", 60 * S * 4)  # several heads at once, but not all
    given = operands(S, 3, 6, G, Dv)
    sink = torch.randn(6).bfloat16() if has_sink else None
    got = fused_attention(*given, causal=causal, sink=sink)
    exact_sink = None if sink is None else sink.double()
    want = formula(*(x.double() for x in given), causal=causal, sink=exact_sink)
    assert lengths == [S]
    assert got[0].is_contiguous()
    if has_sink:  # out is rounded twice
        assert (got[0].double() - want[0]).norm() <= 5e-3 * want[0].norm()
        got = want[0].bfloat16(), got[1]
    assert_close(got, want)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_match_float64(causal, lengths):
    given = operands(250, 2, 4, 2, 24)
    got = fused_attention(*given, causal=causal, packed_seq_params=PackedSeqParams.from_lengths([[S, 100]] * 2))
    parts = [formula(*(x[part].double() for x in given), causal=causal) for part in (slice(0, S), slice(S, 250))]
    assert lengths == [S, 100]
    assert_close(got, (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=-1)))


def test_large_scores_match_float64(lengths):
    q, k, v = operands(S, 2, 4, 4, 16)
    want = formula(*(x.double() for x in (100 * q, k, v)), causal=True)
    got = fused_attention(100 * q, k, v)
    assert lengths == [S]
    assert (got[0].double() - want[0]).norm() <= 3e-3 * want[0].norm()
    assert (got[1].double() - want[1]).abs().max() <= 2e-6 * want[1].abs().max()


def test_a_nan_in_q_stays_in_its_row(lengths):
    q, k, v = operands(S, 2, 4, 4, 16)
    q[70, 0, 1, 3] = torch.nan
    out, lse = fused_attention(q, k, v)
    assert lengths == [S]
    assert out.isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[70, 0, 1]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 70]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_in_k_do_not_reach_queries_before_it(value, lengths):
    q, k, v = operands(S, 2, 4, 4, 16)
    want, want_lse = fused_attention(q, k, v)
    k[70, 0, 1, 3] = value
    out, lse = fused_attention(q, k, v)
    assert lengths == [S, S]
    assert torch.equal(out[:70], want[:70])
    assert torch.equal(lse[..., :70], want_lse[..., :70])
    assert value == -torch.inf or bool(out[70:, 0, 1].isnan().any())


def test_onednn_may_round_its_operands(lengths, monkeypatch):
    found, attend = [], products_for_cpu._attend_

    def recorded(*operands, **options):
        found.append(torch.backends.mkldnn.matmul.fp32_precision)
        attend(*operands, **options)

    monkeypatch.setattr(products_for_cpu, "_attend_", recorded)
    before = torch.backends.mkldnn.matmul.fp32_precision
    fused_attention(*operands(S, 2, 4, 4, 16))
    assert found == ["bf16"]
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_for_bfloat16_without_amx_alone(dtype, cpu, lengths, monkeypatch):
    pretend(monkeypatch, cpu)
    q = torch.randn(S, 1, 1, 8).to(dtype)
    fused_attention(q, q, q, backend="aten")
    assert lengths == ([S] if (cpu, dtype) == (AVX512_BF16, torch.bfloat16) else [])


@pytest.mark.parametrize(("causal", "most"), [(True, 4096), (False, 1024)])
def test_it_is_for_measured_lengths_alone(causal, most, lengths):
    for num_tokens in (63, 64, most, most + 1):
        q = torch.randn(num_tokens, 1, 1, 8).bfloat16()
        fused_attention(q, q, q, causal=causal, backend="aten")
    assert lengths == [64, most]


def test_windows_caches_and_many_heads_of_one_group_take_the_kernel_of_torch(lengths):
    q, k, v = operands(S, 1, 2, 2, 8)
    fused_attention(q, k, v, window=(3, 0))
    fused_attention(q[-100:], k, v)
    many = torch.randn(S, 1, 64, 8).bfloat16()
    fused_attention(many, many[:, :, :1], many[:, :, :1])
    assert lengths == []


def test_few_queries_take_the_kernel_of_torch(monkeypatch):
    pretend(monkeypatch, AVX512_BF16)
    lengths = lengths_given_to_products(monkeypatch, 10 * S, attention_by_products)
    for num_heads in (9, 10):
        q = torch.randn(S, 1, num_heads, 8).bfloat16()
        fused_attention(q, q, q)
    assert lengths == [S]
