"""Reads the forms in which records hold a conversation.

Templates write the arguments of a tool call and the tools as JSON, so where a record has them as JSON text, it is
parsed, as in vLLM.

messages               [{"role": ..., "content": ...}, ...], with tools if it has any: OpenAI and Hugging Face
conversations          [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]: ShareGPT
prompt, completion     two texts, or two lists of messages, of which the first is only context: TRL
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.data.chat.template import Message
from megalith.errors import DataError

__all__ = ["ASSISTANT", "CHAT_FIELDS", "ChatRecord", "learned_turns", "read_record"]

ASSISTANT = "assistant"
CHAT_FIELDS = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs")
_NESTED = (dict, list, tuple)
_MOST_LEVELS = 100
_SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "user": "user", ASSISTANT: ASSISTANT, "system": "system"}


@dataclass(frozen=True)
class ChatRecord:
    """A conversation.

    Attributes:
        messages: with a role, without fields that are null, as in transformers.
        tools: that the template describes; None if the record has none.
        variables: that the template reads besides, such as ``enable_thinking``.
        texts: prompt and completion, if the record consists of two texts.
    """

    messages: Sequence[Message]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, str] | None = None


def read_record(record: Mapping[str, Any]) -> ChatRecord:
    """Returns the conversation in ``record``. Raises DataError if it has none of these forms, or is nested too deep."""
    try:
        found = _read(record)
    except RecursionError:  # of JSON in a text
        found = None
    if found is None or _is_deeper([found.messages, found.tools, found.variables], _MOST_LEVELS):
        raise DataError("must have lists and objects that are not nested hundreds deep; remove it")
    return found


def _is_deeper(value: Any, num_levels: int) -> bool:
    """Whether lists and objects are nested in more than ``num_levels`` levels; without recursion, which has a limit."""
    level = [value]
    for _ in range(num_levels):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, _NESTED)]
        level = [each for values in inside for each in values]
        if not level:
            return False
    return True


def _read(record: Mapping[str, Any]) -> ChatRecord:
    tools, variables = _tools(record.get("tools")), _variables(record.get("chat_template_kwargs"))
    if record.get("messages") is not None:
        return ChatRecord(_messages(record["messages"], "messages"), tools, variables)
    if record.get("conversations") is not None:
        return ChatRecord(_messages(_from_sharegpt(record["conversations"]), "conversations"), tools, variables)
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        context = [{**message, "weight": 0} for message in _messages(prompt, "prompt")]
        return ChatRecord([*context, *_messages(completion, "completion")], tools, variables)
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        names = ", ".join(map(repr, record)) or "no keys"
        raise DataError(
            "must have a list under 'messages', or text under 'prompt' and 'completion', of which the completion is "
            f"not empty; it has {names}"
        )
    messages = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]
    return ChatRecord(messages, tools, variables, (prompt, completion))


def learned_turns(messages: Sequence[Message]) -> list[int]:
    """Returns the numbers of the assistant's messages to learn. Raises DataError if there are none.

    In OpenAI's format, a ``weight`` of 0 marks one that is only context.
    """
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            weight = message.get("weight", 1)
            if weight not in (0, 1):
                raise DataError(f"must have messages with a weight of 0 or 1; got {weight!r:.80}")
            turns += [number] * int(weight)
    if not turns:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(f"must have a message of the {ASSISTANT} to learn; its roles are {roles}; remove it")
    return turns


def _messages(given: Any, key: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise DataError(f"must have a list of messages under {key!r}; got {given!r:.80}")
    for number, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"must have messages with a role and a content; message {number} is {message!r:.80}")
    return [_with_arguments({name: value for name, value in message.items() if value is not None}) for message in given]


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """``message``, of whose tool calls the arguments are objects where they are the JSON text of one."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed_call(call["function"])}
    arguments = _parsed(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _parsed(value: Any) -> Any:
    """``value``, or what it says if it is JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _tools(given: Any) -> list[Any] | None:
    tools = _parsed(given)
    if not (tools is None or isinstance(tools, list)):
        raise DataError(f"must have a list, or the JSON text of one, under 'tools'; got {given!r:.80}")
    return tools


def _variables(given: Any) -> Mapping[str, Any]:
    variables: dict[str, Any] = {} if given is None else given
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise DataError(f"must have an object under 'chat_template_kwargs'; got {given!r:.80}")
    return variables


def _from_sharegpt(given: Any) -> Any:
    """Returns ``given`` with role and content; what has another form is left for ``_messages`` to refuse."""
    return [_with_role(message) for message in given] if isinstance(given, list) else given


def _with_role(message: Any) -> Any:
    author = message.get("from") if isinstance(message, dict) else None
    if author is None:
        return message
    if not isinstance(author, str) or author not in _SHAREGPT_ROLES:
        raise DataError(
            f"must have messages from {', '.join(_SHAREGPT_ROLES)} under 'conversations'; got {author!r:.80}; write "
            "them under 'messages' with a role and a content"
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}  # such as a weight
    return {**others, "role": _SHAREGPT_ROLES[author], "content": message.get("value")}
