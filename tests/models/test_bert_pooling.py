"""A classifier that pools the mean over a text's tokens: padded and packed rows, rows split over cp, 16 bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.models.bert_model import BertModel
from megalith.models.heads import document_means
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.context.zigzag import zigzag_positions
from megalith.topology.process_groups_config import ProcessGroupCollection
from tests.models.test_bert_model import LENGTHS, assert_close, classifier, config, sentences
from tests.rank_pool import ranks
from tests.tiny_run import VOCAB

PACKED = [[3, 6, 4, 11], [16, 8]]  # texts that both of two ranks hold a part of, and texts of one rank alone


def pools_means(num_ranks: int = 1) -> BertModel:
    bert = classifier("classification", classifier_pooling="mean")
    groups = ProcessGroupCollection.single() if num_ranks == 1 else ProcessGroupCollection(cp=dist.group.WORLD)
    settings = config(bert=bert, position_embedding_type="rope", max_position_embeddings=None)
    return BertModel(settings, BuildOptions(groups, torch.float64)).eval()


@pytest.mark.parametrize("way", ["padded", "padded first", "packed"])
def test_classes_are_scored_from_the_mean_over_a_texts_tokens(way):
    model = pools_means()
    texts = [text["tokens"] for text in sentences()]
    want, loss = [], torch.zeros(())
    for tokens in texts:
        pooled = torch.tanh(model.pooler.dense(model(tokens, output="hidden").mean(dim=1)))  # [1, H]
        want.append(pooled @ model.classifier.linear.weight.t() + model.classifier.linear.bias)
        loss = loss + want[-1].square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    if way == "packed":
        documents = PackedSeqParams.from_lengths([LENGTHS])
        given = {"packed_seq_params": documents, "pooled_tokens": documents.cu_seqlens_q[:-1].long()}
        found = model(torch.cat(texts, dim=1), position_ids=documents.position_ids(), **given)
    else:
        S = max(LENGTHS)
        tokens, mask = torch.zeros(len(texts), S, dtype=torch.long), torch.zeros(len(texts), S, dtype=torch.bool)
        for row, text in enumerate(texts):
            columns = slice(text.shape[1]) if way == "padded" else slice(S - text.shape[1], S)
            tokens[row, columns], mask[row, columns] = text[0], True
        found = model(tokens, attention_mask=mask)
    assert_close(found, torch.cat(want))
    assert_close(torch.autograd.grad(found.square().sum(), list(model.parameters())), gradients)


def of_packed_texts(num_ranks: int) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Scores of the texts that begin on this rank, by their first token in whole rows, and the weights' gradients."""
    model, rank = pools_means(num_ranks), dist.get_rank()
    documents = PackedSeqParams.from_lengths(PACKED)
    B, S = documents.batch_size, documents.seq_length
    tokens = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(0))
    columns = zigzag_positions(S, num_ranks, rank)
    place_of = {column: place for place, column in enumerate(columns.tolist())}
    mine = [start for start in documents.cu_seqlens_q[:-1].tolist() if start % S in place_of]
    scores = model(
        tokens[:, columns],
        position_ids=documents.position_ids()[:, columns],
        packed_seq_params=documents,
        pooled_tokens=torch.tensor([start // S * len(columns) + place_of[start % S] for start in mine]),
    )
    scores.square().sum().backward()
    gradients: dict[str, Any] = {name: weight.grad for name, weight in model.named_parameters()}
    return dict(zip(mine, scores.detach(), strict=True)), gradients


def test_ranks_of_cp_average_the_parts_of_a_text():
    [(want, gradients)] = ranks(1, of_packed_texts, 1)
    found = ranks(2, of_packed_texts, 2)
    assert all(scores for scores, _ in found)  # some texts begin on each rank
    assert_close({start: row for scores, _ in found for start, row in scores.items()}, want)
    for name, gradient in gradients.items():
        assert_close(sum(part[name] for _, part in found), gradient)


def test_means_of_16_bits_are_summed_in_float32():
    states = torch.randn(1024, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16() + 3.0
    ids = torch.zeros(1, 1024, dtype=torch.long)
    [[found]] = document_means(states, ids, 1, torch.arange(1024), None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), states.double().mean(dim=(0, 1)), rtol=1e-6, atol=0.0)
