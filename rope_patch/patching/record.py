"""The patch record: what ``config.rope_patch`` and an adapter's ``rope_patch.json`` hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import torch
from transformers.utils import logging as hf_logging

from rope_patch import __version__
from rope_patch.frequencies import fingerprint, table_of
from rope_patch.methods import Method, TwoTables, from_dict, method_string, missing_methods
from rope_patch.tables import RotaryTable

SCHEMA = 1

logger = hf_logging.get_logger("rope_patch")


@dataclass(frozen=True)
class TableRecord:
    """One table: (pairs,) frequencies [rad/token], the factor on cos and sin, and the hash of both."""

    inv_freq: tuple[float, ...]
    attention_scaling: float
    hash: str

    @classmethod
    def of(cls, table: RotaryTable) -> TableRecord:
        """Record a table."""
        return cls(tuple(table.inv_freq.tolist()), float(table.attention_scaling), table.fingerprint)

    def matches(self, other: TableRecord) -> bool:
        """Tell whether two tables are one, up to what another machine's float32 power function may differ by."""
        if self.hash == other.hash:
            return True
        mine, theirs = table_of(self.inv_freq), table_of(other.inv_freq)
        return (
            mine.shape == theirs.shape
            and torch.allclose(mine, theirs, rtol=1e-6, atol=0.0)
            and abs(self.attention_scaling - other.attention_scaling) < 1e-6
        )


