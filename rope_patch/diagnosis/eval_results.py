"""Checks of what lm-eval wrote: were prompts cut, and are answers that score 0 really wrong?

A score of 0 is often no score of the model: the start of the prompt was dropped with the needle in it, or the answer
was right and written in another way.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check
from rope_patch.errors import read_json

CUTTING = ("hf", "hf-auto", "huggingface")
"""Model types of lm-eval that drop the start of a prompt that does not fit."""
ANSWER_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that lm-eval knows for the length of an answer [tokens]."""
DEFAULT_ANSWER = 256
"""Longest answer of lm-eval's ``hf`` where a task states none of them [tokens]."""
SHORTEST_ANSWER = 4
"""Shortest right answer that is looked for in wrong ones: a shorter one may stand there by chance [characters, of which
a Chinese one or a Korean syllable counts twice]."""

# Invisible characters, the vowel points of Hebrew and Arabic, and the zeros of 28334.00.
_IGNORED = r"[\u00ad\u0591-\u05c7\u064b-\u065f\u0670\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]|(?<=\d)\.0+(?!\.?\d)"
# Signs before groups of three digits (28,334, 28 334, 28{,}334, the Indian 1,23,456), and within a word (U.S.A.).
_DIVIDING = (
    r"(?<=\d)(?<!\d{4})(?:[,.'\u2019\u066c_ ]|\{,\}|\\,)(?=(?:\d\d,)*\d{3}(?!\d))"
    r"|(?<=[^\W\d_])[-.'\u2010\u2019](?=[^\W_])"
)


def check_results(source: str | Path, tokenizer: Any) -> Iterator[Check]:
    """Yield checks of the results of lm-eval, and of the samples that ``--log_samples`` wrote beside them.

    Args:
        source: a file ``results_*.json`` or ``samples_*.jsonl``, or a folder whose newest results are read.
        tokenizer: the tokenizer of the model, which counts the tokens of prompts.

    Raises:
        ValueError: the file is not one of lm-eval, or the folder has no results.
        OSError: there is no such file.
    """
    file = Path(source)
    if file.is_dir():
        found = sorted(file.rglob("results_*.json"), key=lambda path: path.name)
        if not found:
            raise ValueError(f"{source} has no results_*.json of lm_eval --output_path")
        file = found[-1]
    if file.match("samples_*.jsonl"):  # its results have its time in their name
        file = file.with_name(f"results_{file.stem.rpartition('_')[2]}.json")
    results = read_json(file)
    if "config" not in results:
        raise ValueError(f"{file} is no results_*.json of lm_eval")
    yield Check("results", HOLDS, f"{file.name}, of {results.get('model_name') or 'a model without a name'}")
    try:
        yield from _checks(results, _samples_beside(file), tokenizer)
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} or its samples do not hold what lm_eval writes: {error!r}") from None


