"""YAML as a policy file means it: no duplicate keys, and 1e-2 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode


class PolicyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys and reads 1e-2, for want of a dot, as text; both mislead."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r} stands there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


PolicyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)
