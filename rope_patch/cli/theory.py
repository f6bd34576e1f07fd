"""``rope-patch theory``: parsing and printing only; modules that are slow to import are imported inside functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_patch import __version__
from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import new_table, print_json, show
from rope_patch.options.theory import TheoryOptions

SCHEMA = 3


def theory(words: Sequence[str]) -> None:
    """Run ``rope-patch theory`` with the words that follow it."""
    options = parse(TheoryOptions, words)
    table = _plain(options.head_dim or 128, options.rope_theta or 1e4)
    if options.model is not None:
        table = _table_of(options.model)
    if options.trained_length is not None:  # the factors and ramps of methods follow from it
        table = replace(table, max_position_embeddings=options.trained_length, original_max_position_embeddings=None)
    length = 4 * table.context if options.length is None else options.length
    result = _study(table, options.model, options.method, length)
    if options.as_json:
        print_json({"schema": SCHEMA, "rope_patch": __version__} | result.to_dict())
    else:
        _print(result)


def _plain(head_dim: int, rope_theta: float) -> Any:
    """Return a table of plain RoPE, trained at 4096 tokens."""
    from rope_patch.frequencies import geometric
    from rope_patch.tables import RotaryTable

    return RotaryTable(geometric(rope_theta, head_dim), 1.0, rope_theta, "default", 4096)


def _table_of(model: str) -> Any:
    """Return the table of a checkpoint, read from its config; of several, the one that methods patch by default."""
    from rope_patch.checkpoints.model_without_weights import model_without_weights
    from rope_patch.patching.locate import locate
    from rope_patch.tables import choose_layer_types

    tables = locate(model_without_weights(model)).static_tables(None)
    return tables[choose_layer_types(tables, None)[0]]


def _study(table: Any, model: str | None, method: str, length: int) -> Any:
    """Return a study that compares a table before and after a method."""
    from rope_patch.methods import as_method
    from rope_patch.table_facts import TableFacts

    name = "plain RoPE" if model is None else f"the table of {Path(model).name}"
    asked = as_method(method)
    patch = asked.for_target(table, max(length, table.context) if asked.needs_target else None)
    after = patch(table)
    tables = table.inv_freq, after.inv_freq
    return TableFacts(str(patch), name, table.rope_theta, *tables, after.attention_scaling, table.context, length)


def _print(result: Any) -> None:
    """Print the facts about both tables side by side."""
    from rich.markup import escape

    from rope_patch.evaluation.number_format import four_digits

    shape = f"head_dim {2 * len(result.before)}, rope_theta {result.rope_theta:g}"
    title = f"{result.method}: {shape}, {result.trained_length} → {result.length} tokens"
    values = [result.base, *([result.method] if result.changed else [])]
    table = new_table("quantity", *values, "note", title=title, right=values)
    for fact in result.facts():
        numbers = [four_digits(fact.before), four_digits(fact.after)][: len(values)]
        table.add_row(escape(fact.label), *numbers, escape(fact.note))
    show(table, 160)
