"""The model card of a run: patch, scores, command and options, all from what was measured."""

from __future__ import annotations

from typing import Any

import yaml

from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
from rope_patch.evaluation.suite import EvalResult
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.writing import to_yaml
from rope_patch.training.evaluating import retrieval_of
from rope_patch.training.models import BUNDLED

TEMPLATE = """---
{head}---
# {base}, {patch}, {length} tokens

Trained with rope_patch {version}.

```python
import rope_patch

model = rope_patch.load("THIS FOLDER", dtype="{dtype}")
```
{warning}
## Scores

{scores}

Retrieval: exact match of greedy decoding on {asked} {task} prompts per length, with 95 % Wilson intervals over what the
haystacks are worth{trained_on}. Perplexity: by position, over {windows} windows of held-out text. {population}
{sentences}
## Training

```bash
{command}
```

{steps} steps, {tokens:,} tokens, on {processes} x {device}{best}. Last losses: {losses}.
torch {torch}, transformers {transformers}, Python {python}.
```yaml
{options}```
"""

ADAPTER_WARNING = """
`peft` alone would load this adapter onto the original rotary table without a warning, and the model would be wrong:
`rope_patch.json` beside it says which patch it needs, and the line above applies it.
"""


def card(options: RecipeOptions, results: dict[str, Any], final: EvalResult) -> str:
    """Return the card.

    Args:
        options: the options of the run.
        results: the contents of ``results.json``.
        final: the evaluation at the end, for its intervals.
    """
    data, environment, adapter = options.data, results["environment"], options.lora.rank > 0
    sentences = [f"- {change['sentence']}" for change in results["changes"]]
    sentences += [f"- **Note**: {sentence}." for sentence in results["notes"]]
    asked_in_training = data.retrieval and data.task == options.evaluation.task
    best = f"; step {results['best_step']} had the best score (exact match, then perplexity) and is this one"
    return TEMPLATE.format(
        head=_head(options, adapter),
        dtype=options.model.dtype,
        base=options.model.name,
        patch="a learned table" if "table:" in str(results["patch"]) else results["patch"] or "no patch",
        length=results["target_length"],
        version=environment["rope_patch"],
        warning=ADAPTER_WARNING if adapter and results["patch"] not in (None, "default") else "",
        scores=_scores(results, final),
        asked=len(retrieval_of(final).samples(final.spec.lengths[0])),
        task=options.evaluation.task,
        trained_on="; such prompts were among the training rows" if asked_in_training else "",
        windows=final.perplexity.windows if final.perplexity else 0,
        population=f"{OF_WINDOWS} {OF_PROMPTS}",
        sentences="\n" + "\n".join(sentences) + "\n" if sentences else "",
        command=results["command"],
        steps=results["steps"],
        tokens=results["tokens"],
        best="" if results["best_step"] is None else best,
        losses=", ".join(f"{entry['loss']:.3f} (step {entry['step']})" for entry in results["losses"][-3:]),
        options=to_yaml(options, comments=False),
        **{name: environment[name] for name in ("torch", "transformers", "python", "processes", "device")},
    )


def _head(options: RecipeOptions, adapter: bool) -> str:
    """Return the front matter, as YAML."""
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if options.model.name not in BUNDLED:  # these are on no hub
        header["base_model"] = options.model.name
    return str(yaml.safe_dump({**header, "tags": ["rope_patch", "long-context"]}, sort_keys=False))


def _scores(results: dict[str, Any], final: EvalResult) -> str:
    """Return the metrics before and after training as a table, retrieval with its interval."""
    lines = ["| | before | after |", "|---|---|---|"]
    before = results["before"] or {}
    for name, value in list(results["after"].items())[1:]:
        kind, *places = name.split("_")
        earlier = f"{before[name]:.3g}" if name in before else ""
        interval = ""
        if kind == "retrieval":
            low, high = retrieval_of(final).interval(int(places[0]))
            interval = f" ({low:.2f} to {high:.2f})"
        lines.append(f"| {kind} {' to '.join(places)} | {earlier} | {value:.3g}{interval} |")
    return "\n".join(lines)
