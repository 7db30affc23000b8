"""Values of a model's configuration by name, each of the type that is expected of it or an error that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from witcert_core.errors import InputError

MOST = 1_000_000
"""More layers, heads or channels than any model has: a larger number in a configuration is a mistake."""
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "llm_cfg")


class Fields:
    """A configuration, or a section of one: a mapping, or an object whose attributes are read.

    origin: what messages call the model. Values that are not there are None.
    """

    def __init__(self, source: Any, origin: str) -> None:
        self.source = source
        self.origin = origin

    def __call__(self, name: str) -> Any:
        if isinstance(self.source, Mapping):
            return self.source.get(name)
        try:
            return getattr(self.source, name, None)
        except RuntimeError:  # Transformers: it differs by layer, and is asked of `layer`
            return None

    def values(self) -> Mapping[str, Any]:
        """All of them by name."""
        if isinstance(self.source, Mapping):
            return self.source
        found: Mapping[str, Any] = self.source.to_dict() if hasattr(self.source, "to_dict") else vars(self.source)
        return found

    def integer(self, name: str, least: int = 1) -> int | None:
        """None also for what is written as absent: 0 or False."""
        value = self(name)
        return None if value is None or value is False else self.checked(value, name, least)

    def checked(self, value: Any, name: str, least: int = 1) -> int:
        """`value` as an integer of a believable size."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise InputError(f"{self.origin}: {name} is {value!r}; expected an integer from {least} to {MOST}")
        return value

    def first(self, *names: str) -> int:
        """The first of them that there is."""
        for name in names:
            if (value := self(name)) is not None:
                return self.checked(value, name)
        raise InputError(f"{self.origin}: has no {' or '.join(names[:2])}; is this a language model's configuration?")

    def integers(self, name: str) -> list[int] | None:
        """None for an empty list as well."""
        values = self(name)
        if values is None or values is False or (isinstance(values, (list, tuple)) and not values):
            return None
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, int) for value in values):
            raise InputError(f"{self.origin}: {name} is {values!r}; expected a list of integers")
        return [int(value) for value in values]

    def words(self, name: str) -> list[str] | None:
        """None for an empty list as well."""
        values = self(name)
        if values is None or (isinstance(values, (list, tuple)) and not values):
            return None
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
            raise InputError(f"{self.origin}: {name} is {values!r}; expected a list of words")
        return list(values)

    def section(self, name: str) -> Fields | None:
        """A part with values of its own, as a mapping or an object."""
        return self._part(self(name), name)

    def sections(self, name: str) -> list[Fields] | None:
        """A list of such parts."""
        values = self(name)
        if values is None or (isinstance(values, (list, tuple)) and not values):
            return None
        if not isinstance(values, (list, tuple)):
            raise InputError(f"{self.origin}: {name} is {values!r}; expected a list of mappings")
        return [part for value in values if (part := self._part(value, name)) is not None]

    def layer(self, index: int) -> Fields:
        """The same of one layer, where the configuration has one for each (Transformers' `per_layer_config`)."""
        layers = self("per_layer_config")
        if isinstance(self.source, Mapping):
            if layers is None:
                return self
            by_layer: Any = layers.items() if isinstance(layers, Mapping) else [("", None)]
            if not all(str(layer).isdecimal() and isinstance(values, Mapping) for layer, values in by_layer):
                raise InputError(f"{self.origin}: per_layer_config is {layers!r}; expected mappings by layer")
            own = next((dict(values) for layer, values in by_layer if int(layer) == index), {})
            return Fields({**self.source, **own}, self.origin)
        return Fields(layers[index], self.origin) if isinstance(layers, Sequence) and index < len(layers) else self

    def _part(self, value: Any, name: str) -> Fields | None:
        if value is None:
            return None
        if not isinstance(value, Mapping) and not hasattr(value, "__dict__"):
            raise InputError(f"{self.origin}: {name} is {value!r}; expected a mapping")
        return Fields(value, self.origin)


def text_part(config: Any) -> Any:
    """The part of a configuration that describes the language model; all of it where there is one only."""
    if not isinstance(config, Mapping):
        find = getattr(config, "get_text_config", None)
        return config if find is None else find(decoder=True)
    for name in _TEXT_PARTS:
        if name in config:
            return config[name]
    thinker = config.get("thinker_config")
    return text_part(thinker) if isinstance(thinker, Mapping) else config
