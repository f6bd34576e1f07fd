"""Ask engines about configs of many families, and put what they do into rows, as ``assets/engines.json`` holds them."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.engines.asking import EngineAnswer, ask, ask_files
from rope_patch.engines.forms import Form, form_of
from rope_patch.engines.programs import PROGRAMS
from rope_patch.engines.stated_config import StatedConfig
from rope_patch.engines.verdicts import OTHER_TABLES, verdict_of
from support import sglang_reader
from support.engine_forms import configs_of, plain, stated_of
from support.engines import SUPPORT, python_of

FILE = rope_patch.data_path("assets") / "engines.json"
TOGETHER = 200
"""The number of configs that one process of an engine is asked about."""


LONGEST = 120
"""The length at which errors are cut [characters]."""
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of the models that llama.cpp's converter reads, which needs weights."""


class Forms:
    """Configs of families, one for each form.

    Attributes:
        configs: the configs by family and form.
        stated: the same, as programs find them.
    """

    def __init__(self, families: Iterable[str], **sizes: Any) -> None:
        self.configs: dict[tuple[str, Form], dict[str, Any]] = {}
        self.stated: dict[tuple[str, Form], StatedConfig] = {}
        for family in families:
            for _, config in configs_of(family, **sizes):
                try:
                    stated = stated_of(config)
                except ValueError:  # transformers itself cannot read it
                    continue
                key = (family, form_of(stated))
                self.configs.setdefault(key, config)
                self.stated.setdefault(key, stated)


def answers_of(program: str, forms: Forms) -> dict[tuple[str, Form], EngineAnswer]:
    """Return the answers of a program about configs, by family and form."""
    keys = [*forms.configs]
    if program == "sglang":
        return {key: sglang_reader.answer_of(forms.stated[key]) for key in keys if key[0] in sglang_reader.FAMILIES}
    answers: dict[tuple[str, Form], EngineAnswer] = {}
    for start in range(0, len(keys), TOGETHER):
        some = keys[start : start + TOGETHER]
        said = ask(program, [forms.configs[key] for key in some], python_of(program))
        answers |= dict(zip(some, said, strict=True))
    return answers


def rows_of(
    forms: Forms,
    answers: Mapping[tuple[str, Form], EngineAnswer],
    own: Mapping[tuple[str, Form], EngineAnswer],
) -> dict[str, Any]:
    """Return what a program does, by form; families of which it does the same share a row."""
    # Where every config of a family fails, keys may be missing that published ones have, or be written otherwise there:
    # nothing is known, unless the program says that it does not know the family.
    known = {key[0] for key, answer in answers.items() if answer.layers or _is_unsupported(answer)}
    parts: dict[str, dict[str, dict[str, list[str]]]] = {"tables": {}, "layers": {}}
    for key, answer in answers.items():
        family, form = key
        seen = verdict_of(answer, own[key], forms.stated[key].tables)
        if form.layers and (_lacks(answer) or set(seen.values()) & set(OTHER_TABLES)):
            continue  # which layers the program takes is not seen where it builds another table
        if seen and family in known:
            shortened = json.dumps({kind: text[:LONGEST] for kind, text in seen.items()})
            part, name = ("layers", form.layers) if form.layers else ("tables", form.tables)
            families = parts[part].setdefault(name, {}).setdefault(shortened, [])
            if family not in families:
                families.append(family)
    versions = {answer.version for answer in answers.values() if answer.version}
    rows: dict[str, Any] = {"version": ", ".join(sorted(versions)), "asked": datetime.date.today().isoformat()}
    for part, by_form in parts.items():
        rows[part] = {
            form: [[" ".join(sorted(families)), json.loads(seen)] for seen, families in each.items()]
            for form, each in sorted(by_form.items())
        }
    return rows


def _lacks(answer: EngineAnswer) -> bool:
    """Tell whether a program misses keys in a config, which published checkpoints may have."""
    return "missing" in answer.error and "required" in answer.error


def _is_unsupported(answer: EngineAnswer) -> bool:
    """Tell whether a program says that it does not know the family of a config."""
    return "not supported" in answer.error or "does not recognize" in answer.error


def write(program: str, rows: Mapping[str, Any]) -> None:
    """Put the rows of a program into the file, in the place of older ones; a line for each form."""
    written = json.loads(FILE.read_text()) if FILE.exists() else {}
    written[PROGRAMS[program].name] = rows
    text = json.dumps(dict(sorted(written.items())), indent=1, ensure_ascii=False)
    FILE.write_text(re.sub(r"\n {4,}\s*|(?<=\])\n {3}(?=\])", " ", text) + "\n")


def by_config(rows: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return what a program does by family, part and form."""
    return {
        (family, part, form): seen
        for part in ("tables", "layers")
        for form, each in rows[part].items()
        for families, seen in each
        for family in families.split()
    }


def converted_answers(forms: Forms, root: Path) -> dict[tuple[str, Form], EngineAnswer]:
    """Return the answers of llama.cpp about configs of small models, of which its own converter makes files.

    Families whose models transformers cannot build so small, or of which no file is made that llama.cpp loads, have no
    answers.

    Args:
        forms: the configs.
        root: an empty folder.
    """
    answers: dict[tuple[str, Form], EngineAnswer] = {}
    for family in dict.fromkeys(key[0] for key in forms.configs):
        weights = root / family
        with contextlib.suppress(Exception):  # a config class may refuse such sizes by an error of its own
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain(family, **SMALL))).save_pretrained(weights)
        if not weights.exists():
            continue
        # The converter of Gemma looks for one, and its words are not read.
        shutil.copy(rope_patch.data_path("assets") / "gemma3" / "tokenizer.json", weights)
        configs = {key: config for key, config in forms.configs.items() if key[0] == family}
        first = dict([next(iter(configs.items()))])
        if all(answer.layers for answer in _of_converted(first, weights).values()):
            answers |= _of_converted(configs, weights)
    return answers


def _of_converted(configs: Mapping[tuple[str, Form], Any], weights: Path) -> dict[tuple[str, Form], EngineAnswer]:
    """Return the answers of llama.cpp about configs of one family, with the weights of a folder."""
    folders = {key: weights.parent / f"{weights.name}-{number}" for number, key in enumerate(configs)}
    for key, folder in folders.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(weights, folder, copy_function=lambda source, target: Path(target).hardlink_to(source))
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(configs[key]))
    python = python_of("llama.cpp")
    command = [python, "-W", "ignore", SUPPORT / "convert_folders.py", *folders.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    answers = {key: EngineAnswer("", error=errors[str(folder)]) for key, folder in folders.items()}
    files = {key: str(folder / "converted.gguf") for key, folder in folders.items() if not errors[str(folder)]}
    return answers | dict(zip(files, ask_files("llama.cpp", [*files.values()], python), strict=True))
