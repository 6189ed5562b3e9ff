"""fill_in_the_middle: the published transformation within each document of a row, drawn by the index."""

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from megalith.config import FillInTheMiddleConfig
from megalith.data.fill_in_the_middle import FillInTheMiddle
from megalith.data.gpt_dataset import EvaluationDataset, GPTDataset
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.special_tokens import SPECIAL_TOKENS
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.errors import DataError
from megalith.numerics.draws import Draws

TEXT = "the ships were many, and über was the name of the last of the ships that came home\n"
ALWAYS = {"rate": 1.0}


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe([TEXT * 10], 300, SPECIAL_TOKENS["fim"])


def reordering(tokenizer, rate=0.5, **settings):
    return FillInTheMiddle.of(tokenizer, FillInTheMiddleConfig(rate=rate, **settings))


def reordered(found, tokens, index, seed=0):
    tokens = np.array(tokens, np.int64)
    return found(tokens, np.zeros_like(tokens), Draws(seed, "x", index))[0].tolist()


def parts_of(tokenizer, ids):
    """Prefix, middle and suffix of a document in PSM order."""
    prefix, middle, suffix = (tokenizer.token_id(name) for name in SPECIAL_TOKENS["fim"])
    assert ids[0] == prefix
    at, last = ids.index(suffix), ids.index(middle)
    return tuple(tokenizer.decode(part) for part in (ids[1:at], ids[last + 1 :], ids[at + 1 : last]))


class Scripted(Draws):
    """A generator that draws the given values."""

    def __init__(self, *found):
        self._found = list(found)

    def uniform(self, n):
        return np.array([self._found.pop(0) for _ in range(n)])


def test_a_document_with_a_special_token_keeps_its_order():
    tokenizer = train_byte_level_bpe([TEXT * 10], 300, [*SPECIAL_TOKENS["fim"], "<|im_start|>"])
    turn, text = tokenizer.token_id("<|im_start|>"), tokenizer.encode(TEXT)
    found = reordering(tokenizer, **ALWAYS)
    assert reordered(found, text, 0) != text
    assert reordered(found, [*text, turn, *text], 0) == [*text, turn, *text]
    assert turn not in tokenizer.encode("<|im_start|>")  # so that it would not have survived


