"""Writes the files that a finished run leaves beside its adapter: results.json, evaluation.json and the model card."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

from rope_patch.evaluation.compare import environment
from rope_patch.evaluation.intervals import INTERVAL_OVER_PROMPTS, INTERVAL_OVER_WINDOWS
from rope_patch.evaluation.suite import EvalResult, unpatched_missing
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import to_dict, to_yaml
from rope_patch.patching.verify import shortened, trained_length, verify_model
from rope_patch.reports.page import Cells, DataTable, markdown_table
from rope_patch.runtime.folders import write_atomically
from rope_patch.training.evaluate_run import changes, metrics
from rope_patch.training.models import BUNDLED_MODELS
from rope_patch.training.pack_rows import rows_per_step
from rope_patch.training.runs import RESULTS_FILE
from rope_patch.training.trainer import LongTrainer

CARD_TEMPLATE = """---
{head}---
# {model}, {patch}, {length} tokens

```python
import rope_patch

model = rope_patch.load("THIS FOLDER", dtype="{dtype}")
```
{warning}
## Scores

{scores}

Retrieval: exact match of greedy decoding on {asked} {task} prompts per length. Perplexity: by position, over {windows}
windows of held-out text. {population}

{sentences}

## Training

```bash
{command}
```

{steps} steps, {tokens:,} tokens{best}. Environment: {environment}.
```yaml
{options}```
"""

ADAPTER_WARNING = """
`peft` alone would load this adapter onto the original rotary table without a warning, and the model would be wrong:
`rope_patch.json` beside it says which patch it needs, and the line above applies it.
"""


def write_results(
    out: Path,
    options: RecipeOptions,
    command: str,
    trainer: LongTrainer,
    before: EvalResult | None,
    after: EvalResult,
) -> dict[str, Any]:
    """Write results, evaluations and card of a finished run; return the contents of ``results.json``.

    Args:
        out: the output folder of the run.
        options: the options of the run.
        command: the command that started the run; by default that of this process.
        trainer: the trainer after training, with its model and its log.
        before: the evaluation of the model without its adapter; None if it was not asked for.
        after: the evaluation of the model that was saved.
    """
    compared = []
    if before is not None:
        compared = changes(before, after)
    for change in compared:
        if change["verdict"] == "worse":
            warnings.warn(f"{change['sentence']}; the card says so", stacklevel=2)
    model: Any = trainer.model
    record = verify_model(model)
    state = trainer.state
    best_step = None
    if state.best_model_checkpoint is not None:
        best_step = int(Path(state.best_model_checkpoint).name.rpartition("-")[2])
    results: dict[str, Any] = {
        "command": command or " ".join(sys.argv),
        "options": to_dict(options),
        "patch": str(record.to_method()),
        "steps": state.global_step,
        "best_step": best_step,
        "target_length": record.target_length or options.target_length,
        "tokens": state.global_step * rows_per_step(options) * options.data.length,
        "losses": [{"step": entry["step"], "loss": entry["loss"]} for entry in state.log_history if "loss" in entry],
        "environment": environment(model),
        "before": None,
        "after": metrics(after),
        "changes": compared,
        "notes": _notes(model, str(record.to_method()), before, after),
    }
    scores = {"before": None, "after": after.to_dict()}
    if before is not None:
        results["before"] = metrics(before)
        scores["before"] = before.to_dict()
    write_atomically(out / "evaluation.json", json.dumps(scores, allow_nan=False))
    write_atomically(out / "README.md", card(options, results, after))
    write_atomically(
        out / RESULTS_FILE, json.dumps(results, indent=1, allow_nan=False) + "\n"
    )  # written last: its presence means that the run is finished
    return results


def _notes(model: Any, patch: str, before: EvalResult | None, after: EvalResult) -> list[str]:
    """Return warnings if the unpatched model was not measured or fails the task within its trained length."""
    # Only then is the evaluation before training one of the unpatched model.
    if before is not None and patch == "default":
        return before.warnings(trained_length(model))
    measured = [after] if before is None else [before, after]
    return unpatched_missing(measured, trained_length(model), "rope-patch compare MODEL --methods default measures it")


def card(options: RecipeOptions, results: dict[str, Any], after: EvalResult) -> str:
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
    if options.lora.rank > 0:
        head["library_name"] = "peft"
        if patch != "default":
            warning = ADAPTER_WARNING
    if options.model.name not in BUNDLED_MODELS:  # these are on no hub
        head["base_model"] = options.model.name
    head["tags"] = ["rope_patch", "long-context"]
    return CARD_TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False),
        dtype=options.model.dtype,
        model=options.model.name,
        patch=patch,
        length=results["target_length"],
        warning=warning,
        scores=scores_table(results),
        asked=len(retrieval.samples(after.spec.lengths[0])),
        task=options.evaluation.task,
        windows=after.perplexity.windows if after.perplexity else 0,
        population=f"{INTERVAL_OVER_WINDOWS} {INTERVAL_OVER_PROMPTS}",
        sentences="\n".join(sentences),
        command=results["command"],
        steps=results["steps"],
        tokens=results["tokens"],
        best=best,
        environment=", ".join(f"{name} {value}" for name, value in results["environment"].items()),
        options=to_yaml(options),
    )


def scores_table(results: dict[str, Any]) -> str:
    """Return the metrics before and after training as a table."""
    before = results["before"] or {}
    rows: list[Cells] = []
    # The first number is the score that ranks checkpoints, a mixture that says little to a reader.
    for name, value in list(results["after"].items())[1:]:
        earlier = ""
        if name in before:
            earlier = f"{before[name]:.3g}"
        rows.append([name.replace("_", " "), earlier, f"{value:.3g}"])
    return markdown_table(DataTable("Scores", ["", "before", "after"], rows, ""))
