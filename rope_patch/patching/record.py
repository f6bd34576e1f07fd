"""The record of a patch, in ``config.rope_patch`` and beside an adapter."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import logging as hf_logging

from rope_patch.frequencies import fingerprint, table_of
from rope_patch.methods import METHODS, Method, as_method, from_dict
from rope_patch.methods.table import Table
from rope_patch.patching.config_settings import CONFIG_KEYS
from rope_patch.runtime.errors import in_one_line
from rope_patch.tables import RotaryTable, Tables
from rope_patch.version import __version__

logger = hf_logging.get_logger("rope_patch")
SCHEMA = 1


@dataclass(frozen=True)
class TableRecord:
    """One table as it is recorded.

    Attributes:
        inv_freq: (pairs,) frequencies of the table [rad/token].
        attention_scaling: the factor on cos and sin.
        hash: the fingerprint of both, which shows whether a record was altered.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float
    hash: str

    @classmethod
    def of(cls, table: RotaryTable) -> TableRecord:
        """Record a table."""
        return cls(tuple(table.inv_freq.tolist()), float(table.attention_scaling), table.fingerprint)

    def matches(self, other: TableRecord, rtol: float = 1e-6) -> bool:
        """Tell whether two tables are equal, up to the difference between float32 power functions of two machines."""
        if self.hash == other.hash:
            return True
        ours = table_of(self.inv_freq)
        theirs = table_of(other.inv_freq)
        return (
            ours.shape == theirs.shape
            and torch.allclose(ours, theirs, rtol=rtol, atol=0.0)
            and abs(self.attention_scaling - other.attention_scaling) < 1e-6
        )


