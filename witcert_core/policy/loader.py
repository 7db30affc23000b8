"""YAML as a policy file means it: no duplicate keys, 1e-2 is a number, and 010 is not eight."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node

_MISLEADING = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_NUMBER_STARTS = list("-+.0123456789")
_UNREADABLE = (ValueError, IndexError, KeyError, OverflowError)  # what PyYAML raises for `!!int ''`, 5000 digits, ...


class PolicyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys, reads 1e-2 as text, 010 as 8 and 1:30 as 90; all of these mislead.

    Numbers are those of YAML 1.2 (decimal, 0x, .inf, .nan) with underscores; 010, 1:30 and dates are text.
    """

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r} stands there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _UNREADABLE as error:
            kind = str(node.tag).rpartition(":")[2]
            raise ConstructorError(None, None, f"found no {kind} that can be read", node.start_mark) from error


PolicyLoader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in found if tag not in _MISLEADING]
    for start, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PolicyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), _NUMBER_STARTS
)
PolicyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?)$"
        r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    _NUMBER_STARTS,
)


def read_yaml(text: str) -> Any:
    """The one document in `text`; yaml.YAMLError for anything that cannot be read, however it is wrong."""
    try:
        return yaml.load(text, Loader=PolicyLoader)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
