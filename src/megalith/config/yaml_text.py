"""YAML as people write settings: ``3e-4`` is a number, ``no`` and ``12:30`` are text, a key given twice is an error.

PyYAML reads YAML 1.1, where the first is text and the others are false and 750. Reading here follows the core schema of
YAML 1.2.2 (section 10.3.2), plus underscores in whole numbers; writing quotes whatever either version would misread.
"""

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

from megalith.errors import ConfigError

__all__ = ["read_override", "read_yaml", "write_override", "write_yaml"]

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
_BREAK = re.compile("[\r\x85\u2028\u2029\ufeff]")
_SCALARS = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)"), list("tTfF")),
    "int": (re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*"), list("-+0123456789")),
    "float": (re.compile(rf"(?:{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"), list("-+.0123456789")),
}


def read_yaml(text: str, source: str) -> Any:
    """The one document in ``text``. Raises ConfigError, naming ``source`` and the line, for what is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} cannot be read as YAML: {' '.join(str(error).split())}") from error


def write_yaml(value: Any) -> str:
    """``value`` as YAML that ``read_yaml`` reads back, keys in their order, lists on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def read_override(text: str) -> tuple[str, Any]:
    """The dotted name and the value of ``name=value``, where the value is YAML: ``optim.lr=3e-4``, ``load=null``."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"an override must look like optim.lr=3e-4; got {text!r}")
    return name.strip(), read_yaml(value, f"the value of override {text!r}")


def write_override(name: str, value: Any) -> str:
    """``name=value`` on one line, such that ``read_override`` reads it back."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    text = text.removesuffix("\n").removesuffix("\n...")  # PyYAML ends a lone scalar with an end-of-document mark
    return f"{name}={text}"


class _Loader(yaml.SafeLoader):
    """Core schema, and no key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own protocol)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))  # base 10 always: 010 is ten


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else; writes lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML's other styles let line breaks that are not \n fall into spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _BREAK.search(text) else None)


for _kind, (_pattern, _first) in _SCALARS.items():
    _exact = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _exact, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _exact, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
_Dumper.add_representer(list, _write_list)
_Dumper.add_representer(str, _write_text)
