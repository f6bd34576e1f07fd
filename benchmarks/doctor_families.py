"""Ask ``rope_patch.doctor`` about every causal language model type of transformers, healthy as it is: no false alarm.

    python benchmarks/doctor_families.py                 # all types, in a few minutes of one core
    python benchmarks/doctor_families.py llama qwen3     # some types, to the terminal

Each type is built as a tiny random model (``family_models.py``). Doctor looks at it in memory and at its folder, as it
is and patched with two methods. The full run writes ``benchmarks/results/doctor_families.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tqdm import tqdm
from transformers.utils import logging

import rope_patch
from family_checks import METHODS, describe
from family_models import TYPES, tiny_model
from measuring import command, environment, write

RESULTS = Path(__file__).parent / "results" / "doctor_families.json"
PATCHES = ("yarn", "p_rope")
Report = dict[str, Any]


def diagnose(model: Any) -> str | Report:
    """Return ``"ok"``, or another verdict on a model or folder with what each check says that does not hold."""
    try:
        found = rope_patch.doctor(model)
    except Exception as error:
        return {"verdict": "error", "checks": {"error": describe(error).replace(str(model), "the folder")}}
    if found.ok:
        return "ok"
    checks = [*found.found("differs"), *found.found("unknown")]
    return {"verdict": checks[0].state, "checks": {check.name: check.found for check in checks}}


def examine(model_type: str, folder: Path) -> Report:
    """Return what doctor says of one type, by form.

    Args:
        model_type: the type, as transformers names it.
        folder: an empty folder for what is saved.
    """
    try:
        model = tiny_model(model_type)
    except Exception as error:
        return {"type": model_type, "not_built": describe(error), "forms": {}}
    forms = {"in memory": diagnose(model)}
    try:
        model.save_pretrained(folder / "plain")
        forms["folder"] = diagnose(folder / "plain")
    except Exception as error:
        forms["folder"] = {"verdict": "not saved", "checks": {"save_pretrained": describe(error)}}
    for name in PATCHES:
        try:
            kinds = [table.layer_type for table in rope_patch.inspect(model).tables]
            kind = "full_attention" if "full_attention" in kinds else kinds[0]
            layers = {} if kind is None else {"layer_types": (kind,)}
            patch = rope_patch.apply(model, name, **METHODS[name], **layers)
        except ValueError:
            continue  # docs/families.md says why
        forms[f"{name} in memory"] = diagnose(model)
        rope_patch.save(model, folder / name)
        forms[f"{name} folder"] = diagnose(folder / name)
        patch.restore()
    return {"type": model_type, "forms": forms}


def main() -> None:
    """Examine the types; write the report, or print the results of some types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", choices=[[], *TYPES], metavar="TYPE", help="model types; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    results = []
    for model_type in tqdm(options.types or TYPES, desc="types"):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            results.append(examine(model_type, Path(folder)))
    verdicts = [
        (form, found if isinstance(found, str) else found["verdict"])
        for each in results
        for form, found in each["forms"].items()
    ]
    report = {
        "benchmark": "doctor_families",
        "command": command(),
        "what": "what rope_patch.doctor says of every causal language model type, each a healthy tiny random model",
        "counts": {form: dict(Counter(v for f, v in verdicts if f == form)) for form in dict.fromkeys(dict(verdicts))},
        "environment": environment(),
        "results": results,
    }
    write(report, None if options.types else RESULTS)
    tqdm.write(str(report["counts"]), file=sys.stderr)


if __name__ == "__main__":
    main()
