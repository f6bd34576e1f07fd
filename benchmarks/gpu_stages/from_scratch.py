"""Stage g: position encodings trained from scratch, after table 2 of Barbero et al. 2024 (arXiv:2410.06205)."""

from __future__ import annotations

import math
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import rope_patch
from gpu_stages.base import Cell, Results, Setting, Stage
from measuring import synchronize
from rope_patch.evaluation.intervals import paired_means

ARMS = {
    "rope": "default",
    "nope": "nope",
    "p_rope-0.25": "p_rope:p=0.25",
    "p_rope-0.75": "p_rope:p=0.75",
    "partial-0.75": "partial:p=0.75",
    "reversed-0.75": "p_rope_reversed:p=0.75",
}
SEEDS = 5
CONTEXT = 1024
LADDER = ((128, 2), (192, 4), (256, 6), (384, 6), (512, 8), (640, 10), (768, 12), (1024, 16))
"""Width and layers of the models that may be chosen; heads have 64 features."""
TOKENS_PER_PARAMETER = 20
EPOCHS = 4
"""Times that the text is read at most."""
USED = 0.85
"""Share of the stage's time that the runs together may take by calibration."""
FIRST_SECONDS = 60.0
"""The estimated time of the calibration."""
STEP_TOKENS = 65536
RATE = 2e-3
"""Learning rate at a width of 256; it falls with the root of the width."""
HELD_OUT = 0.05
"""Share of every text that is not trained on, its end."""


def build(setting: Setting, width: int, layers: int, method: str, seed: int) -> Any:
    """Return a model with random weights and a table from the start, in training mode, float32."""
    torch.manual_seed(seed)
    head = setting.size(64, 16)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // head,
        num_key_value_heads=width // head,
        max_position_embeddings=setting.size(CONTEXT, 64),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.device(setting.device):
        model = LlamaForCausalLM(config)
    rope_patch.apply(model, method)
    return model.train()


