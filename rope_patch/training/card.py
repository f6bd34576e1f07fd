"""The model card of a run: command, patch, data, curve and scores, all from what was measured."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from rope_patch.evaluation.answers import FIRST_CHOICE, ShownAnswer, markdown_table
from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
from rope_patch.training.models import BUNDLED
from rope_patch.training.reading import read
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.scores import RecipeScores

TEMPLATE = """---
{head}---
# {base}, {patch}, {length} tokens

Trained with rope_patch {version}. {what}

```python
import rope_patch

model = rope_patch.load("THIS FOLDER", dtype="{dtype}")
```
{warning}
## Scores

{scores}
{compared}
Retrieval: exact match of greedy decoding on {asked} {task} prompts per length, with 95 % Wilson intervals over what the
haystacks are worth{trained_on}. {first_choice}
Perplexity: by position, over {windows} windows of held-out text. {population}

Answers after training:

{answers}
{notes}
## Training

```bash
{command}
```

{steps} steps, {tokens} tokens, {minutes:.1f} minutes on {processes} x {device}{best}.
{data}
{curve}
Last losses: {losses}. torch {torch}, transformers {transformers}, Python {python}.

```yaml
{options}```
"""

ADAPTER_WARNING = """
`peft` alone would load this adapter onto the original rotary table without a warning, and the model would be wrong:
`rope_patch.json` beside it says which patch it needs, and the line above applies it.
"""


def card(results: dict[str, Any], final: RecipeScores) -> str:
    """Return the card.

    Args:
        results: the contents of ``results.json``.
        final: the evaluation at the end, for its intervals.
    """
    options = read(base=results["options"])
    data, environment = options.data, results["environment"]
    adapter = options.lora.rank > 0
    return TEMPLATE.format(
        head=_head(options, adapter),
        dtype=options.model.dtype,
        base=options.model.name,
        patch=_patch(results),
        length=results["target_length"],
        version=environment["rope_patch"],
        what=_what(options),
        warning=ADAPTER_WARNING if adapter and results["patch"] not in (None, "default") else "",
        scores=_scores(results, final),
        compared=_compared(results["changes"]),
        asked=len(final.retrieval.samples(final.lengths[0])),
        task=options.evaluation.task,
        trained_on="; such prompts were among the training rows"
        if data.retrieval and data.task == options.evaluation.task
        else "",
        first_choice=FIRST_CHOICE,
        answers=markdown_table(("", ShownAnswer(**answer)) for answer in results["answers"]),
        notes="".join(f"\n**Note**: {sentence}.\n" for sentence in results["notes"]),
        windows=final.perplexity.windows if final.perplexity else 0,
        population=f"{OF_WINDOWS} {OF_PROMPTS}",
        command=results["command"],
        steps=results["steps"],
        tokens=f"{results['tokens']:,}",
        minutes=results["seconds"] / 60,
        processes=environment["processes"],
        device=environment["device"],
        best=""
        if results["best_step"] is None
        else f"; step {results['best_step']} had the best score (exact match, then perplexity) and is this one",
        data=_data(options),
        curve=_curve(results["curve"], list(results["after"])[1:]),
        losses=", ".join(f"{entry['loss']:.3f} (step {entry['step']})" for entry in results["losses"][-3:]),
        torch=environment["torch"],
        transformers=environment["transformers"],
        python=environment["python"],
        options=options.to_yaml(),
    )


def _patch(results: dict[str, Any]) -> str:
    """The patch in a title; the values of a learned table are in its record."""
    patch = results["patch"] or "no patch"
    return "a learned table" if "table:" in patch else patch


def _head(options: RecipeOptions, adapter: bool) -> str:
    """The front matter, as YAML."""
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if options.model.name not in BUNDLED:  # these are on no hub
        header["base_model"] = options.model.name
    return OmegaConf.to_yaml(OmegaConf.create({**header, "tags": ["rope_patch", "long-context"]}))


def _what(options: RecipeOptions) -> str:
    lora, quantization = options.lora, options.model.quantization
    beside = ", embeddings and norms too" if lora.long_lora else ""
    base = f", over weights in {quantization}." if quantization != "none" else "."
    sentences = [f"LoRA of rank {lora.rank}{beside}{base}" if lora.rank else "Every weight was trained."]
    if options.patch.trainable:
        sentences.append("The rotary table was trained with them.")
    return " ".join(sentences)


def _compared(changes: list[dict[str, Any]]) -> str:
    """What training changed, beyond the noise or not."""
    lines = []
    for change in changes:
        sentence = change["sentence"]
        lines.append(f"- **{sentence}**" if change["verdict"] == "worse" else f"- {sentence}")
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _curve(rows: list[dict[str, Any]], names: list[str]) -> str:
    if not rows:
        return ""
    lines = [f"| step | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    lines += [f"| {row['step']} | " + " | ".join(f"{row[name]:.3g}" for name in names) + " |" for row in rows]
    return "\n" + "\n".join(lines) + "\n"


def _scores(results: dict[str, Any], final: RecipeScores) -> str:
    lines = ["| | before | after |", "|---|---|---|"]
    before, after = results["before"] or {}, results["after"]
    for name in list(after)[1:]:
        kind, *numbers = name.split("_")
        earlier = "" if name not in before else f"{before[name]:.3g}"
        interval = ""
        if kind == "retrieval":
            low, high = final.retrieval.interval(int(numbers[0]))
            interval = f" ({low:.2f} to {high:.2f})"
        label = f"{kind} at {numbers[0]}" if kind == "retrieval" else f"{kind} {numbers[0]} to {numbers[1]}"
        lines.append(f"| {label} | {earlier} | {after[name]:.3g}{interval} |")
        if kind == "retrieval":
            first, (length,) = results["first_choice"], numbers
            earlier = "" if first["before"] is None else f"{first['before'][length]:.3g}"
            lines.append(f"| first choice at {length} | {earlier} | {first['after'][length]:.3g} |")
    return "\n".join(lines)


def _data(options: RecipeOptions) -> str:
    data = options.data
    source = "text that ships with CPython" if data.source == "builtin" else data.source
    stages = options.stages
    shares = [f" ({share:.0%} of the steps)" if len(stages) > 1 else "" for _, share in stages]
    lengths = ", then ".join(f"{length}{share}" for (length, _), share in zip(stages, shares, strict=True))
    documents = {"join": "joined", "apart": "kept apart", "whole": "one per row"}[data.boundaries]
    kinds = {
        "full": "at their own positions",
        "pose": f"in {data.chunks} chunks with positions skipped up to {options.target_length} (PoSE)",
        "randpos": f"at random positions up to {options.target_length} (RandPos)",
    }
    prompts = (
        f" {data.retrieval:.0%} of the rows were {data.task} prompts over the same text." if data.retrieval else ""
    )
    return f"Data: {source}, rows of {lengths} tokens, documents {documents}, {kinds[data.positions]}.{prompts}"
