"""Stage d: perplexity and retrieval on long texts, compared with lm-eval's HFLM, whole logits, and generate."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

import rope_patch
from gpu_stages.base import Cell, Results, Setting, Stage, gib
from measuring import peak_of, time_in_turn
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.runtime.packaged import data_path

MODEL = "Llama-3.1-8B"
LENGTHS = (32768, 131072)
SIDES = ("one_pass", "chunked", "whole_logits", "lm_eval")
ASKING = ("ours", "generate")
ROUNDS = 3
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHUNK = 4096
TASK = "passkey"


def scorer(side: str, model: Any, tokens: int, chunk: int) -> Callable[[torch.Tensor], float]:
    """Return the function of one side: from token ids to the mean loss of all but the first [nats/token].

    Args:
        side: one of ``SIDES``.
        model: the model that reads.
        tokens: the number of tokens of the longest text.
        chunk: the number of tokens of a pass of the side ``chunked``.
    """
    match side:
        case "one_pass":
            return lambda ids: perplexity(model, ids).nll
        case "chunked":
            return lambda ids: perplexity(model, ids, chunk=min(chunk, len(ids))).nll
        case "whole_logits":  # as a plain loop over a text calls the model
            return lambda ids: float(model(input_ids=ids[None], labels=ids[None], use_cache=False).loss)
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(data_path("assets") / "llama")  # which is asked for, and not used
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=tokens)

    def by_harness(ids: torch.Tensor) -> float:
        row = ids.tolist()
        # The call that loglikelihood_rolling makes for a text of one window, without the tokenizer.
        ((total, _),) = lm._loglikelihood_tokens([(("", ""), row[:1], row[1:])], disable_tqdm=True)
        return -total / (len(row) - 1)

    return by_harness


def model_of(setting: Setting) -> Any:
    """Return the patched model, which is held for the next cells."""

    def build() -> Any:
        model = setting.random_model(MODEL)
        rope_patch.apply(model, "yarn:factor=16", target_length=131072)
        return model

    return setting.held("reading", build)


def asker(side: str, model: Any, tokenizer: Any, tokens: int) -> Callable[[], list[str]]:
    """Return the function of one side that answers the prompts of one length: a passkey at five depths of a haystack.

    Args:
        side: one of ``ASKING``.
        model: the model that is asked.
        tokenizer: the tokenizer that writes the prompts.
        tokens: the length of a prompt.
    """

    def ours() -> list[str]:
        found = retrieval(
            model,
            tokenizer,
            TASK,
            lengths=[tokens],
            depths=DEPTHS,
            samples=1,
            haystack="noise",
            batch_tokens=1,
        )
        return [sample.output for sample in found.samples(tokens)]

    def generate() -> list[str]:
        answers = []
        for prompt in PromptMaker(tokenizer, "noise").prompts(TASK, tokens, DEPTHS, seed=0, sample=0):
            ids = torch.tensor([list(prompt.ids)[: -prompt.answer]], device=model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=prompt.answer,
                min_new_tokens=prompt.answer,
                do_sample=False,
                pad_token_id=0,
            )
            answers.append(tokenizer.decode(out[0, ids.shape[1] :]))
        return answers

    return generate if side == "generate" else ours


def in_turn(setting: Setting, works: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Time all sides in turn, after each has done the same work once, when its peak of memory is measured.

    The first call of a kernel costs up to a second, and another length calls other kernels. A side that runs out of
    memory has no time.
    """
    sides: dict[str, dict[str, Any]] = {}
    for side, work in works.items():
        try:
            answer, usage = peak_of(work, setting.device)
        except torch.OutOfMemoryError as error:
            sides[side] = {"out_of_memory": str(error).splitlines()[0]}
            continue
        about = {"peak_above_model_gib": gib(usage["peak_bytes"]), "peak_from": usage["peak_from"]}
        sides[side] = {"answer": answer, **about}
    able = {side: work for side, work in works.items() if "answer" in sides[side]}
    for side, seconds in time_in_turn(able, ROUNDS, device=setting.device)["wall"].items():
        sides[side]["seconds"] = round(statistics.median(seconds), 4)
    return {"rounds": ROUNDS, "sides": sides}


@torch.no_grad()
def loss(setting: Setting, length: int, _: Results) -> dict[str, Any]:
    """Measure time and memory of all ways to score a text; their answer is its loss [nats/token]."""
    model, tokens = model_of(setting), setting.size(length, length // 128)
    ids = setting.text_ids(tokens)
    runs = {side: scorer(side, model, tokens, setting.size(CHUNK, 64)) for side in SIDES}
    return {"tokens": tokens, **in_turn(setting, {side: partial(run, ids) for side, run in runs.items()})}


@torch.no_grad()
def asked(setting: Setting, length: int, _: Results) -> dict[str, Any]:
    """Measure time and memory of the prompts of one length, by us and by ``generate``."""
    model, tokens = model_of(setting), setting.size(length, length // 128)
    return {
        "tokens": tokens,
        **in_turn(setting, {side: asker(side, model, setting.tokenizer, tokens) for side in ASKING}),
    }


def cells(setting: Setting) -> list[Cell]:
    """Return the cells, the shorter length first."""
    listed = []
    for length in LENGTHS:
        factor = (length / LENGTHS[0]) ** 1.6  # between linear (MLPs) and quadratic (attention); an estimate
        score = partial(loss, setting, length)
        ask = partial(asked, setting, length)
        settings = {"text": setting.text_sha256}
        needs = ("text", "lm-eval")
        listed.append(Cell(f"perplexity-{length}", setting.seconds(46 * factor), score, needs, settings))
        listed.append(Cell(f"retrieval-{length}", setting.seconds(56 * factor), ask))
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return time and memory of the other sides relative to the first one, which is ours."""
    found: dict[str, Any] = {}
    for name, cell in done.items():
        (_, ours), *others = cell["sides"].items()
        for side, other in others:
            if "seconds" not in ours or "seconds" not in other:
                found[f"{name}, {side}"] = "out of memory"
                continue
            found[f"{name}, {side}"] = {
                "time_over_ours": round(other["seconds"] / ours["seconds"], 3),
                "peak_over_ours": round(other["peak_above_model_gib"] / max(ours["peak_above_model_gib"], 1e-9), 2),
            }
    return found


STAGE = Stage(
    "d",
    "perplexity and retrieval of long texts",
    "Time and peak memory of a model in the shape of Llama 3.1 8B at 32k and 128k, all sides in turn, the median of "
    "three rounds: perplexity in one pass, in chunks, with whole logits and by lm-eval's HFLM; passkeys at five depths "
    "by us and by `generate`.",
    cells,
    summary=summary,
)
