"""The model card of an extended checkpoint: what was done, its scores before and after, and how it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index

from rope_patch.checkpoints.folder_patch import BASE_CARD
from rope_patch.checkpoints.source_files import loader_name
from rope_patch.evaluation.compare import UNPATCHED, Comparison
from rope_patch.evaluation.intervals import POPULATION
from rope_patch.extending.explain import RULES
from rope_patch.extending.result import Extended
from rope_patch.reports.comparison import before_after
from rope_patch.runtime.captions import windows_text
from rope_patch.runtime.page import markdown_table
from rope_patch.version import __version__

CARD_TEMPLATE = """---
{head}---
# {base}, {outcome.options.length} tokens

{verdict}

`{base}`, trained at {outcome.trained_length} tokens, with the rotary table of `{method}` for {outcome.options.length}.
{training}
```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained("THIS FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")
```

Plain transformers loads it: in a process without rope_patch its logits for a probe text were equal, bit for bit, to
those of the patched model in memory.

## Scores

{scores}

Text: {text}. A needle lies in each window within the trained context, and is asked for at every length; a prompt counts
as answered if greedy decoding gives the right answer (exact match). Changes are against the model before, on the same
windows and prompts, with 95 % intervals. {population}

Measured and not chosen: {others}. {rules}.

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
    comparison = outcome.comparison
    choice = outcome.choice
    assert choice is not None and choice.chosen is not None  # a refusal has no card
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
    head["model-index"] = _model_index(comparison, str(choice.label), f"{Path(base).name}-{outcome.options.length}")
    done = ""
    weights = comparison.environment.get("weights")
    if weights:
        done = f"Its weights come from a GGUF file: {weights}.\n"
    if choice.chosen.trained:
        done += f"Its weights were trained with LoRA on {outcome.training}, and the adapter merged.\n"
    labels = dict.fromkeys(row.label for one in outcome.comparisons for row in one.rows)
    others = [f"`{label}`" for label in labels if label not in (UNPATCHED, choice.label)]
    base_sentence = ""
    if base_card(source) is not None:
        base_sentence = BASE_SENTENCE
    return CARD_TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        loader=loader_name(options.model),
        base=base,
        outcome=outcome,
        verdict="\n\n".join(outcome.verdict).replace(str(outcome.output), '"THIS FOLDER"'),
        method=choice.chosen.name,
        training=done,
        rules=RULES,
        others=", ".join(others) or "nothing else",
        scores=markdown_table(before_after(comparison, str(choice.label))),
        text=f"{comparison.text_name}, {windows_text(comparison.spec.windows or 0, comparison.spec.longest)}",
        population=POPULATION,
        warnings="".join(f"\n**Note**: {sentence}.\n" for sentence in comparison.warnings),
        version=__version__,
        base_card=base_sentence,
    )


def base_card(source: Path) -> Path | None:
    """Return the path of the card of a folder, of an extended one that of its own base; None if there is none."""
    cards = [source / BASE_CARD, source / "README.md"]
    return next(filter(Path.is_file, cards), None)


def _model_index(comparison: Comparison, label: str, name: str) -> list[dict[str, Any]]:
    """Return the scores of a row as the hub reads them from the head of a card.

    Args:
        comparison: the comparison of methods.
        label: the label of the row.
        name: the name of the model.
    """
    row = [row.label for row in comparison.rows].index(label)
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="rope_patch",
            dataset_name=comparison.text_name,
            dataset_config=f"rope_patch {__version__}",
            metric_type=column.metric,
            metric_name=column.heading,
            metric_value=round(column.values[row], 4),
        )
        for column in comparison.columns()
    ]
    return eval_results_to_model_index(name, results)


def _front_matter(source: Path) -> dict[str, Any]:
    """Return what the card of a folder says of its licence, languages and the like, where it can be read."""
    try:
        return metadata_load(source / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
