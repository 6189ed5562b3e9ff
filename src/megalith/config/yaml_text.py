"""YAML as people write settings: ``3e-4`` is a number, ``no`` and ``12:30`` are text, a key given twice is an error.

PyYAML reads YAML 1.1, where the first is text and the others are false and 750. Reading here follows the core schema of
YAML 1.2.2 (section 10.3.2), plus underscores in integers; writing quotes text that either version would misread.
"""

import math
import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from megalith.errors import ConfigError

__all__ = ["MOST_BYTES", "read_override", "read_yaml", "write_override", "write_yaml"]

MOST_BYTES = 1 << 18  # limit on a settings file; a run's settings take about 2 kB

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
_MOST_LEVELS = 20  # of nesting; a run's settings have five
_MOST_NODES = 4_000  # values and names in a file; a run's settings have about 150
_MOST_DIGITS = 100  # of an integer; Python refuses to print more than 4300

_BREAK = re.compile("[\r\x85\u2028\u2029\ufeff]")
_SCALARS = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)"), list("tTfF")),
    "int": (re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*"), list("-+0123456789")),
    "float": (re.compile(rf"(?:{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"), list("-+.0123456789")),
}


def read_yaml(text: str | bytes, source: str) -> Any:
    """Parses the single document in ``text``, which is UTF-8 if it is bytes.

    Raises:
        ConfigError: it is not YAML, or exceeds the limits on settings; the message names ``source`` and the line.
    """
    try:
        if len(text) > MOST_BYTES:
            raise yaml.YAMLError(f"it has {len(text):,} bytes; settings may have at most {MOST_BYTES:,}")
        return yaml.load(text.decode("utf-8") if isinstance(text, bytes) else text, _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source} cannot be read as YAML: byte {error.start} is not UTF-8; save it as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} cannot be read as YAML: {' '.join(str(error).split())}") from error


def write_yaml(value: Any) -> str:
    """Returns ``value`` as YAML that ``read_yaml`` reads back, with keys in order and lists on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def read_override(text: str) -> tuple[str, Any]:
    """Parses ``name=value`` into a dotted name and a value, which is YAML: ``optim.lr=3e-4``, ``load=null``."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"an override must look like optim.lr=3e-4; got {text!r}")
    return name.strip(), read_yaml(value, f"the value of override {text!r}")


def write_override(name: str, value: Any) -> str:
    """Returns ``name=value`` on one line, which ``read_override`` reads back."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    text = text.removesuffix("\n").removesuffix("\n...")  # PyYAML ends a lone scalar with an end-of-document marker
    return f"{name}={text}"


class _Loader(yaml.SafeLoader):
    """The core schema, without duplicate keys, and with limits that are checked before any value is constructed."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own protocol)
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (*(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")), None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        self._depth += 1
        mark = self.peek_event().start_mark
        _check_bounds(self._num_nodes, self._depth, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        _measure(node, {})
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", node.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    def construct_core(self, node: yaml.Node) -> Any:
        """Constructs a scalar of the core schema, also with an explicit tag; ``!!int many`` is an error."""
        kind = node.tag.rpartition(":")[2]
        if not isinstance(node, yaml.ScalarNode) or not _SCALARS[kind][0].fullmatch(node.value):
            message = f"it is tagged {kind} but is not a valid {kind}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        if kind == "int":
            if len(node.value) > _MOST_DIGITS:
                message = f"an integer of {len(node.value):,} digits; settings may have at most {_MOST_DIGITS}"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
            return int(node.value)  # base 10 always: 010 is ten
        return {
            "null": lambda _: None,
            "bool": self.construct_yaml_bool,
            "float": self.construct_yaml_float,
        }[kind](node)


def _check_bounds(num_nodes: int, depth: int, mark: Any) -> None:
    if num_nodes > _MOST_NODES or depth > _MOST_LEVELS:
        what = (
            f"{_MOST_LEVELS} levels of nesting"
            if depth > _MOST_LEVELS
            else f"{_MOST_NODES:,} values after expanding aliases"
        )
        raise yaml.composer.ComposerError(None, None, f"it has more than {what}", mark)


def _measure(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """Returns the number of values and levels of ``node`` with aliases expanded; raises if they exceed the limits.

    A few lines of aliases to aliases can expand to billions of values.
    """
    if node not in known:
        known[node] = None  # in progress
        parts = [part for entry in node.value for part in entry] if isinstance(node, yaml.MappingNode) else node.value
        sizes = [_measure(part, known) for part in parts] if isinstance(node, yaml.CollectionNode) else []
        size = 1 + sum(values for values, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
        _check_bounds(*size, node.start_mark)
        known[node] = size
    found = known[node]
    if found is None:
        raise yaml.composer.ComposerError(None, None, "an alias refers to a node that contains it", node.start_mark)
    return found


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else; writes lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML's other styles turn line breaks other than \n into spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAK.search(text) else None)


for _kind, (_pattern, _first) in _SCALARS.items():
    _exact = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _exact, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _exact, _first)
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_core)
_Dumper.add_representer(list, _write_list)
_Dumper.add_representer(str, _write_text)