def _samples_beside(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of each task, which have the time of the results in their names."""
    time = file.stem.removeprefix("results_")
    samples = {}
    for path in sorted(file.parent.glob(f"samples_*_{time}.jsonl")):
        task = path.name.removeprefix("samples_").removesuffix(f"_{time}.jsonl")
        # Not splitlines, which also divides at characters that lm_eval leaves within a line.
        lines = path.read_text(encoding="utf-8").split("\n")
        samples[task] = [json.loads(line) for line in lines if line.strip()]
    return samples


def _checks(results: dict[str, Any], samples: dict[str, list[dict[str, Any]]], tokenizer: Any) -> Iterator[Check]:
    config = results.get("config") or {}
    longest = 0
    if config.get("model") in CUTTING:
        longest = max(0, int(results.get("max_length") or 0))
    if longest:
        yield from _lengths(results, longest)
    if not samples:
        yield Check("prompts and answers", NOTE, "no samples beside the results", fix="run lm_eval with --log_samples")
    bos = not re.search(r"add_bos_token\W+False", str(config.get("model_args")))
    for task, rows in samples.items():
        requests = [request for row in rows for request in row["arguments"].values() if "arg_1" in request]
        rolling = ((results.get("configs") or {}).get(task) or {}).get("output_type") == "loglikelihood_rolling"
        if longest and requests and not rolling:  # rolling log-likelihoods cut nothing
            yield _prompts(task, requests, longest, tokenizer, bos)
        generated = [row for row in rows if isinstance(row["arguments"]["gen_args_0"].get("arg_1"), dict)]
        better = (results.get("higher_is_better") or {}).get(task) or {}
        if generated:
            yield _answers(task, generated, [name for name, higher in better.items() if higher is False])
    if getattr(tokenizer, "chat_template", None) and results.get("chat_template", "unknown") is None:
        yield Check(
            "chat template",
            NOTE,
            "the tokenizer has one, and prompts were given without it",
            meaning="a model that was trained on chats answers worse without it, or not in the form asked for",
            fix="for such a model run lm_eval with --apply_chat_template",
        )


def _lengths(results: Mapping[str, Any], longest: int) -> Iterator[Check]:
    """Compare the lengths that scores are named after with the longest prompt that the model was given."""
    for task, scores in results.get("results", {}).items():
        # RULER's tasks give -1 at lengths that were not run.
        keys = (key.partition(",")[0] for key, score in scores.items() if score != -1)
        if above := sorted(int(key) for key in keys if key.isdigit() and int(key) > longest):
            shown = ", ".join(map(str, above))
            yield Check(
                f"lengths of {task}",
                DIFFERS,
                f"scores at {shown} tokens, and max_length was {longest}",
                meaning=f"lm_eval dropped the start of these prompts: the model never saw more than {longest} tokens",
                fix=f"add max_length={above[-1]} to --model_args, if the rotary table is made for it",
            )


def _prompts(task: str, requests: list[dict[str, Any]], longest: int, tokenizer: Any, bos: bool) -> Check:
    start = getattr(tokenizer, "bos_token", None)
    sizes = []
    for request in requests:
        text = request["arg_0"]
        special = bos and not (start and text.startswith(start))
        sizes.append(len(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]))
    room = [_room(request["arg_1"], longest, tokenizer) for request in requests]
    cut = [size - most for size, most in zip(sizes, room, strict=True) if size > most]
    if not cut:
        return Check(f"prompts of {task}", HOLDS, f"all {len(sizes)} fit into {longest} tokens with their answers")
    return Check(
        f"prompts of {task}",
        DIFFERS,
        f"{len(cut)} of {len(sizes)} were cut: up to {max(cut)} tokens at their start were dropped",
        f"prompts and answers of at most {longest} tokens, the max_length of this run",
        "the instruction, the examples or the needle may have stood there",
        "give lm_eval a larger max_length (--model_args), or shorter prompts",
    )


def _room(asked: Any, longest: int, tokenizer: Any) -> int:
    """Return how many tokens of a prompt are kept: an answer, generated or given, takes its place of the length."""
    if isinstance(asked, str):  # the last token of an answer that is scored is not read
        return longest + 1 - len(tokenizer(asked, add_special_tokens=False)["input_ids"])
    given = (asked[name] for name in ANSWER_LENGTHS if name in (asked or {}))
    return longest - int(next(given, DEFAULT_ANSWER))


def _answers(task: str, rows: list[dict[str, Any]], lower: Collection[str]) -> Check:
    """Look for right answers in those that score 0.

    Args:
        task: name of the task.
        rows: samples, one for each document and filter.
        lower: metrics of which a lower value is better, which are left out.
    """
    scored = {row["doc_id"] for row in rows if not _scored_zero(row, lower)}
    documents = len({row["doc_id"] for row in rows})
    # Of a document that several filters were applied to, one row is looked at.
    wrong = list({row["doc_id"]: row for row in rows if row["doc_id"] not in scored}.values())
    lost = [row for row in wrong if _holds_answer(row, row["resps"])]
    empty = [row for row in wrong if not "".join(_texts(row["resps"])).strip()]
    if lost:
        filtered = sum(not _holds_answer(row, row["filtered_resps"]) for row in lost)
        answer = next(text for text in _texts(lost[0]["resps"]) if _holds_answer(lost[0], text))
        return Check(
            f"answers of {task}",
            DIFFERS,
            f"{len(lost)} of the {len(wrong)} that score 0 hold the right answer {_targets(lost[0])[0]!r}, as in: "
            f"{' '.join(answer.split())[:80]!r}",
            meaning=f"from {filtered} of them the filter of the task took it out; in {len(lost) - filtered} it is "
            "written in another way (case, signs, spaces, width), or stands at another place than the task looks at",
            fix="read these samples, and write a filter or process_results for the task that finds them",
        )
    if len(empty) > documents / 2:
        return Check(
            f"answers of {task}",
            UNKNOWN,
            f"{len(empty)} of {documents} are empty",
            meaning="the model ended its text at once, or began with what the task stops at (until)",
            fix="look at the task's until and at the chat template",
        )
    if wrong and not any(map(_targets, wrong)):
        return Check(f"answers of {task}", NOTE, f"the right answers of the {len(wrong)} that score 0 are too short")
    return Check(f"answers of {task}", HOLDS, f"none of the {len(wrong)} of {documents} that score 0 is right")


def _scored_zero(row: Mapping[str, Any], lower: Collection[str]) -> bool:
    scores = [row[name] for name in row["metrics"] if name not in lower and isinstance(row.get(name), int | float)]
    return max(scores, default=1) == 0


def _targets(row: Mapping[str, Any]) -> list[str]:
    """Return the right answers that are long enough to be looked for."""
    target = row["target"]
    if isinstance(target, str) and target[:1] == "[":  # how lm-eval writes a list of answers
        with contextlib.suppress(ValueError, SyntaxError):
            target = ast.literal_eval(target)
    # A Chinese character or a Korean syllable says as much as two letters.
    return [
        one
        for one in _texts(target)
        if sum(1 + (sign >= "\u3400") for sign in one if sign.isalnum()) >= SHORTEST_ANSWER
    ]


def _holds_answer(row: Mapping[str, Any], answers: Any) -> bool:
    """Tell whether a text holds a right answer in whole words and numbers, in whatever way both are written."""
    said = [writing for text in _texts(answers) for writing in _writings(text)]
    return any(one in writing for target in _targets(row) for one in _writings(target) for writing in said)


def _writings(text: str) -> list[str]:
    """Return a text as words between spaces: as it stands, and without the signs that may divide a number or a word.

    Case, the width of letters and digits, the script of digits, signs (quotes, markdown, LaTeX) and what is invisible
    make no difference.

    >>> _writings("**Tokyo** = 東京: $28,334.5")
    [' tokyo 東 京 28 334point5 ', ' tokyo 東 京 28334point5 ']
    """
    text = re.sub(_IGNORED, "", unicodedata.normalize("NFKC", text).casefold())
    writings = []
    for one in (text, re.sub(_DIVIDING, "", text)):
        # A decimal is one word, so that 1234 is not found in 0.1234.
        words = "".join(map(_plain, re.sub(r"(?<=\d)\.(?=\d)", "point", one))).split()
        writings.append(f" {' '.join(words)} ")
    return writings


def _plain(sign: str) -> str:
    kind = unicodedata.category(sign)
    if kind == "Lo":  # a letter without case: such scripts write words together, or add particles to them
        return f" {sign} "
    if kind == "Nd":  # a digit of any script
        return str(int(sign))
    return sign if kind[0] in "LMN" else " "  # letters, marks on them and numbers


def _texts(answers: Any) -> Iterator[str]:
    """Yield the texts of lists of answers."""
    if isinstance(answers, list):
        for one in answers:
            yield from _texts(one)
    else:
        yield str(answers)
