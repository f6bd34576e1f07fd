"""Stage d: perplexity and retrieval on long texts, compared with lm-eval's HFLM, whole logits, and generate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rope_patch
from gpu_stages.base import Cell, Results, Setting, Stage, gib
from measuring import peak_of
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.retrieval.prompts import PromptMaker

MODEL = "Llama-3.1-8B"
LENGTHS = (32768, 131072)
SIDES = ("one_pass", "chunked", "whole_logits", "lm_eval")
ASKING = ("ours", "chunked", "generate")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHUNK = 4096
TASK = "passkey"


def harness(model: Any, tokens: int) -> Any:
    """Return lm-eval's own HFLM around a model, with a tokenizer of as many words as the model knows."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w2")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=tokens)


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
    lm = harness(model, tokens)

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


@torch.no_grad()
def loss(setting: Setting, side: str, length: int, _: Results) -> dict[str, Any]:
    """Measure time and memory of one way to score a text, after a short text that loads kernels and libraries."""
    model, tokens = model_of(setting), setting.size(length, length // 128)
    ids = setting.text_ids(tokens)
    run = scorer(side, model, tokens, setting.size(CHUNK, 64))
    run(ids[:64])
    nll, usage = peak_of(lambda: run(ids), setting.device)
    return {
        "tokens": tokens,
        "nll": nll,
        "seconds_of_text": round(usage["seconds"], 4),
        "tokens_per_second": round(tokens / usage["seconds"], 1),
        "peak_above_model_gib": gib(usage["peak_bytes"]),
        "peak_from": usage["peak_from"],
    }


@torch.no_grad()
def asked(setting: Setting, side: str, length: int, _: Results) -> dict[str, Any]:
    """Measure time and memory of the prompts of one length, which hide a passkey at five depths of one haystack."""
    model, tokens = model_of(setting), setting.size(length, length // 128)
    chunk = setting.size(CHUNK, 64)
    tokenizer = setting.tokenizer

    def ours() -> list[str]:
        found = retrieval(
            model,
            tokenizer,
            TASK,
            lengths=[tokens],
            depths=DEPTHS,
            samples=1,
            haystack="noise",
            chunk=min(chunk, tokens) if side == "chunked" else None,
            batch_tokens=1,
        )
        return [sample.output for sample in found.samples(tokens)]

    def generate() -> list[str]:
        answers = []
        for prompt in PromptMaker(tokenizer, "noise").prompts(TASK, tokens, DEPTHS, seed=0, sample=0):
            ids = torch.tensor([list(prompt.ids)[: -prompt.answer]], device=setting.device)
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

    answers, usage = peak_of(generate if side == "generate" else ours, setting.device)
    return {
        "tokens": tokens,
        "prompts": len(answers),
        "answers": answers,
        "seconds_of_prompts": round(usage["seconds"], 4),
        "peak_above_model_gib": gib(usage["peak_bytes"]),
        "peak_from": usage["peak_from"],
    }


def cells(setting: Setting) -> list[Cell]:
    """Return the cells, the shorter length first; those that may run out of memory come last."""
    about = {"text": setting.text_sha256}
    listed = []
    for length in LENGTHS:
        factor = (length / LENGTHS[0]) ** 1.6  # between linear (MLPs) and quadratic (attention); an estimate
        for side in SIDES:
            needs = ("text", "lm-eval") if side == "lm_eval" else ("text",)
            measure = partial(loss, setting, side, length)
            listed.append(Cell(f"perplexity-{side}-{length}", setting.seconds(4 * factor), measure, needs, about))
        for side in ASKING:
            seconds = setting.seconds(14 * factor)
            given = {"chunk": CHUNK if side == "chunked" else None}
            measure = partial(asked, setting, side, length)
            listed.append(Cell(f"retrieval-{side}-{length}", seconds, measure, settings=given))
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return time and memory of the other ways relative to ours, at each length."""
    found: dict[str, Any] = {}
    for length in LENGTHS:
        pairs = [(f"perplexity-{s}-{length}", f"perplexity-chunked-{length}", "seconds_of_text") for s in SIDES]
        pairs += [(f"retrieval-{s}-{length}", f"retrieval-ours-{length}", "seconds_of_prompts") for s in ASKING]
        for name, ours, clock in pairs:
            if name == ours or name not in done or ours not in done or clock not in done[ours]:
                continue
            other, base = done[name], done[ours]
            if clock not in other:
                found[name] = "out of memory"
                continue
            memory = other["peak_above_model_gib"] / max(base["peak_above_model_gib"], 1e-9)
            found[name] = {"time_over_ours": round(other[clock] / base[clock], 3), "peak_over_ours": round(memory, 2)}
            if "nll" in other:
                found[name]["loss_difference"] = abs(other["nll"] - base["nll"])
    return found


STAGE = Stage(
    "d",
    "perplexity and retrieval of long texts",
    "Time and peak memory of a model in the shape of Llama 3.1 8B at 32k and 128k: perplexity in one pass, in chunks, "
    "with whole logits and by lm-eval's HFLM; passkeys at five depths by us and by `generate`.",
    cells,
    summary=summary,
)