def streams(setting: Setting) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on and those to evaluate on: (tokens,) each."""

    def build() -> tuple[Tensor, Tensor]:
        parts: tuple[list[int], list[int]] = ([], [])
        for text in setting.texts.values():
            cut = round(len(text) * (1 - HELD_OUT))
            for part, piece in zip(parts, (text[:cut], text[cut:]), strict=True):
                part += setting.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        train, held_out = (torch.tensor(part, device=setting.device) for part in parts)
        return train, held_out

    found: tuple[Tensor, Tensor] = setting.held("streams", build)
    return found


def losses(model: Any, rows: Tensor, device: str) -> Tensor:
    """Return the loss of each predicted token of rows, under autocast."""
    with torch.autocast(device, torch.bfloat16):
        logits = model(rows, use_cache=False).logits[:, :-1]
    flat = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
    return flat.view(len(rows), -1)


def train(setting: Setting, model: Any, steps: int, seed: int) -> list[float]:
    """Train on random windows of the text; a seed draws the same ones for every table. Returns the losses."""
    stream, context = streams(setting)[0], setting.size(CONTEXT, 64)
    rows = max(1, setting.size(STEP_TOKENS, 256) // context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    drawn = torch.Generator().manual_seed(seed)
    rate = RATE * (256 / model.config.hidden_size) ** 0.5
    logged = []
    for step in range(steps):
        share = min(1.0, (step + 1) / max(1, steps // 20)) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        starts = torch.randint(len(stream) - context, (rows,), generator=drawn).tolist()
        loss = losses(model, torch.stack([stream[start : start + context] for start in starts]), setting.device).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in (0, steps // 2, steps - 1):
            logged.append(round(float(loss.detach()), 4))
    return logged


def steps_of(setting: Setting, parameters: int) -> int:
    """Return how many steps a model of this size is trained."""
    tokens = min(TOKENS_PER_PARAMETER * parameters, EPOCHS * len(streams(setting)[0]))
    return max(2, tokens // setting.size(STEP_TOKENS, 4096))


def calibrate(setting: Setting, _: Results) -> dict[str, Any]:
    """Choose the largest size whose runs all fit into the time of the stage, by the speed of a few steps."""
    room = USED * (setting.stage_seconds - FIRST_SECONDS) / (len(ARMS) * setting.size(SEEDS, 2))
    tried: list[dict[str, Any]] = []
    for width, layers in setting.size(LADDER, ((32, 1), (64, 1))):
        model = build(setting, width, layers, ARMS["rope"], 0)
        parameters = sum(p.numel() for p in model.parameters())
        train(setting, model, 2, 0)
        synchronize(setting.device)
        began = time.perf_counter()
        train(setting, model, 4, 0)
        synchronize(setting.device)
        steps = steps_of(setting, parameters)
        seconds = (time.perf_counter() - began) / 4 * steps
        tried.append({"width": width, "layers": layers, "parameters": parameters, "steps": steps, "seconds": seconds})
        if seconds > room and len(tried) > 1:
            break
    fitting = [one for one in tried if one["seconds"] <= room]
    return {"chosen": (fitting or tried[:1])[-1], "seconds_of_a_run": room, "tried": tried}


def run(setting: Setting, arm: str, seed: int, done: Results) -> dict[str, Any]:
    """Train one table with one seed, and return its loss on the windows that are held out."""
    if "size" not in done:
        raise ValueError("the cell 'size' has no result, which says how large the models are")
    size = done["size"]["chosen"]
    model = build(setting, size["width"], size["layers"], ARMS[arm], seed)
    logged = train(setting, model, size["steps"], seed)
    held_out, context = streams(setting)[1], setting.size(CONTEXT, 64)
    count = min(len(held_out) // context, setting.size(64, 4))
    rows = held_out[: count * context].view(count, context)
    with torch.no_grad():
        nll = [float(losses(model.eval(), row[None], setting.device).mean()) for row in rows]
    return {
        "arm": arm,
        "seed": seed,
        "method": ARMS[arm],
        "parameters": size["parameters"],
        "steps": size["steps"],
        "tokens": size["steps"] * setting.size(STEP_TOKENS, 256),
        "training_loss": logged,
        "nll": statistics.fmean(nll),
        "nll_of_windows": nll,
        "perplexity": math.exp(statistics.fmean(nll)),
    }


def cells(setting: Setting) -> list[Cell]:
    """Return the calibration, then every table of a seed before the next seed."""
    about = {"text": setting.text_sha256} if setting.text else {}
    listed = [Cell("size", setting.seconds(FIRST_SECONDS), partial(calibrate, setting), settings=about)]
    seeds = setting.size(SEEDS, 2)
    seconds = setting.seconds(USED * (setting.stage_seconds - FIRST_SECONDS) / (len(ARMS) * seeds))
    for seed in range(seeds):
        for arm in ARMS:
            listed.append(Cell(f"{arm}-seed{seed}", seconds, partial(run, setting, arm, seed), settings=about))
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return perplexity, and the difference of losses from RoPE with Student's interval over seeds."""
    if "size" not in done or "chosen" not in done["size"]:
        return {}
    size = done["size"]["chosen"]
    runs = [
        c for c in done.values() if "arm" in c and (c["parameters"], c["steps"]) == (size["parameters"], size["steps"])
    ]
    by_arm = {arm: {c["seed"]: c["nll"] for c in runs if c["arm"] == arm} for arm in ARMS}
    rows = {}
    for arm, values in by_arm.items():
        both = sorted(values.keys() & by_arm["rope"].keys())
        if not values:
            continue
        row: dict[str, Any] = {"seeds": len(values), "perplexity": math.exp(statistics.fmean(values.values()))}
        if arm != "rope" and both:
            ours, theirs = [values[seed] for seed in both], [by_arm["rope"][seed] for seed in both]
            row["nll_minus_rope"] = statistics.fmean(ours) - statistics.fmean(theirs)
            row["interval_95"] = list(paired_means(ours, theirs)) if len(both) > 1 else None
        rows[arm] = row
    return {"parameters": size["parameters"], "tokens": runs[0]["tokens"] if runs else None, "arms": rows}


STAGE = Stage(
    "g",
    "position encodings from scratch",
    "RoPE, NoPE, p-RoPE at .25 and .75, partial and reversed, trained from scratch on the text with five seeds at the "
    "largest size that fits into the stage's time (table 2 of Barbero et al. 2024): loss on held-out text against "
    "RoPE's, with intervals over seeds.",
    cells,
    needs=("text",),
    summary=summary,
)
