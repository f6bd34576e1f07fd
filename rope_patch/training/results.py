"""Writes the files that a finished run leaves beside its adapter: results.json, evaluation.json and the model card."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import Trainer

from rope_patch.evaluation.intervals import POPULATION
from rope_patch.evaluation.suite import EvalResult, retrieval_warnings
from rope_patch.modeling.environment import environment
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import to_dict, to_yaml
from rope_patch.patching.verify import shortened, trained_length, verify_model
from rope_patch.runtime.folders import write_atomically
from rope_patch.runtime.page import Cells, DataTable, markdown_table
from rope_patch.training.checks import tokens_per_step
from rope_patch.training.evaluate_run import changes, metrics
from rope_patch.training.models import BUNDLED_MODELS
from rope_patch.training.runs import RESULTS_FILE

CARD_TEMPLATE = """---
{head}---
# {options.model.name}, {patch}, {results[target_length]} tokens

```python
import rope_patch

model = rope_patch.load("THIS FOLDER", dtype="{options.model.dtype}")
```
{warning}
## Scores

{scores}

Retrieval: exact match of greedy decoding on {asked} {options.evaluation.task} prompts per length. Perplexity: by
position, over {windows} windows of {results[text]}. {population}

{sentences}

## Training

```bash
{results[command]}
```

{results[steps]} steps, {results[tokens]:,} tokens{best}. Environment: {environment}.
```yaml
{yaml}```
"""

ADAPTER_WARNING = """
`peft` alone would load this adapter onto the original rotary table without a warning, and the model would be wrong:
`rope_patch.json` beside it says which patch it needs, and the line above applies it.
"""


def write_results(
    out: Path,
    options: RecipeOptions,
    command: str,
    trainer: Trainer,
    evaluations: Mapping[str, EvalResult],
    text: str,
) -> dict[str, Any]:
    """Write results, evaluations and card of a finished run; return the contents of ``results.json``.

    Args:
        out: the output folder of the run.
        options: the options of the run.
        command: the command that started the run; by default that of this process.
        trainer: the trainer after training, with its model and its log.
        evaluations: the evaluation of the model that was saved, ``"after"``; if asked for, the one without its
            adapter, ``"before"``, and without its patch, ``"unpatched"``.
        text: the name of the text that perplexity is measured on.
    """
    after = evaluations["after"]
    before = evaluations.get("before")
    compared = []
    if before is not None:
        compared = changes(before, after)
    for change in compared:
        if change["verdict"] == "worse":
            warnings.warn(f"{change['sentence']}; the card says so", stacklevel=2)
    model: Any = trainer.model
    record = verify_model(model)
    # Without a patch, the model before training is the unpatched one.
    unpatched = "unpatched"
    if unpatched not in evaluations and not record.changed:
        unpatched = "before"
    notes = []
    if unpatched in evaluations:
        notes = retrieval_warnings(evaluations, unpatched, trained_length(model))
    elif options.evaluation.before:
        notes.append("every weight was trained: for scores before it, rope-patch compare CHECKPOINT --methods default")
    state = trainer.state
    results: dict[str, Any] = {
        "command": command or " ".join(sys.argv),
        "options": to_dict(options),
        "patch": str(record.to_method()),
        "steps": state.global_step,
        "best_step": state.best_global_step,
        "target_length": record.target_length or options.target_length,
        "tokens": state.global_step * tokens_per_step(options, trainer.args),
        "losses": [{"step": entry["step"], "loss": entry["loss"]} for entry in state.log_history if "loss" in entry],
        "environment": environment(model),
        "text": text,
        "unpatched": None,
        "before": None,
        **{name: metrics(scores) for name, scores in evaluations.items()},
        "changes": compared,
        "notes": notes,
    }
    evaluated = {name: scores.to_dict() for name, scores in evaluations.items()}
    write_atomically(out / "evaluation.json", json.dumps(evaluated, allow_nan=False))
    write_atomically(out / "README.md", adapter_card(options, results, after))
    write_atomically(
        out / RESULTS_FILE, json.dumps(results, indent=1, allow_nan=False) + "\n"
    )  # written last: its presence means that the run is finished
    return results


def adapter_card(options: RecipeOptions, results: dict[str, Any], after: EvalResult) -> str:
    """Return the model card.

    Args:
        options: the options of the run.
        results: the contents of ``results.json``.
        after: the evaluation of the model that was saved.
    """
    (retrieval,) = after.retrieval.values()
    sentences = [f"- {change['sentence']}" for change in results["changes"]]
    sentences += [f"- **Note**: {sentence}." for sentence in results["notes"]]
    best = ""
    if results["best_step"] is not None:
        best = f"; step {results['best_step']} had the best score (exact match, then perplexity) and is this one"
    patch = shortened(results["patch"])
    head: dict[str, Any] = {"library_name": "transformers"}
    warning = ""
    if options.lora_rank:
        head["library_name"] = "peft"
        if patch != "default":
            warning = ADAPTER_WARNING
    if options.model.name not in BUNDLED_MODELS:  # these are on no hub
        head["base_model"] = options.model.name
    head["tags"] = ["rope_patch", "long-context"]
    return CARD_TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False),
        options=options,
        results=results,
        patch=patch,
        warning=warning,
        scores=scores_table(results),
        asked=len(retrieval.samples(after.spec.lengths[0])),
        windows=after.perplexity.windows if after.perplexity else 0,
        population=POPULATION,
        sentences="\n".join(sentences),
        best=best,
        environment=", ".join(f"{name} {value}" for name, value in results["environment"].items()),
        yaml=to_yaml(options),
    )


def scores_table(results: dict[str, Any]) -> str:
    """Return the metrics of the model without its patch, before and after training as a table."""
    headings = {"unpatched": "unpatched", "before": "before training", "after": "after training"}
    columns = [column for column in headings if results.get(column)]
    rows: list[Cells] = []
    # The first number is the score that ranks checkpoints, a mixture that says little to a reader.
    for name in list(results["after"])[1:]:
        rows.append([name.replace("_", " "), *(f"{results[column][name]:.3g}" for column in columns)])
    return markdown_table(DataTable("Scores", ["", *(headings[column] for column in columns)], rows, ""))
