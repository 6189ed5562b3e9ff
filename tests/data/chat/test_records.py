"""Forms of records: all give the same conversation, and other ones are refused."""

from typing import Any

import pytest

from megalith.errors import DataError
from tests.data.chat.examples import CHATML, CHATS, assistant, encode, encoder, runs, user


def test_with_a_template_prompt_and_completion_are_two_messages():
    [found] = encoder()({"prompt": "one", "completion": "two"})
    assert found == encode(CHATML, [user("one"), assistant("two")])


def test_sharegpts_conversations_are_messages():
    given = [{"from": "system", "value": "be"}, {"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    [found] = encoder()({"conversations": given})
    assert found == encode(CHATML, [{"role": "system", "content": "be"}, user("one"), assistant("two")])


def test_messages_of_sharegpt_keep_their_other_fields():
    first, last = {"from": "gpt", "value": "two", "weight": 0}, {"from": "gpt", "value": "four", "weight": 1}
    given = [{"from": "human", "value": "one"}, first, {"from": "human", "value": "three"}, last]
    [found] = encoder()({"conversations": given})
    messages = [user("one"), assistant("two", weight=0), user("three"), assistant("four")]
    assert found == encode(CHATML, messages)
    assert "two" in runs(found)[0]


def test_of_a_prompt_of_messages_nothing_is_learned():
    prompt = [user("one"), assistant("two"), user("three")]
    [found] = encoder()({"prompt": prompt, "completion": [assistant("four")]})
    context, learned = runs(found)
    assert "two" in context
    assert learned == "four<|im_end|>\n"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "one"}, "must have a list under 'messages', or text under 'prompt' and 'completion'.* 'text'"),
        ({"prompt": "one", "completion": ""}, "the completion is not empty"),
        ({"prompt": [user("one")], "completion": "two"}, "text under 'prompt'"),
        ({"prompt": [], "completion": [assistant("two")]}, r"list of messages under 'prompt'; got \[\]"),
        ({"conversations": "one"}, "list of messages under 'conversations'; got 'one'"),
        ({"conversations": [{"from": "narrator", "value": "one"}]}, "messages from human, gpt, .*; got 'narrator'"),
        ({"conversations": [{"from": ["human"], "value": "one"}]}, r"messages from human, gpt, .*; got \['human'\]"),
        ({"conversations": [{"value": "one"}]}, "role and a content; message 0 is {'value': 'one'}"),
        ({"messages": []}, r"list of messages under 'messages'; got \[\]"),
        ({"messages": "one"}, "list of messages under 'messages'; got 'one'"),
        ({"messages": [user("one"), {"content": "two"}]}, "role and a content; message 1 is "),
        ({"messages": [user("one")]}, "message of the assistant to learn; its roles are user"),
        ({"messages": [user("one"), assistant("two", weight=0)]}, "message of the assistant to learn"),
        ({"messages": [user("one"), assistant("two", weight=0.5)]}, "weight of 0 or 1; got 0.5"),
        ({"messages": CHATS[0], "tools": "add"}, "a list, or the JSON text of one, under 'tools'; got 'add'"),
        ({"messages": CHATS[0], "tools": '{"name": "add"}'}, "a list, or the JSON text of one, under 'tools'"),
        ({"messages": CHATS[0], "chat_template_kwargs": "a"}, "an object under 'chat_template_kwargs'; got 'a'"),
        ({"messages": [user("\ud800"), assistant("two")]}, "unpaired surrogate"),
        ({"messages": [{"role": "user"}, assistant("two")]}, "does not accept the messages"),
    ],
)
def test_records_of_another_form_are_refused(record, says):
    with pytest.raises(DataError, match=says):
        encoder()(record)


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_values_nested_hundreds_deep_are_refused(depth):
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    with pytest.raises(DataError, match="not nested hundreds deep; remove it"):
        encode("{{ messages[0].content }}", [user("one"), assistant("two", extra=nested)])