@pytest.mark.parametrize(("first", "second"), [(0.25, 0.5), (0.5, 0.25), (0.0, 0.0), (0.0, 0.999), (0.999, 0.3)])
@pytest.mark.parametrize("is_spm", [False, True])
def test_a_document_is_reordered_as_published(tokenizer, first, second, is_spm):
    # Bavarian et al. 2022: (PSM) <PRE> Enc(prefix) <SUF> Enc(suffix) <MID> Enc(middle), and appendix D, variant 2:
    # (SPM) <PRE> <SUF> Enc(suffix) <MID> Enc(prefix) Enc(middle)
    begin, end = sorted(int(number * (len(TEXT) + 1)) for number in (first, second))
    parts = TEXT[:begin], TEXT[begin:end], TEXT[end:]
    a, b, c = (tokenizer.encode(part) for part in parts)
    pre, mid, suf = (tokenizer.token_id(name) for name in ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"))
    expected = [pre, suf, *c, mid, *a, *b] if is_spm else [pre, *a, suf, *c, mid, *b]
    draws = Scripted(0.49, first, second, 0.29 if is_spm else 0.31)
    tokens = np.array([*tokenizer.encode(TEXT), tokenizer.eod])
    found, documents = reordering(tokenizer, rate=0.5, spm_rate=0.3)(tokens, np.full(len(tokens), 7), draws)
    assert found.tolist() == [*expected, tokenizer.eod]
    assert documents.tolist() == [7] * len(found)


def test_what_begins_and_ends_a_document_stays_where_it_is():
    trained = train_byte_level_bpe([TEXT], 300, ["<s>", *SPECIAL_TOKENS["fim"]])
    tokenizer = trained.framed(begin=[trained.token_id("<s>")])
    found = reordering(tokenizer, **ALWAYS, spm_rate=0)
    begin, end = *tokenizer.begin, tokenizer.eod
    whole = reordered(found, [begin, *tokenizer.encode(TEXT), end], 0)
    assert (whole[0], whole[-1]) == (begin, end)
    assert "".join(parts_of(tokenizer, whole[1:-1])) == TEXT
    for nothing in ([begin], [begin, end], [end]):
        assert reordered(found, nothing, 0) == nothing


def test_a_document_that_is_not_drawn_keeps_its_tokens(tokenizer):
    # "th" + "e", although the tokenizer would merge them: nothing is tokenized again
    tokens = np.array([*tokenizer.encode("t"), *tokenizer.encode("he"), tokenizer.eod])
    found, _ = reordering(tokenizer, rate=0.5)(tokens, np.zeros_like(tokens), Scripted(0.51))
    assert found.tolist() == tokens.tolist()


def test_documents_are_reordered_and_suffixes_first_as_often_as_the_rates_say(tokenizer):
    num_documents, rate, spm_rate = 4000, 0.7, 0.4
    found = reordering(tokenizer, rate=rate, spm_rate=spm_rate)
    tokens = tokenizer.encode(TEXT)
    rows = [reordered(found, tokens, index) for index in range(num_documents)]
    pre, suf = found.prefix, found.suffix
    num_reordered = sum(row[0] == pre for row in rows)
    assert sum(row == tokens for row in rows) == num_documents - num_reordered
    assert num_reordered / num_documents == pytest.approx(rate, abs=4 * (rate * (1 - rate) / num_documents) ** 0.5)
    # without a prefix both orders are the same
    share = spm_rate + (1 - spm_rate) * (1 - (len(TEXT) / (len(TEXT) + 1)) ** 2)
    num_suffix_first = sum(row[:2] == [pre, suf] for row in rows)
    spread = (share * (1 - share) / num_reordered) ** 0.5
    assert num_suffix_first / num_reordered == pytest.approx(share, abs=4 * spread)


def test_cuts_are_uniform_over_the_characters(tokenizer):
    # "selecting the split points uniformly": each pair of ends of 5 characters, in either order
    text, num_rows = "ships", 3000
    found = reordering(tokenizer, **ALWAYS, spm_rate=0)
    tokens = tokenizer.encode(text)
    counts = Counter(parts_of(tokenizer, reordered(found, tokens, index)) for index in range(num_rows))
    assert all(prefix + middle + suffix == text for prefix, middle, suffix in counts)
    chi_square = 0.0
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        expected = num_rows * (1 if first == second else 2) / (len(text) + 1) ** 2
        chi_square += (counts[text[:first], text[first:second], text[second:]] - expected) ** 2 / expected
    assert chi_square < 45.3  # 20 degrees of freedom: one in a thousand is above


def written(prefix, documents, tokenizer, in_one=False):
    """``in_one``: the file has them as one document, which contains end-of-document tokens."""
    rows = [[*tokenizer.encode(document), tokenizer.eod] for document in documents]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for row in [list(itertools.chain(*rows))] if in_one else rows:
            builder.add_document(row)
        builder.finalize(vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    return prefix


def documents_in(row, eod):
    """The tokens of each document that ends in ``row``."""
    ends = np.flatnonzero(row == eod)
    return [row[first:end].tolist() for first, end in zip([0, *(ends + 1)], ends, strict=False)]


@pytest.mark.parametrize("in_one", [False, True])
def test_each_document_of_a_row_is_reordered_within_itself(in_one, tokenizer, tmp_path):
    documents = [TEXT[number : 3 * number + 5] for number in range(25)]
    prefix = written(tmp_path / "x", documents, tokenizer, in_one)
    settings = {"seed": 3, "mask_eod": True}
    plain = GPTDataset(prefix, 160, **settings)
    dataset = GPTDataset(prefix, 160, **settings, fill_in_the_middle=reordering(tokenizer, **ALWAYS, spm_rate=0))
    num_whole = 0
    for index in range(20):
        sample, before = dataset[index], plain[index]
        assert {len(array) for name, array in vars(sample).items() if name != "num_tokens"} == {160}
        assert sample.tokens[1:].tolist() == sample.labels[:-1].tolist()
        assert sample.loss_mask.tolist() == (sample.tokens != tokenizer.eod).tolist()
        assert sample.documents.tolist() == np.cumsum([0, *(sample.tokens[:-1] == tokenizer.eod)]).tolist()
        texts = [tokenizer.decode(ids) for ids in documents_in(before.tokens, tokenizer.eod)]
        found = documents_in(sample.tokens, tokenizer.eod)
        num_whole += len(found)
        for ids, text in zip(found, texts, strict=False):
            if "\ufffd" in text or not text:
                assert tokenizer.decode(ids) == text
            else:
                assert "".join(parts_of(tokenizer, ids)) == text
    assert num_whole > 60


def test_a_sample_depends_on_seed_and_index_alone(tokenizer, tmp_path):
    prefix = written(tmp_path / "x", [TEXT] * 12, tokenizer)
    found = reordering(tokenizer)
    dataset = GPTDataset(prefix, 24, seed=1, fill_in_the_middle=found)
    in_order = [dataset[index].tokens.tolist() for index in range(40)]
    backwards = pickle.loads(pickle.dumps(GPTDataset(prefix, 24, seed=1, fill_in_the_middle=found)))
    assert [backwards[index].tokens.tolist() for index in reversed(range(40))] == in_order[::-1]
    # an epoch has 24 windows of the same text, which are cut differently in the next epoch
    other_seed = GPTDataset(prefix, 24, seed=2, fill_in_the_middle=found)
    assert [other_seed[index].tokens.tolist() for index in range(40)] != in_order
    drawn = {index: found.prefix in row for index, row in enumerate(in_order)}
    assert {drawn[index] for index in drawn} == {True, False}
    assert dataset.identity() == GPTDataset(prefix, 24, seed=1).identity()  # the text is read in the same order


def test_a_row_that_becomes_shorter_is_filled_up_without_a_loss(tokenizer, tmp_path):
    # a dataset whose tokens are single characters, which the tokenizer would merge
    letters = [id for character in TEXT * 3 for id in tokenizer.encode(character)]
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([*letters, tokenizer.eod])
        builder.finalize(vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    S = len(letters) - 1
    found = reordering(tokenizer, **ALWAYS)
    sample = GPTDataset(tmp_path / "x", S, seed=0, fill_in_the_middle=found)[0]
    num_labels = int(sample.loss_mask.sum())
    assert 20 < num_labels < S // 2
    assert sample.loss_mask[:num_labels].all()
    assert not sample.tokens[num_labels:].any()
    assert not sample.labels[num_labels:].any()
    assert len(sample.tokens) == len(sample.documents) == S
    assert sample.tokens[1:num_labels].tolist() == sample.labels[: num_labels - 1].tolist()


def test_text_that_ends_inside_a_character_or_is_reordered_already_stays(tokenizer):
    found = reordering(tokenizer, **ALWAYS)
    ue = tokenizer.encode("ü")
    assert len(ue) == 2, "a character of two bytes"
    for tokens in ([*tokenizer.encode("many, and "), ue[0]], [ue[1], *tokenizer.encode("ber was")]):
        assert reordered(found, tokens, 0) == tokens
    tokens = reordered(found, tokenizer.encode(TEXT), 0)
    assert tokens[0] == found.prefix
    assert reordered(found, tokens, 1) == tokens


def test_held_out_text_is_read_from_left_to_right(tokenizer, tmp_path):
    rows = EvaluationDataset(written(tmp_path / "x", [TEXT], tokenizer), 16)
    ids = [tokenizer.encode(TEXT)[0]] + [int(id) for row in rows for id in row.labels[row.loss_mask]]
    assert tokenizer.decode(ids) == TEXT + tokenizer.eod_text


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),  # Qwen2.5-Coder
        ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),  # noqa: RUF001  DeepSeek-Coder: the hole, then the suffix
        ("<a>", "<b>", "<c>"),
    ],
)
def test_tokens_are_found_by_their_published_names_or_those_given(names):
    tokenizer = train_byte_level_bpe([TEXT], 280, names)
    own = dict(zip(("prefix_token", "middle_token", "suffix_token"), names, strict=True)) if "<a>" in names else {}
    found = reordering(tokenizer, **own)
    assert [tokenizer.decode([id]) for id in (found.prefix, found.middle, found.suffix)] == list(names)


def test_tokenizers_that_cannot_mark_or_join_parts_are_refused(tokenizer):
    plain = train_byte_level_bpe([TEXT], 280)
    with pytest.raises(
        DataError,
        match=r"data.fill_in_the_middle needs a tokenizer with the tokens <fim_prefix>, <fim_middle>, <fim_suffix>; "
        r"tokenizer.json has none.*--special-tokens fim",
    ):
        reordering(plain)
    with pytest.raises(DataError, match=r"with the tokens <hole>; tokenizer.json has none"):
        reordering(tokenizer, suffix_token="<hole>")
    # as Llama 2: a space before every text, which decoding removes from the first only
    alphabet = {character: id for id, character in enumerate("▁ontewhr\n")}
    made = tokenizers.Tokenizer(models.BPE(alphabet, []))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(name, special=True) for name in ("</s>", *SPECIAL_TOKENS["fim"])])
    with pytest.raises(DataError, match=r"reproduces a text encoded in parts; .* to 'one  two three\\n'"):
        reordering(Tokenizer(made.to_str().encode()))
