"""What programs were seen to do with the configs of many families, which ships as ``assets/engines.json``.

``tests/engines/test_engine_rows.py`` asks each program. With ``--write`` it writes the file; ``make test-engines``
compares some families with it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import Any

from rope_patch.engines.forms import Form
from rope_patch.engines.verdicts import DEFAULT_BASE, OTHER, PLAIN, SAME
from rope_patch.runtime.packaged import data_path


@functools.cache
def known_answers() -> dict[str, Any]:
    """Return what programs were seen to do, by their names: their version, the date, and findings by form."""
    return dict(json.loads((data_path("assets") / "engines.json").read_text(encoding="utf-8")))


def seen(program: str, family: str, form: Form, unscaled: Collection[str]) -> dict[str, str]:
    """Return what a program was seen to do with the configs of a family in a form, by layer type.

    Which table it builds, and which layers it gives it to, were seen of different configs.

    Args:
        program: the name of the program.
        family: the model type.
        form: the form of the config.
        unscaled: the layer types whose tables have no scaling.

    Returns:
        As of :func:`~rope_patch.engines.verdicts.verdict_of`; empty if it was not asked about such a config.
    """
    tables = _row(program, "tables", form.tables, family)
    if not tables:
        found = [_row(program, "tables", general, family) for general in form.more_general]
        tables = next(filter(None, found), {})
        # A wrong base may be the right one by chance, where that is the family's usual one.
        if OTHER in tables.values() or any(tables.get(kind) == DEFAULT_BASE for kind in unscaled):
            return {}
        tables = {kind: PLAIN if text == DEFAULT_BASE else text for kind, text in tables.items()}
    if not form.layers:
        return tables
    layers = _row(program, "layers", form.layers, family)
    both = tables.keys() & layers.keys()
    return {kind: tables[kind] if layers[kind] == SAME else layers[kind] for kind in both}


def _row(program: str, part: str, form: str, family: str) -> dict[str, str]:
    for families, found in known_answers()[program][part].get(form, ()):
        if family in families.split():
            return dict(found)
    return {}