@dataclass(frozen=True)
class PatchRecord:
    """The record of a patch: the method, and a model's rotary tables after and before it.

    Attributes:
        method: the method, as :meth:`~rope_patch.Method.to_dict` returns it.
        layer_types: the patched layer types; ``[None]`` on a model with one table for all layers.
        tables: every table in use after the patch, by layer type (``"all"`` on a model with one table).
        base_tables: every table before the patch, by layer type.
        base_config: the rotary settings of the config before the patch (``rope_parameters``,
            ``max_position_embeddings``).
        target_length: the context that the patch was asked to state [tokens]; None if it was not asked.
        freeze_at: the length at which a dynamic base table was frozen [tokens].
        edited: layer types whose base tables were not those that the config described, so that only their numbers
            tell them.
        package_version: the version of rope_patch that wrote the record.
        schema: the version of this layout.
    """

    method: Mapping[str, Any]
    layer_types: tuple[str | None, ...]
    tables: Mapping[str, TableRecord]
    base_tables: Mapping[str, TableRecord]
    base_config: Mapping[str, Any]
    target_length: int | None = None
    freeze_at: int | None = None
    edited: tuple[str, ...] = ()
    package_version: str = __version__
    schema: int = SCHEMA

    @property
    def stated_length(self) -> int:
        """The context that the config states after the patch [tokens]."""
        return self.target_length or int(self.base_config["max_position_embeddings"])

    @property
    def changed(self) -> bool:
        """Whether any table differs from the one before the patch."""
        return any(table.hash != self.base_tables[key].hash for key, table in self.tables.items())

    def to_method(self) -> Method:
        """Return the method object."""
        return from_dict(self.method)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        # Through JSON, so that it equals the dict that is read from a file: tuples become lists.
        data: dict[str, Any] = json.loads(json.dumps(asdict(self) | {"changed": self.changed}))
        return data

    @classmethod
    def from_dict(cls, data: Any) -> PatchRecord:
        """Read a record, and check it.

        Args:
            data: a record as :meth:`to_dict` returns it, or whatever stands in its place in a file.

        Raises:
            ValueError: the record is of a newer version or of an unknown shape, or a hash does not fit its table.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"the rope_patch record must be a JSON object, got {type(data).__name__}")
        if (schema := data.get("schema", SCHEMA)) != SCHEMA:
            raise ValueError(
                f"this patch record was written by rope_patch {data.get('package_version')!r} (schema {schema!r}), and "
                f"{__version__} reads schema {SCHEMA}: upgrade with pip install -U rope_patch"
            )
        data = dict(data)
        data.pop("changed", None)  # which follows from the tables
        data.pop("short_tables", None)  # of a method of versions up to 0.2.0, whose tables are those of the config
        unregistered = _unregistered_method(data.get("method"))
        if unregistered:
            data["method"] = {"method": Table.name}
        if data.pop("precision", "float32") != "float32":  # older versions could compute angles in float64
            raise ValueError("the rope_patch record asks for another precision of angles than float32")
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"the rope_patch record has unknown keys {sorted(unknown)}")
        if lacking := {"method", "layer_types", "tables", "base_tables", "base_config"} - data.keys():
            raise ValueError(f"the rope_patch record lacks {min(lacking)!r}: restore the file from its source")
        record = cls(**{key: _read(key, value) for key, value in data.items()})
        keys = set(record.tables)
        kinds = {key_of(kind) for kind in record.layer_types}
        fitting = keys == set(record.base_tables) and keys >= kinds | set(record.edited)
        if not kinds or not fitting:
            raise ValueError(
                "the rope_patch record was altered: its layer_types, tables, base_tables and edited do not fit"
            )
        if unregistered:
            logger.warning_once(
                f"the patch record names {unregistered!r}: its recorded tables are used. A method of your own is known "
                "with --import MODULE."
            )
            recorded = [(kind, record.tables[key_of(kind)]) for kind in record.layer_types]
            steps = [Table(table.inv_freq, table.attention_scaling, kind) for kind, table in recorded]
            return replace(record, method=as_method(steps).to_dict())
        return record


def _unregistered_method(method: Any) -> str:
    """Return the name of a method in a record, or of a step of its chain, that is not known here; or ""."""
    if not isinstance(method, Mapping):
        return ""
    steps: Any = [method]
    if method.get("method") == "chain":
        steps = method.get("steps") or ()
    for step in steps:
        name = step.get("method") if isinstance(step, Mapping) else None
        # With replace_scaling, methods of versions up to 0.3.0 began with the plain table.
        if isinstance(name, str) and (name not in METHODS or step.get("replace_scaling")):
            return name
    return ""


def records_of(tables: Tables) -> dict[str, TableRecord]:
    """Return the records of tables, by their keys in JSON."""
    return {key_of(kind): TableRecord.of(table) for kind, table in tables.items()}


def same_tables(one: Mapping[str, TableRecord], other: Mapping[str, TableRecord]) -> bool:
    """Tell whether two sets of tables hold the same layer types and the same tables."""
    return not differences(one, other, "table")


def differences(recorded: Mapping[str, TableRecord], tables: Mapping[str, TableRecord], what: str) -> list[str]:
    """Return the differences of tables from those of a record, a sentence each; ``what`` says what the tables are."""
    if set(recorded) != set(tables):
        return [f"{what}: layer types are {sorted(tables)}, the record has {sorted(recorded)}"]
    return [
        f"{what} [{key}]: table {tables[key].hash}, the record says {recorded[key].hash}"
        for key in recorded
        if not recorded[key].matches(tables[key])
    ]


def hashes(tables: Mapping[str, TableRecord]) -> str:
    """Return the keys and hashes of tables, for a message."""
    return ", ".join(f"{key} {table.hash}" for key, table in tables.items())


def key_of(layer_type: str | None) -> str:
    """Return the JSON key of a layer type."""
    # A JSON object cannot have null as a key.
    return layer_type or "all"


def _read(key: str, value: Any) -> Any:
    """Return the value of a key of a record, checked, since somebody may have edited it.

    Raises:
        ValueError: the value is of another kind, the method is not known here, or a hash does not fit its table.
    """
    # Any exception means a value of the wrong shape: it is reported with the key, not as a TypeError from within.
    try:
        match key:
            case "method":
                from_dict(value)
            case "layer_types" | "edited":
                return tuple(dict.fromkeys(value))  # an error if one of them is a list
            case "tables" | "base_tables":
                return {kind: _read_table(kind, table) for kind, table in value.items()}
            case "base_config":
                dict(value["rope_parameters"])
                _check_length(value["max_position_embeddings"])
                _check_settings(value, CONFIG_KEYS)
            case "target_length" | "freeze_at" if value is not None:
                _check_length(value)
        return value
    except Exception as error:
        raise ValueError(
            f"the rope_patch record cannot be read, its {key!r} is wrong ({in_one_line(error)}): restore the file from "
            "its source"
        ) from error


def _check_length(value: Any) -> None:
    if type(value) is not int or not 1 <= value < 2**63:
        raise ValueError(f"{value!r} is no number of tokens")


def _check_settings(settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError unless every key is known, and its value can be that of a rotary setting.

    A restore writes the settings into a config, where other keys would change another part of the model, or name code
    (``auto_map``) that a loader runs. In ``rope_parameters`` families have keys of their own, so any is known there.
    """
    for key, value in settings.items():
        # A head_dim is recorded only if the config leaves it open.
        right = key in known or (key, value) == ("head_dim", None)
        right = right and isinstance(value, str) == key.endswith("type")
        # No comparison holds for nan, and tensors of torch hold nothing from 2**63 on.
        if isinstance(value, int | float):
            right = right and 0 <= value < 2**63
        if isinstance(value, list | Mapping):  # keys that transformers does not know may hold either
            right = right and "list" in str(RopeParameters.__annotations__.get(key, list))
        if not right:
            raise ValueError(f"{key} = {value!r} is no rotary setting, and nothing else is restored")
        if isinstance(value, Mapping):
            _check_settings(value, value)


def _read_table(kind: str, data: Mapping[str, Any]) -> TableRecord:
    table = TableRecord(tuple(map(float, data["inv_freq"])), float(data["attention_scaling"]), data["hash"])
    actual = fingerprint(table_of(table.inv_freq), table.attention_scaling)
    if actual != table.hash:
        raise ValueError(f"it was altered: the table for {kind!r} hashes to {actual}, and {table.hash!r} is stated")
    return table
