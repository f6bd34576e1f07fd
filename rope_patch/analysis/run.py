"""``rope-patch analyze``: everything the analysis can say of one checkpoint, on one text, in one result."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_patch.analysis.heads import Heads, masses
from rope_patch.analysis.outliers import OutlierPair, outlier_pairs, recall
from rope_patch.analysis.sinks import Sinks, sinks
from rope_patch.analysis.trials import (
    SHARES,
    TOLERANCE,
    Advice,
    Told,
    Trial,
    advise,
    longest_trial,
    run_trials,
    trial_text,
)
from rope_patch.analysis.views import LIMIT, HeadView, view_heads
from rope_patch.evaluation.documents import Source
from rope_patch.evaluation.domains import TextRows
from rope_patch.evaluation.result_cache import ResultCache, finite, key
from rope_patch.modeling.capture import Capture, capture
from rope_patch.modeling.scoring import fingerprint
from rope_patch.patching.verify import inspect_model

SCHEMA = 1

VIEWED = 256
"""Tokens of the patterns of single heads."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """What was found out about a checkpoint on a text.

    Attributes:
        name: of the checkpoint.
        table: what the config and a patch say of its rotary tables.
        method: the patch on it, or None.
        context: positions the config states [tokens].
        rows: the text.
        capture: statistics of queries, keys and values.
        heads: where heads attend.
        sinks: keys that the mean queries prefer, by layer.
        views: single heads.
        trials: of p-RoPE, the table as found first; empty where they were not asked for.
        trial_positions: edges of the positions whose perplexity they measure [tokens].
        trial_text: name of the text they are measured on.
        advice: which p.
        words: token ids spoken of, as text.
        environment: versions.
    """

    name: str
    table: str
    method: str | None
    context: int
    rows: TextRows
    capture: Capture
    heads: Heads
    sinks: tuple[Sinks, ...]
    views: tuple[HeadView, ...]
    trials: tuple[Trial, ...]
    trial_positions: tuple[int, ...]
    trial_text: str
    advice: Advice
    words: Mapping[int, str]
    environment: Mapping[str, str]
    schema: int = SCHEMA

    def word(self, token: int) -> str:
        """Return a token as text."""
        return self.words.get(token, str(token))

    def outliers(self, states: str = "key") -> tuple[OutlierPair, ...]:
        """Return the outlier pairs of the keys or queries, the longest first."""
        return outlier_pairs(self.capture, states)

    def to_json(self) -> str:
        """Return what can be read without arrays: habits of heads, outliers, recall, sinks, trials, advice."""
        table = recall(self.capture, quantiles=(0.99,))
        out = {
            "schema": self.schema,
            "model": self.name,
            "class": self.capture.model,
            "table": self.table,
            "method": self.method,
            "context": self.context,
            "text": {
                "name": self.rows.name,
                "sha256": self.rows.sha256,
                "groups": list(self.capture.groups),
                "rows": self.capture.rows,
                "tokens": self.capture.tokens,
            },
            "findings": findings(self),
            "heads": [
                _head_facts(self, layer.index, head) for layer in self.heads.layers for head in range(layer.heads)
            ],
            "outliers": {states: [asdict(pair) for pair in self.outliers(states)] for states in ("key", "query")},
            "recall": json.loads(table.to_json())["rows"],
            "sinks": [
                {
                    "layer": found.layer,
                    "head": head,
                    "token": self.word(int(found.token[head, 0])),
                    "position": int(found.position[head, 0]),
                    "score": float(found.score[head, 0]),
                    "cosine": float(found.cosine[head, 0]),
                }
                for found in self.sinks
                for head in range(len(found.token))
            ],
            "trials": [asdict(trial) for trial in self.trials],
            "trial_positions": list(self.trial_positions),
            "trial_text": self.trial_text,
            "advice": asdict(self.advice),
            "environment": dict(self.environment),
        }
        return json.dumps(finite(out), indent=1, allow_nan=False, ensure_ascii=False)


def analyze(
    model: nn.Module,
    tokenizer: Any,
    rows: TextRows,
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] = (),
    shares: Sequence[float] = SHARES,
    trial_source: Mapping[str, Source] | None = None,
    tolerance: float = TOLERANCE,
    chunk: int | None = None,
    keep: Path | None = None,
    progress: Told = lambda stage, tokens: None,
) -> Analysis:
    """Analyse a checkpoint on a text.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter.
        tokenizer: its own.
        rows: the text, from :func:`~rope_patch.evaluation.domains.read_rows`.
        name: of the checkpoint.
        layers: indices; all by default.
        heads: layer and query head of those to show one by one; by default the clearest of each habit.
        shares: values of p to try, in (0, 1); none for no trials.
        trial_source: texts for the trials, by name; by default the held-out part of the built-in text.
        tolerance: rise of perplexity within the context that a p may cost, relative.
        chunk: tokens per forward pass of the capture; a row at once by default.
        keep: folder in which finished parts are kept: a second run goes on where the first one stopped.
        progress: told the part of the work and the tokens it has just read.

    Raises:
        TypeError: not a transformers model.
        ValueError: as for ``capture`` and ``masses``; a layer or head that the model does not have; a p outside (0, 1).
    """
    seen = inspect_model(model)
    check(model.config, layers=layers, heads=heads, shares=shares, tolerance=tolerance, chunk=chunk)  # type: ignore[arg-type]
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    kept = ResultCache(keep / "kept.jsonl") if keep is not None else None
    identity = {"model": fingerprint(model), "layers": layers, "text": rows.sha256, "ids": rows.ids.tolist()}

    def part(kind: Any, stage: str, make: Callable[[], Any], **options: Any) -> Any:
        """Make a part, or take it from its file."""
        if keep is None or kept is None:
            return make()
        path, known = keep / f"{stage}.npz", key(part=stage, **identity, **options)
        if path.exists() and kept.get(stage) == [known, _digest(path)]:  # the file is this one, and whole
            progress(stage, rows.ids.numel())
            return kind.from_npz(path)
        made = make()
        made.to_npz(path)
        kept[stage] = [known, _digest(path)]
        return made

    def told(stage: str) -> Callable[[int], None]:
        return lambda tokens: progress(stage, tokens)

    captured = part(
        Capture,
        "capture",
        lambda: capture(
            model, rows.ids, chunk=chunk, layers=layers, groups=rows.groups, progress=told("capture")
        ),
        chunk=chunk,
    )  # fmt: skip
    measured = part(Heads, "heads", lambda: masses(model, rows.ids, layers=layers, progress=told("heads")))
    preferred = sinks(model, rows.ids, captured, chunk=chunk, layers=layers)
    progress("sinks", rows.ids.numel())
    shown = list(heads) or _clearest(measured)
    views = view_heads(model, rows.ids[0, : min(VIEWED, LIMIT)], shown)
    context = max(slot.max_position_embeddings for slot in seen.tables)
    trials: tuple[Trial, ...] = ()
    edges: tuple[int, ...] = ()
    text = ""
    if shares:
        windows, edges, text = trial_text(tokenizer, trial_source, context)
        resume = keep / "kept.jsonl" if keep is not None else None
        trials = run_trials(model, captured, windows, edges, sorted(shares, reverse=True), resume, progress)
    return Analysis(
        name=name or type(model).__name__,
        table=str(seen),
        method=str(seen.record.to_method()) if seen.record else None,
        context=context,
        rows=rows,
        capture=captured,
        heads=measured,
        sinks=preferred,
        views=views,
        trials=trials,
        trial_positions=edges,
        trial_text=text,
        advice=advise(trials, tolerance, vocabulary=_vocabulary(model)),
        words=_words(tokenizer, captured, measured, preferred, views),
        environment=_environment(),
    )


def check(
    config: PreTrainedConfig,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] = (),
    shares: Sequence[float] = SHARES,
    tolerance: float = TOLERANCE,
    chunk: int | None = None,
) -> None:
    """Raise ValueError for options of :func:`analyze` that a model of this config cannot meet."""
    text = config.get_text_config()
    for p in shares:
        if not 0 < p < 1:
            raise ValueError(f"p must be in (0, 1), got {p}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be >= 0, got {tolerance}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be >= 1 token, got {chunk}")
    for layer in (*(layers or ()), *(layer for layer, _ in heads)):
        if not 0 <= layer < text.num_hidden_layers:
            raise ValueError(f"the model has attention layers 0 to {text.num_hidden_layers - 1}, got {layer}")
    for layer, head in heads:
        if not 0 <= head < text.num_attention_heads:
            raise ValueError(f"layer {layer} has query heads 0 to {text.num_attention_heads - 1}, got {head}")
        if layers is not None and layer not in layers:
            raise ValueError(f"head {layer}.{head} is not in the layers to be analysed, {list(layers)}")


def tokens_to_read(rows: TextRows, shares: Sequence[float], context: int) -> int:
    """Return the tokens that ``analyze`` tells its ``progress`` of, at most."""
    trials = 1 + len(shares) if shares else 0
    return 3 * rows.ids.numel() + trials * longest_trial(context)


def findings(analysis: Analysis) -> list[str]:
    """Return what matters most, a sentence each."""
    made = []
    heads = [(layer.index, head, layer.habits(head)) for layer in analysis.heads.layers for head in range(layer.heads)]
    total = len(heads)
    most = "with most of the attention"
    for habit, one, many in (
        ("previous token", f"attends to the previous token {most}", f"attend to the previous token {most}"),
        ("diagonal", f"attends to its own token {most}", f"attend to their own token {most}"),
        ("2 back", f"attends two tokens back {most}", f"attend two tokens back {most}"),
        ("induction", "does induction, on the text or on random tokens that come twice",
         "do induction, on the text or on random tokens that come twice"),
        ("first token", f"rests on the first token {most}", f"rest on the first token {most}"),
        ("sink", f"rests on several sinks {most}", f"rest on several sinks {most}"),
        ("after a token", "looks at the previous token after certain tokens alone",
         "look at the previous token after certain tokens alone"),
    ):  # fmt: skip
        found = [f"{layer}.{head}" for layer, head, habits in heads if habit in habits]
        if found:
            listed = ", ".join(found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
            made.append(f"{len(found)} of {total} heads {one if len(found) == 1 else many} (layer.head {listed}).")
    if not any(habits for _, _, habits in heads):
        made.append(f"None of {total} heads has a habit.")
    for states in ("key", "query"):
        pairs = analysis.outliers(states)
        count = sum(layer.query.heads * layer.query.pairs for layer in analysis.capture.layers)
        if not pairs:
            made.append(
                f"No mean {states} is an outlier: none of {count} pairs has a radius over 5 times the median of the "
                "layers read."
            )
            continue
        kinds = {kind: sum(pair.kind == kind for pair in pairs) for kind in ("offset feature", "partial turn")}
        below = sum(kinds.values()) + sum(pair.kind == "still" for pair in pairs)
        made.append(
            f"{len(pairs)} of {count} mean {states} pairs are outliers, up to {pairs[0].ratio:.0f} times the median of "
            f"the layers read (layer {pairs[0].layer}, head {pairs[0].head}, pair {pairs[0].pair}); under Jonasson's "
            f"frequency bound lie {below}, {kinds['offset feature']} of them beyond its angle bound as well."
        )
    made.append(analysis.advice.reason)
    return made


# --- small parts -----------------------------------------------------------------------------------------------------


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)


def _clearest(heads: Heads) -> list[tuple[int, int]]:
    """Return the head with the most of each habit, each head once."""
    best: dict[str, tuple[float, int, int]] = {}
    for layer in heads.layers:
        for head in range(layer.heads):
            score = {
                "diagonal": layer.offset_mass[head, 0],
                "previous token": layer.offset_mass[head, 1],
                "induction": torch.fmax(layer.induction_mass[head], layer.repeated_mass[head]).nan_to_num(),
                "sink": torch.maximum(layer.first_mass[head], layer.sink_mass[head]),
                "after a token": layer.trigger_mass[head, 0] - layer.offset_mass[head, 1],
            }
            for habit, mass in score.items():
                if float(mass) > best.get(habit, (0.0, 0, 0))[0]:
                    best[habit] = float(mass), layer.index, head
    return list(dict.fromkeys((layer, head) for _, layer, head in best.values()))


def _words(
    tokenizer: Any, captured: Capture, heads: Heads, preferred: Sequence[Sinks], views: Sequence[HeadView]
) -> dict[int, str]:
    named = [part.top_token for layer in captured.layers for part in (layer.query, layer.key, layer.value)]
    named += [ids for layer in heads.layers for ids in (layer.sink_token, layer.trigger_token)]
    named += [found.token for found in preferred] + [view.token_ids for view in views]
    known = torch.unique(torch.cat([ids.flatten() for ids in named])).tolist() if named else []
    return {token: tokenizer.decode([token]) for token in known if token >= 0}


def _head_facts(analysis: Analysis, layer: int, head: int) -> dict[str, Any]:
    found = analysis.heads.layer(layer)
    return {
        "layer": layer,
        "head": head,
        "habits": list(found.habits(head)),
        "offset_mass": found.offset_mass[head].tolist(),
        "first_mass": float(found.first_mass[head]),
        "sink_mass": float(found.sink_mass[head]),
        "induction_mass": float(found.induction_mass[head]),
        "repeated_mass": float(found.repeated_mass[head]),
        "distance": float(found.distance[head]),
        "entropy": float(found.entropy[head]),
        "cosine": found.cosine[head].tolist(),
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _environment() -> dict[str, str]:
    import transformers

    from rope_patch import __version__

    return {"rope_patch": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