@dataclass(frozen=True, eq=False)
class RecordedMethod(Method):
    """What stands for a method whose class is not defined here: it gives the tables that the record holds.

    Attributes:
        data: the method's :meth:`~rope_patch.Method.to_dict`, as recorded.
        tables: by layer type, as recorded.
        encodings: by layer type, the ``rope_parameters`` by which the config encodes the tables, where it does.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, TableRecord] = field(default_factory=dict)
    encodings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: ClassVar[str] = "recorded table"
    extends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Leave the fields as they are: they are no parameters."""

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Return the table that was recorded for this layer type."""
        recorded = self.tables[key_of(table.layer_type)]
        inv_freq = table_of(recorded.inv_freq)
        if torch.equal(inv_freq, table.inv_freq) and recorded.attention_scaling == table.attention_scaling:
            return table
        encoding = self.encodings.get(key_of(table.layer_type))
        return table.becomes(inv_freq, rope_parameters=encoding, attention_scaling=recorded.attention_scaling)

    def to_dict(self) -> dict[str, Any]:
        """Return what was recorded."""
        return copy.deepcopy(dict(self.data))

    def __str__(self) -> str:
        """Return the method string; every recorded parameter is in it, also one at its default."""
        return method_string(self.data)


@dataclass(frozen=True)
class PatchRecord:
    """What was done to a model's rotary tables, and what they were before.

    Attributes:
        method: the method's :meth:`~rope_patch.Method.to_dict`.
        layer_types: the patched layer types; ``[None]`` on unmixed models.
        tables: every table in use after the patch, by layer type (``"all"`` on unmixed models).
        base_tables: every table before it.
        base_config: the config's rotary settings before it (``rope_parameters``, ``max_position_embeddings``).
        target_length: the context the patch set, where asked [tokens].
        precision: of the angles, ``float32`` or ``float64``.
        freeze_at: the length a dynamic base table was frozen at [tokens].
        short_tables: the tables of sequences up to ``switch_at`` of the method, by layer type; empty where there is one
            table for all lengths.
        edited: the base tables that were not what the config described, and so are known by their numbers alone.
        package_version: the rope_patch that wrote the record.
        schema: version of this layout.
    """

    method: Mapping[str, Any]
    layer_types: tuple[str | None, ...]
    tables: Mapping[str, TableRecord]
    base_tables: Mapping[str, TableRecord]
    base_config: Mapping[str, Any]
    target_length: int | None = None
    precision: str = "float32"
    freeze_at: int | None = None
    short_tables: Mapping[str, TableRecord] = field(default_factory=dict)
    edited: tuple[str, ...] = ()
    package_version: str = __version__
    schema: int = SCHEMA

    @property
    def changed(self) -> bool:
        """Whether any table differs from the one before the patch."""
        tables = (*self.tables.items(), *self.short_tables.items())
        return any(table.hash != self.base_tables[key].hash for key, table in tables)

    @property
    def missing(self) -> str | None:
        """Say so where the class of the method, or of a step of it, is not defined here; None where it is."""
        names = ", ".join(map(repr, missing_methods(self.method)))
        if not names:
            return None
        return (
            f"the class of the method {names} is not defined here, so its tables are taken from the patch record. To "
            "have them computed anew, import the module that defines it: rope_patch.methods.import_methods in Python, "
            "--import MODULE on the command line"
        )

    def warn_of_missing(self) -> None:
        """Warn, once, where the class of the method is not defined here."""
        if self.missing is not None:
            logger.warning_once(self.missing)

    def to_method(self, encodings: Mapping[str, Any] | None = None) -> Method:
        """Return the method object; a :class:`RecordedMethod` where its class is not defined here.

        Args:
            encodings: as of ``RecordedMethod``.
        """
        data, encodings = self.method, encodings or {}
        if data.get("method") == TwoTables.name and missing_methods(data):
            long = self._recorded(data["long"], self.tables, encodings)
            return TwoTables(long, self._recorded(data["short"], self.short_tables, {}), switch_at=data["switch_at"])
        return self._recorded(data, self.tables, encodings)

    def _recorded(
        self, data: Mapping[str, Any], tables: Mapping[str, TableRecord], encodings: Mapping[str, Any]
    ) -> Method:
        """Return a method by its tables where its class is not defined here."""
        if not missing_methods(data):
            return from_dict(data)
        return RecordedMethod(data, {key_of(kind): tables[key_of(kind)] for kind in self.layer_types}, encodings)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        data = asdict(self) | {"changed": self.changed}
        data["layer_types"], data["edited"] = list(self.layer_types), list(self.edited)
        if not self.short_tables:
            del data["short_tables"]
        for group in ("tables", "base_tables", "short_tables"):
            for table in data.get(group, {}).values():
                table["inv_freq"] = list(table["inv_freq"])
        return data

    @classmethod
    def from_dict(cls, data: Any) -> PatchRecord:
        """Read a record.

        Raises:
            ValueError: a record of a newer version, of an unknown shape, or whose hash does not fit its table.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"the rope_patch record must be a JSON object, got {type(data).__name__}")
        if isinstance(data.get("schema"), int) and data["schema"] > SCHEMA:
            raise ValueError(
                f"this patch record was written by rope_patch {data.get('package_version')} (schema {data['schema']}), "
                f"newer than this one ({__version__}, schema {SCHEMA}): upgrade with "
                "pip install -U rope_patch"
            )
        data = dict(data)
        changed = data.pop("changed", None)
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"the rope_patch record has unknown keys {sorted(unknown)}")
        _check_layout(data)
        for group in ("tables", "base_tables", "short_tables"):
            data[group] = {key: _read_table(key, table) for key, table in data.get(group, {}).items()}
        record = cls(**data | {"layer_types": tuple(data["layer_types"]), "edited": tuple(data.get("edited", ()))})
        try:
            record.to_method()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the method of the rope_patch record cannot be read: {' '.join(str(error).split())}"
            ) from error
        if changed not in (None, record.changed):
            raise ValueError("the rope_patch record was altered: its tables contradict what it says of `changed`")
        return record


def about_two_tables(record: PatchRecord | None) -> list[str]:
    """Return what to know of a patch of two tables where another program reads the config; nothing of others."""
    method = None if record is None else record.to_method()
    if not isinstance(method, TwoTables):
        return []
    return [
        f"sequences of up to {method.switch_at} tokens are read under a table of their own, {method.short}, by "
        "rope_patch alone: plain transformers and engines use the long table for all lengths, because no format of "
        "theirs has a table that is chosen once for each sequence"
    ]


