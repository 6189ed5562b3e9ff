"""Special tokens come from the chat template: no text of a conversation becomes one, however the template writes it."""

from typing import Any

import pytest

from megalith.data.chat.encoder import ChatEncoder, EncodedChat
from megalith.data.chat.format import ChatFormat
from megalith.data.chat.special_tokens import SpecialTokens
from megalith.data.chat.template import ChatTemplate
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.errors import DataError
from tests.data.chat.examples import CHATML, SPECIAL, assistant, tokenizer, user

# one user message, written by an expression, and one answer
ONE = "<|im_start|>%s<|im_end|><|im_start|>{%% generation %%}{{ messages[1].content }}{%% endgeneration %%}<|im_end|>"
JOINED = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
NUM_SPECIAL = 4


def encoded(template: str, content: Any, made: Tokenizer | None = None, **record: Any) -> tuple[Tokenizer, EncodedChat]:
    made = made or tokenizer()
    encode = ChatEncoder(made, ChatFormat(template))
    [found] = encode({"messages": [{"role": "user", "content": content}, assistant("fine")], **record})
    return made, found


def special_in(made: Tokenizer, found: EncodedChat) -> list[str]:
    return [made.decode([id]) for id in found.tokens if id in made.special_ids]


FORGERIES = {
    "parts that join": (JOINED, [{"text": "w <"}, {"text": "/turn>"}], "w </turn>"),
    "a part that joins the template": ("<{{ messages[0].content }}", "/turn>", "</turn>"),
    "a word between signs of the template": ("<{{ messages[0].content }}>", "s", "<s>"),
    "a key": ("{{ messages[0].content | tojson }}", {"</turn>": {"<s>": 1}}, '{"</turn>": {"<s>": 1}}'),
    "pairs": ("{{ messages[0].content[0][1] }}", [("a", "</turn>")], "</turn>"),
    "Python's quotes": ("{{ messages[0].content | trim }}", ["a</turn>b"], "['a</turn>b']"),
    "JSON in ASCII": ("{{ messages[0].content | tojson(ensure_ascii=true) }}", "ü</turn>", '"\\u00fc</turn>"'),
    "removed characters": ("{{ messages[0].content | replace('#', '') }}", "<|im_#end|>", "<|im_end|>"),
    "small letters": ("{{ messages[0].content | lower }}", "</TURN>", "</turn>"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_text_of_a_message_becomes_a_special_token(forgery):
    expression, content, text = FORGERIES[forgery]
    made, found = encoded(ONE % expression, content)
    assert special_in(made, found) == ["<|im_start|>", "<|im_end|>"] * 2
    assert made.decode(found.tokens) == f"<|im_start|>{text}<|im_end|><|im_start|>fine<|im_end|>"
    assert found.num_bytes == len(made.decode(found.tokens).encode())


def test_tools_cannot_forge_special_tokens_either():
    tools = [{"name": "</turn>", "parameters": {"<s>": ["<|im_end|>"]}}]
    made, found = encoded(ONE % "{{ tools | tojson }}", "a", tools=tools)
    assert len(special_in(made, found)) == NUM_SPECIAL
    assert '[{"name": "</turn>", "parameters": {"<s>": ["<|im_end|>"]}}]' in made.decode(found.tokens)


def test_harmless_tools_are_not_refused():
    names = ["a", "s", "t", "im", "end", "x/y", "a<b>", "[1]"]
    tools = [{"name": name, "parameters": {name: {"type": "user"} for name in names}} for name in names]
    made, found = encoded(ONE % "{{ tools | tojson }}{{ messages[0].content | join }}", names, tools=tools)
    assert len(special_in(made, found)) == NUM_SPECIAL


@pytest.mark.parametrize(
    "expression",
    [
        "{{ 'system' if messages[0].content.startswith('<|im_end|>') }}",
        "{{ messages[0].content.split('<')[-1] }}",
        "{{ 'one' if messages[0].content.startswith('<|im_end|>') else 'two' }}",
        "{{ messages[0].content | urlencode }}",
    ],
)
def test_a_template_that_looks_for_special_tokens_in_messages_is_refused(expression):
    with pytest.raises(DataError, match=r"as they are; .* could forge one \(<\|im_end\|>\); remove special tokens"):
        encoded(ONE % expression, "<|im_end|> one")
    encoded(ONE % expression, "one")


def test_a_template_may_look_for_texts_that_are_no_part_of_special_tokens():
    kept = "{{ messages[0].content.split('</think>')[-1] }}{{ '!' if '<tool>' in messages[0].content }}"
    made, found = encoded(ONE % kept, "<think>a < b</think><tool></turn>")
    assert "<|im_start|><tool></turn>!<|im_end|>" in made.decode(found.tokens)
    assert len(special_in(made, found)) == NUM_SPECIAL


def test_the_template_may_write_a_role_in_a_special_token():
    made = train_byte_level_bpe(["one two"], 300, ["<|user|>", "<|assistant|>", "<|end|>"])
    template = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    encode = ChatEncoder(made, ChatFormat(template))
    [found] = encode({"messages": [user("user"), assistant("<|end|>")]})
    assert special_in(made, found) == ["<|user|>", "<|end|>", "<|assistant|>", "<|end|>"]
    [found] = encode({"messages": [{"role": "end|><|user", "content": "a"}, assistant("b")]})
    assert special_in(made, found) == ["<|end|>", "<|assistant|>", "<|end|>"]


def test_of_special_tokens_that_begin_alike_the_longest_counts():
    made = train_byte_level_bpe(["one >> two >>"] * 9, 300, ["<s>", "<s>>", *SPECIAL[1:]])
    made, found = encoded(ONE % "<s>>{{ messages[0].content }}", "<s>>", made)
    assert special_in(made, found) == ["<|im_start|>", "<s>>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
    spelled = found.tokens[2 : found.tokens.index(made.token_id("<|im_end|>"))]
    assert [made.decode([id]) for id in spelled] == ["<", "s", ">>"]


@pytest.mark.parametrize("expression", ["{{ messages[0].content }}", "{{ messages[0].content | upper }}"])
@pytest.mark.parametrize("spelled", ["EOS", "say EOS", "EOSEOS", "</turn>EOS", "sEOSs"])
def test_a_special_token_of_letters_alone_is_not_forged_either(expression, spelled):
    made = train_byte_level_bpe(["say END OF"] * 9, 300, ["EOS", *SPECIAL])
    made, found = encoded(ONE % (expression + "EOS"), spelled, made)
    assert special_in(made, found) == ["<|im_start|>", "EOS", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
    assert spelled.upper() in made.decode(found.tokens).upper()


def test_the_template_may_write_a_role_that_is_a_special_token():
    made = train_byte_level_bpe(["one two"], 300, ["user", "assistant", "<|end|>"])
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    [found] = ChatEncoder(made, ChatFormat(template))({"messages": [user("the user"), assistant("fine")]})
    assert special_in(made, found) == ["user", "<|end|>", "assistant", "<|end|>"]


def test_a_message_that_hides_a_special_token_of_the_template_in_a_longer_one_is_refused():
    made = train_byte_level_bpe(["one two"], 300, ["#<", *SPECIAL])
    with pytest.raises(DataError, match="a message could forge one"):
        encoded(ONE % "{{ messages[0].content }}<s>", "one #", made)
    made, found = encoded(ONE % "{{ messages[0].content }}<s>", "# one", made)
    assert special_in(made, found) == ["<|im_start|>", "<s>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_contents_that_are_no_text_are_refused():
    with pytest.raises(DataError, match="must be text; it contains bytes, b'</turn>'"):
        encoded(ONE % "{{ messages[0].content }}", b"</turn>")


def test_texts_without_signs_of_special_tokens_are_rendered_once():
    special = SpecialTokens(SPECIAL, ChatTemplate(CHATML, {}))
    calls: list[Any] = []
    assert special.forged("one", [user("one, two.")], lambda content: calls.append(content) or "one") == []
    assert calls == []
