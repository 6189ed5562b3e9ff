"""Renders conversations with the chat template of a model: a Jinja text that is published beside its tokenizer.

The environment is that of ``apply_chat_template`` in transformers: the sandbox, trimmed blocks, ``break`` and
``continue``, ``raise_exception``, ``strftime_now`` and ``tojson``. A template is untrusted code, so it gets plain
values only, and ``dict`` and ``namespace`` without their internals.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalith.errors import DataError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_BEGIN, _END = "learned_begin_mark", "learned_end_mark"  # variables of a template


class ChatTemplate:
    """One chat template.

    Args:
        text: the Jinja text.
        tokens: special tokens that the text refers to by name, such as ``bos_token``.

    Attributes:
        marks_learned_text: whether ``{% generation %}`` blocks enclose what the assistant writes.
        names: the texts and names in its code, which it may look for in messages.

    Raises:
        DataError: the text is not a template.
    """

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        started = datetime.now()  # one time for all texts: those of a conversation are compared with each other
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=started.strftime,
            dict=_PlainDict(),
            namespace=_Namespace,
        )
        self._tokens = dict(tokens)
        try:
            tree = environment.parse(text)
            self.marks_learned_text = any(name.name == _BEGIN for name in tree.find_all(nodes.Name))
            self.names = _names(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template must be a Jinja template; it cannot be parsed: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        marks: Sequence[str] = ("", ""),
    ) -> str:
        """The text of ``messages``.

        Args:
            tools: descriptions of the tools that the assistant may call.
            variables: others that the template reads.
            add_generation_prompt: end with what precedes a message of the assistant.
            marks: two strings to put before and after the text of each ``{% generation %}`` block.

        Raises DataError if the template refuses the messages, or the variables include one of the others.
        """
        own = {
            **self._tokens,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _BEGIN: marks[0],
            _END: marks[1],
        }
        if taken := [name for name in variables or {} if name in own]:
            raise DataError(
                f"must have variables of the chat template under 'chat_template_kwargs' that are not set otherwise; it "
                f"has {', '.join(taken):.80}; remove them"
            )
        try:
            return self._template.render({"documents": None, **(variables or {}), **own})
        except Exception as error:  # whatever its code raises, even a TypeError, is its answer to these messages
            raise DataError(f"the chat template does not accept the messages: {error}") from error


def _names(tree: nodes.Template) -> frozenset[str]:
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset({*texts, *(node.attr for node in tree.find_all(nodes.Getattr)), *_REASONING})


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: its text, between two marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares a variable of instances

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]).set_lineno(line) for name in (_BEGIN, _END))
        return [begin, nodes.Scope(body).set_lineno(line), end]


class _PlainDict:
    """``dict`` in a template, without the attributes of the class."""

    def __call__(self, *pairs: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*pairs, **fields)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` in a template, without attributes that begin with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:  # like jinja2's, so that a field may be called self
        self, pairs = args[0], args[1:]
        attributes = dict(*pairs, **fields)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"names in a namespace must not begin with an underscore; got {name!r}")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as it is; jinja2's own filter escapes characters that have a meaning in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _with_reasoning(message: Message) -> dict[str, Any]:
    """``message`` with its reasoning under the names that templates read, whichever it has, as in transformers."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return {**message}
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
