"""Special tokens that a task needs: a tokenizer without some of them is refused with their names and the way out."""

import re

import pytest

from megalith.data.special_tokens import SPECIAL_TOKENS, bert_tokens, t5_tokens
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.errors import DataError

BERT, T5 = SPECIAL_TOKENS["bert"], SPECIAL_TOKENS["t5"]


def tokenizer(special):
    return train_byte_level_bpe(["a"], 400, list(special))


@pytest.mark.parametrize(
    ("tokens_of", "special", "without", "missing"),
    [
        (bert_tokens, BERT, ["[MASK]"], "a mask token ([MASK] or <mask>)"),
        (bert_tokens, BERT, ["[SEP]"], "a separator token ([SEP] or </s>)"),
        (bert_tokens, BERT, ["[CLS]"], "a classifier token ([CLS] or <s>)"),
        (bert_tokens, BERT, ["[PAD]"], "a padding token ([PAD] or <pad>)"),
        (bert_tokens, BERT, ["[SEP]", "[MASK]"], "a separator token ([SEP] or </s>), a mask token ([MASK] or <mask>)"),
        (t5_tokens, T5, ["<pad>"], "a padding token (<pad>)"),
        (t5_tokens, T5, T5[1:], "sentinels (<extra_id_0>, <extra_id_1>, ...)"),
        (t5_tokens, T5, T5, "a padding token (<pad>) and sentinels (<extra_id_0>, <extra_id_1>, ...)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_names_every_missing_token_and_how_to_get_it(tokens_of, special, without, missing):
    tokens_of(tokenizer(special))
    name = "bert" if tokens_of is bert_tokens else "t5"
    with pytest.raises(DataError, match=rf"needs a tokenizer with {re.escape(missing)}; .*--special-tokens {name}"):
        tokens_of(tokenizer([token for token in special if token not in without]))
