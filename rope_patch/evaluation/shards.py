"""Comparisons measured in shards, anywhere and at any time, and joined from what each has left in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.errors import read_json
from rope_patch.evaluation.compare import Comparison, compare, environment, under
from rope_patch.evaluation.key_tokens import as_trained
from rope_patch.evaluation.result_cache import ResultCache
from rope_patch.evaluation.sharing import Incomplete, Shard, only
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.files import write_atomically
from rope_patch.methods import Method
from rope_patch.modeling.scoring import fingerprint, name_of
from rope_patch.patching.locate import find_rotary
from rope_patch.processes import processes

SHARD_FILE = "shard.json"
SCHEMA = 1
SAME = (
    "schema",
    "count",
    "methods",
    "patch",
    "spec",
    "text",
    "haystack",
    "evaluator",
    "model",
    "outlines",
    "fingerprints",
)
"""What the shards of one comparison have in common."""


def parse_shard(text: str) -> Shard:
    """Return a shard from its number and how many there are.

    Raises:
        ValueError: another text, or a number out of range.

    Example:
        >>> parse_shard("3/16").number
        3
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise ValueError(f"a shard is written NUMBER/COUNT, such as 3/16, got {text!r}")
    if int(count) < 1:
        raise ValueError(f"the number of shards must be >= 1, got {count}")
    if not 1 <= int(number) <= int(count):
        raise ValueError(f"the number of a shard must be in [1, {count}], got {number}")
    return Shard(int(number), int(count))


