"""What else of a model reads the config's ``rope_parameters``, and what another encoding would change there.

The attention of DeepSeek takes a softmax scale from them when it is built, that of Ministral 3 looks up a temperature
and a length while it runs, Moonshine's encoder builds a table of its own. A patch changes the table alone, so an
encoding must leave all that as it is.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from rope_patch.patching.locate import RotaryLocation, original_tables
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.probe import without_weights


class DecoderReaders:
    """The classes of a text decoder that read ``rope_parameters`` besides the rotary embedding.

    Args:
        location: where the model keeps its rotary module.
        config: the text decoder's, before the patch.

    Attributes:
        names: of the classes.
    """

    def __init__(self, location: RotaryLocation, config: PreTrainedConfig) -> None:
        rotary = type(location.module.original if isinstance(location.module, PatchedRotary) else location.module)
        classes: set[Any] = {type(module) for module in location.decoder.modules()} - {rotary, PatchedRotary}
        self.classes = tuple(sorted((cls for cls in classes if _reading_lines(cls)), key=lambda cls: cls.__name__))
        self.names = ", ".join(cls.__name__ for cls in self.classes)
        self._location, self._config = location, config
        self._found: dict[tuple[str, str], list[Any]] | None = None

    def objection(self, config: PreTrainedConfig) -> str | None:
        """Say what these classes would do otherwise under another config; None where they would do the same."""
        if not self.classes or config.rope_parameters == self._config.rope_parameters:
            return None
        for cls in self.classes:
            for key in _keys_of(cls):
                if key is None:
                    return f"{cls.__name__} reads config.rope_parameters in a way that is not known"
                if (old := self._config.rope_parameters.get(key)) != (new := config.rope_parameters.get(key)):
                    return f"{cls.__name__} would read {key} as {new}, and it is {old}"
        self._found = self._found or self._derived(self._config)
        before, after = self._found, self._derived(config)
        if before is None or after is None:
            return f"{self.names} reads config.rope_parameters, and what it makes of them cannot be seen"
        for name, attribute in {**before, **after}:
            old, new = before.get((name, attribute), []), after.get((name, attribute), [])
            for one, other in itertools.zip_longest(old, new):
                if one != other:
                    return f"{name} would be built with a {attribute} of {other!r}, and it has {one!r}"
        return None

    def completed(self, encoding: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an encoding, then with more and more of the keys of the one found, which readers may need."""
        yield dict(encoding)
        found = {key: value for key, value in found.items() if key != "type"}  # what older configs call rope_type
        if self.classes:
            looked_up = {key for cls in self.classes for key in _keys_of(cls)}
            yield {**{key: value for key, value in found.items() if key in looked_up}, **encoding}
            yield {**found, **encoding}
            if encoding.get("rope_type") == "longrope":  # its lists and attention factor say all there is of the table
                kept: dict[str, Any] = {
                    key: found[key] for key in ("factor", "original_max_position_embeddings") if key in found
                }
                yield {**found, **encoding, **kept}

    def _derived(self, config: PreTrainedConfig) -> dict[tuple[str, str], list[Any]] | None:
        """Return what modules of these classes keep when they are built from a config: by class and attribute."""
        decoder = self._location.decoder
        if type(decoder.config) is not type(config):
            return None
        built = without_weights(type(decoder), config)
        if built is None:
            return None
        kept: dict[tuple[str, str], list[Any]] = {}
        for module in built.modules():
            if type(module) in self.classes:
                if any(True for _ in module.buffers(recurse=False)):
                    return None
                for name, value in vars(module).items():
                    if isinstance(value, bool | int | float | str | tuple | list | None):
                        kept.setdefault((type(module).__name__, name), []).append(value)
        return kept


def outside_readers(location: RotaryLocation) -> list[str]:
    """Name the classes outside the text decoder that read the config in which its ``rope_parameters`` are."""
    inside = set(location.decoder.modules())
    names = set()
    for module in set(location.model.modules()) - inside:
        cls: Any = type(module)
        reads = original_tables(module) or _reading_lines(cls)
        if reads and any(getattr(module, "config", None) is config for config in location.configs):
            names.add(cls.__name__)
    return sorted(names)


_source_lock = threading.Lock()


@functools.cache
def _reading_lines(cls: Any) -> tuple[tuple[str, str], ...]:
    """Return the lines of a class that take something from ``rope_parameters``, each with the name of its method."""
    if cls.__module__.startswith("torch."):
        return ()
    try:
        with _source_lock:  # it parses, which Python 3.11 cannot do in two threads
            source = inspect.getsource(cls)
    except (OSError, TypeError):  # made at run time
        return ()
    if source.count("self.rope_parameters") == 1:  # kept, and never read
        source = source.replace("self.rope_parameters = config.rope_parameters", "")
    method, lines = "", []
    for line in source.splitlines():
        if start := re.match(r"\s+def (\w+)", line):
            method = start[1]
        if "config.rope_parameters" in line and not _ASKS_ONLY.search(line):
            lines.append((method, line))
    return tuple(lines)


def _keys_of(cls: Any) -> set[str | None]:
    """Return the keys of ``rope_parameters`` that a class looks up while it runs; None for what is not a known key."""
    keys: set[str | None] = set()
    for method, line in _reading_lines(cls):
        if method != "__init__":
            keys |= set(re.findall(r"""config\.rope_parameters(?:\.get\(|\[)["'](\w+)["']""", line)) or {None}
    return keys


_ASKS_ONLY = re.compile(
    r"partial_rotary_factor|and \S*rope_parameters$"
    r"|rope_parameters(\[layer_type\]|\.get\(.rope_theta.\))? is (not )?None"
)
"""Lines that take the shape of the heads from ``rope_parameters``, or ask no more than whether they are there."""
