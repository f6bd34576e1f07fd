"""The model card of an extended checkpoint: what was done, its scores before and after, and how it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from rope_patch.checkpoints.folder_patch import BASE_CARD
from rope_patch.checkpoints.source_files import loader_name
from rope_patch.engines.programs import PROGRAMS
from rope_patch.evaluation.compare import UNPATCHED, row_name
from rope_patch.evaluation.intervals import POPULATION
from rope_patch.extending.choose_method import NEEDLES, RANKING
from rope_patch.extending.result import Extended
from rope_patch.patching.verify import shortened
from rope_patch.reports.comparison import before_after
from rope_patch.runtime.captions import names_text, windows_text
from rope_patch.runtime.page import markdown_table
from rope_patch.version import __version__

CARD_TEMPLATE = """---
{head}---
# {base}, {outcome.options.length} tokens

**The price**: {outcome.choice.cost}.{unconfirmed}

`{base}`, trained at {outcome.trained_length} tokens, with the rotary table of `{method}` for {outcome.options.length}.
{training}
```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained("THIS FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")
```

Plain transformers loads it: in a process without rope_patch its logits for a probe text were equal, bit for bit, to
those of the patched model in memory. {programs}

## Why this method

{outcome.choice.reason}. {basis}.

Measured and not chosen: {others}.

## Scores

{scores}

Text: {text}. {needles}. A prompt counts as answered if greedy decoding
gives the right answer (exact match).
Changes are against the model before, on the same windows and prompts, with 95 % intervals. {population}

{warnings}
## How it was made

```bash
rope-patch extend --recipe extend.yaml -o AGAIN
```

`extend.yaml` holds the options, with paths as they were given; `rope_patch_extend.json` holds the choices and their
evidence. rope_patch {version}.
{base_card}"""
BASE_SENTENCE = f"""
[{BASE_CARD}]({BASE_CARD}) is the card of the base model, before its rotary table was changed: its scores are not of
this model.
"""


def checkpoint_card(outcome: Extended, source: Path) -> str:
    """Return the model card of an extended checkpoint, in Markdown.

    Args:
        outcome: the outcome of the run, with a chosen method.
        source: the folder with the card of the checkpoint that was extended, if it has one.
    """
    options = outcome.options
    choice = outcome.choice
    comparison = outcome.comparison
    theirs = _front_matter(source)
    theirs.pop("model-index", None)  # the scores of the base
    tags = theirs.get("tags") or []
    if not isinstance(tags, list):
        tags = [tags]
    head = {"library_name": "transformers", **theirs}
    head["tags"] = list(dict.fromkeys([*tags, "rope_patch", "long-context"]))
    base = options.model
    if Path(base).exists():
        base = Path(base).name
    elif base.count("/") == 1:  # a repository of the hub, which shows it as the base of this model
        head["base_model"] = base
    assert choice.chosen is not None  # a refusal has no card
    chosen = choice.chosen
    weights = comparison.environment.get("weights")
    done = ""
    if weights:
        done = f"Its weights come from a GGUF file: {weights}.\n"
    if chosen.trained:
        done += f"Its weights were trained with LoRA on {outcome.training}, and the adapter merged.\n"
    measured = {row.label: row for one in outcome.comparisons for row in one.rows}
    others = [
        f"`{row_name(shortened(row.method), row.trained)}`"
        for label, row in measured.items()
        if label not in (UNPATCHED, chosen.label)
    ]
    unconfirmed = ""
    if choice.unconfirmed:
        unconfirmed = f"\n\n**Unconfirmed**: {choice.unconfirmed}."
    return CARD_TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        loader=loader_name(options.model),
        base=base,
        outcome=outcome,
        method=shortened(chosen.method),
        training=done,
        programs=programs_of(outcome),
        basis=RANKING,
        unconfirmed=unconfirmed,
        others=", ".join(others) or "nothing else",
        scores=markdown_table(before_after(comparison, chosen.label)),
        text=f"{comparison.text_name}, {windows_text(comparison.spec.windows or 0, comparison.spec.longest)}",
        needles=NEEDLES,
        population=POPULATION,
        warnings="".join(f"\n**Note**: {sentence}.\n" for sentence in comparison.warnings),
        version=__version__,
        base_card="" if base_card(source) is None else BASE_SENTENCE,
    )


def programs_of(outcome: Extended) -> str:
    """Return what other programs compute from the folder."""
    if not outcome.programs:
        names = names_text([program.name for program in PROGRAMS.values()])
        return f"{names} compute the same table from its config."
    sentences = "".join(f"\n- {sentence.replace(str(outcome.output), 'THIS FOLDER')}" for sentence in outcome.programs)
    return f"Other programs (`rope-patch doctor` shows all):\n{sentences}"


def base_card(source: Path) -> Path | None:
    """Return the path of the card of a folder, of an extended one that of its own base; None if there is none."""
    cards = [source / BASE_CARD, source / "README.md"]
    return next(filter(Path.is_file, cards), None)


def _front_matter(source: Path) -> dict[str, Any]:
    """Return what the card of a folder says of its licence, languages and the like, where it can be read."""
    try:
        return metadata_load(source / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