def identities(model: nn.Module, methods: Sequence[Method], patch: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprint of a model under each method, and without any.

    Args:
        model: a loaded one, or one without weights, whose fingerprints are of its config alone.
        methods: with their factors.
        patch: ``layer_types`` and ``freeze_at`` of :func:`~rope_patch.evaluation.compare.compare`.
    """
    again, digests = find_rotary(model).record is not None, {}
    for method in methods:
        with under(model, method, again, dict(patch)):
            digests[str(method)] = fingerprint(model)
    with as_trained(model, **patch):  # which chooses the key tokens of LongPPL
        return digests | {"": fingerprint(model)}


def describe(
    model: nn.Module, outline: nn.Module | None, methods: Sequence[Method], suite: EvalSuite, patch: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what all shards of a comparison have in common, as JSON values.

    Args:
        model: that is measured.
        outline: the same without weights; None where it has none, as with an adapter.
        methods: with their factors.
        suite: what is measured; its key tokens are chosen already where another model does that.
        patch: ``layer_types`` and ``freeze_at``.
    """
    return {
        "schema": SCHEMA,
        "methods": [str(method) for method in methods],
        "patch": {name: list(value) if isinstance(value, tuple) else value for name, value in patch.items()},
        "spec": suite.spec.to_dict(),
        "text": suite.text_sha256,
        "haystack": suite.prompts.haystack.sha256,
        "evaluator": None if suite.key_tokens is None else suite.key_tokens.evaluator,
        "model": f"{type(model).__name__} {name_of(model)}".strip(),
        "outlines": None if outline is None else identities(outline, methods, patch),
        "fingerprints": identities(model, methods, patch),
    }


def measure_shard(
    model: nn.Module,
    suite: EvalSuite,
    methods: Sequence[Method],
    shard: Shard,
    folder: Path,
    cache: Path,
    *,
    about: Mapping[str, Any],
    notes: Mapping[str, str],
    on_progress: Callable[[str, int], None] = lambda method, tokens: None,
) -> None:
    """Measure a shard of a comparison, into a result cache in a folder; ``shard.json`` beside it says what it is.

    Args:
        model: a causal language model.
        suite: what is measured in all shards together.
        methods: with their factors.
        shard: which of them.
        folder: of this shard alone.
        cache: file of the results.
        about: of :func:`describe`.
        notes: for the environment of the comparison, such as the adapter.
        on_progress: called with the method and the number of tokens it has just read.

    Raises:
        ValueError: the folder holds another shard.
    """
    path, first = folder / SHARD_FILE, processes()[0] == 0
    record = {**about, "number": shard.number, "count": shard.count}
    record |= {"environment": {**environment(model), **notes}, "finished": False}
    if first and path.is_file():
        before = _read(folder)
        if any(before.get(name) != record[name] for name in ("number", *SAME)):
            raise ValueError(f"{folder} holds another shard: give each an --output folder of its own")
    if first:
        write_atomically(path, json.dumps(record, indent=1))
    with only(shard):
        compare(model, suite.tokenizer, methods, suite, resume=cache, on_progress=on_progress, **about["patch"])
    if first:
        write_atomically(path, json.dumps({**record, "finished": True}, indent=1))


def read_shards(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what the folders of shards say of themselves.

    Raises:
        FileNotFoundError: a folder without a shard.
        ValueError: shards that do not belong together, are not finished, or not all there are.
    """
    records = [_read(folder) for folder in folders]
    for folder, record in zip(folders, records, strict=True):
        for name in SAME:
            if record.get(name) != records[0].get(name):
                raise ValueError(
                    f"{folders[0]} and {folder} do not belong together: they differ in "
                    f"{_difference(name, records[0].get(name), record.get(name))}"
                )
        if not record["finished"]:
            raise ValueError(
                f"shard {record['number']}/{record['count']} in {folder} is not finished: run it again, with the same "
                "options, and it goes on where it was"
            )
    missing = sorted({*range(1, records[0]["count"] + 1)} - {record["number"] for record in records})
    if missing:
        which = ", ".join(f"{number}/{records[0]['count']}" for number in missing)
        raise ValueError(f"shards are missing: {which}. Measure each with --shard, and give all folders to --merge")
    return records


def check_asked(records: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> None:
    """Raise unless shards measured what is asked for.

    Args:
        records: of :func:`read_shards`.
        asked: values by name, as :func:`describe` gives them.

    Raises:
        ValueError: what differs.
    """
    for name, value in asked.items():
        value = json.loads(json.dumps(value))
        if value != records[0][name]:
            raise ValueError(
                f"the shards differ from this command in {_difference(name, records[0][name], value)}: give the "
                "options that they were measured with"
            )


def join(folders: Sequence[Path], cache: Path) -> None:
    """Write what the result caches of shards hold into one.

    Args:
        folders: of the shards.
        cache: file to write; its name is that of the files that are read.
    """
    joined = ResultCache(cache)
    for folder in folders:
        for name, value in ResultCache(folder / cache.name).items():
            if name not in joined:
                joined[name] = value


def compare_joined(
    model: nn.Module, suite: EvalSuite, methods: Sequence[Method], records: Sequence[Mapping[str, Any]], cache: Path
) -> Comparison:
    """Return the comparison whose results are all in a result cache.

    Args:
        model: the one that was measured, or the same without weights.
        suite: what was measured.
        methods: with their factors.
        records: of :func:`read_shards`.
        cache: of :func:`join`.

    Raises:
        ValueError: results are missing, or the model is another one.
    """
    first = records[0]
    own = identities(model, methods, first["patch"])
    outlined = any(parameter.is_meta for parameter in model.parameters())
    if own != first["outlines" if outlined else "fingerprints"]:
        raise ValueError(f"the shards measured another model, {first['model']}: give that one as MODEL")
    nothing = Shard(0, first["count"])
    model.rope_patch_fingerprints = {digest: first["fingerprints"][name] for name, digest in own.items()}  # type: ignore[assignment]
    try:
        with only(nothing):
            comparison = compare(model, suite.tokenizer, methods, suite, resume=cache, **first["patch"])
    except Incomplete:
        raise ValueError("the key tokens of LongPPL are missing: run one of the shards again") from None
    finally:
        del model.rope_patch_fingerprints
    if nothing.missing:
        which = ", ".join(f"{count} of shard {number}" for number, count in sorted(nothing.missing.items()))
        raise ValueError(f"results are missing, {which}: run these shards again")
    names = dict.fromkeys(name for record in records for name in record["environment"])
    values_of = {name: dict.fromkeys(record["environment"].get(name, "") for record in records) for name in names}
    return replace(
        comparison,
        model=first["model"],
        environment={
            **{name: value for name, value in comparison.environment.items() if name == "patch before"},
            **{name: ", ".join(value for value in values if value) for name, values in values_of.items()},
        },
    )


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / SHARD_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {SHARD_FILE}: measure a shard with --shard and this --output first")
    record: dict[str, Any] = read_json(folder / SHARD_FILE)
    return record


def _difference(name: str, one: Any, other: Any) -> str:
    """Return the name of what differs and both values; of two dictionaries, of the first entry that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            if one.get(key) != other.get(key):
                return _difference(f"{name}: {key}", one.get(key), other.get(key))
    return f"{name}, {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:200]} …"