def same_tables(one: Mapping[str, TableRecord], other: Mapping[str, TableRecord]) -> bool:
    """Tell whether two sets of tables hold the same layer types and the same tables."""
    return set(one) == set(other) and all(one[key].matches(other[key]) for key in one)


def hashes(tables: Mapping[str, TableRecord]) -> str:
    """Name tables in a message."""
    return ", ".join(f"{key} {table.hash}" for key, table in tables.items())


def key_of(layer_type: str | None) -> str:
    """Return the JSON key of a layer type."""
    return layer_type or "all"


# --- what a record must hold -----------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_tables(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(map(_is_table, value.values()))


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("inv_freq"), list | tuple)
        and len(value["inv_freq"]) > 0
        and all(map(_is_number, value["inv_freq"]))
        and _is_number(value.get("attention_scaling"))
        and isinstance(value.get("hash"), str)
    )


def _is_base_config(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("rope_parameters"), Mapping)
        and _is_length(value.get("max_position_embeddings"))
    )


def _is_types(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(item is None or isinstance(item, str) for item in value)


_LAYOUT: Mapping[str, tuple[Callable[[Any], bool], str, bool]] = {
    "method": (lambda value: isinstance(value, Mapping), "an object with the method's name and parameters", True),
    "layer_types": (lambda value: _is_types(value) and len(value) > 0, "a list of layer types", True),
    "tables": (_is_tables, "tables with inv_freq, attention_scaling and hash", True),
    "base_tables": (_is_tables, "tables with inv_freq, attention_scaling and hash", True),
    "base_config": (_is_base_config, "an object with rope_parameters and max_position_embeddings", True),
    "target_length": (lambda value: value is None or _is_length(value), "a number of tokens or null", False),
    "precision": (lambda value: value in ("float32", "float64"), "float32 or float64", False),
    "freeze_at": (lambda value: value is None or _is_length(value), "a number of tokens or null", False),
    "short_tables": (
        lambda value: _is_tables(value) or value == {},
        "tables with inv_freq, attention_scaling and hash",
        False,
    ),
    "edited": (lambda value: _is_types(value) and None not in value, "a list of layer types", False),
    "package_version": (lambda value: isinstance(value, str), "a version", False),
    "schema": (_is_length, "a number", False),
}
"""By key: whether a value is one, what it must be, and whether the record must have it."""


def _check_layout(data: Mapping[str, Any]) -> None:
    for key, (holds, rule, needed) in _LAYOUT.items():
        if key not in data:
            if needed:
                raise ValueError(f"the rope_patch record lacks {key!r}, {rule}")
        elif not holds(data[key]):
            raise _malformed(key, rule, data[key])
    kinds = {key_of(kind) for kind in data["layer_types"]}
    short, two = data.get("short_tables", {}).keys(), data["method"].get("method") == TwoTables.name
    fitting = data["tables"].keys() == data["base_tables"].keys() >= kinds and short == (kinds if two else set())
    if not fitting:
        raise ValueError(
            f"the rope_patch record was altered: its patched layer types {sorted(kinds)}, its tables "
            f"{sorted(data['tables'])} and the tables before the patch {sorted(data['base_tables'])} do not fit"
        )


def _malformed(key: str, rule: str, value: Any) -> ValueError:
    text = json.dumps(value, default=str)
    return ValueError(
        f"the rope_patch record is malformed: {key!r} must be {rule}, got "
        f"{text if len(text) <= 80 else text[:80] + ' …'}. Restore the file from its source"
    )


def _read_table(key: str, data: Mapping[str, Any]) -> TableRecord:
    table = TableRecord(tuple(map(float, data["inv_freq"])), float(data["attention_scaling"]), str(data["hash"]))
    actual = fingerprint(table_of(table.inv_freq), table.attention_scaling)
    if actual != table.hash:
        raise ValueError(
            f"the rope_patch record was altered: its table for {key!r} hashes to {actual}, the record says "
            f"{table.hash}. Restore the file from its source, or patch the base checkpoint again"
        )
    return table
