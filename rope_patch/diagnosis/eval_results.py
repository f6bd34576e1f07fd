"""Checks of what lm-eval wrote: were prompts cut, and are answers that score 0 really wrong?

A score of 0 is often no score of the model: the start of the prompt was dropped with the needle in it, or the answer
was right and written in another way.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check

CUTTING = ("hf", "hf-auto", "huggingface")
"""Model types of lm-eval that drop the start of a prompt that does not fit."""
DEFAULT_ANSWER = 256
"""Longest answer of lm-eval's ``hf`` where a task states no ``max_gen_toks`` [tokens]."""
SHORTEST_ANSWER = 4
"""Shortest right answer that is looked for in wrong ones: a shorter one may stand there by chance [characters]."""


def check_results(source: str | Path, tokenizer: Any) -> Iterator[Check]:
    """Yield checks of the results of lm-eval, and of the samples that ``--log_samples`` wrote beside them.

    Args:
        source: a file ``results_*.json`` or ``samples_*.jsonl``, or a folder whose newest results are read.
        tokenizer: the tokenizer of the model, which counts the tokens of prompts.

    Raises:
        ValueError: the file is neither of the two, or the folder has no results.
        OSError: there is no such file.
    """
    results, samples = _read(Path(source))
    cuts = results.get("config", {}).get("model") in CUTTING
    longest = int(results.get("max_length") or 0) if cuts else 0
    if longest:
        yield from _lengths(results, longest)
    if not samples:
        yield Check("prompts and answers", NOTE, f"no samples beside {source}", fix="run lm_eval with --log_samples")
    for task, rows in samples.items():
        if longest:
            yield _prompts(task, rows, longest, tokenizer)
        if rows and "gen_args_0" in rows[0].get("arguments", {}):
            yield _answers(task, rows)
    if getattr(tokenizer, "chat_template", None) and not results.get("chat_template"):
        yield Check(
            "chat template",
            NOTE,
            "the tokenizer has one, and prompts were given without it",
            meaning="a model that was trained on chats answers worse without it, or not in the form asked for",
            fix="for such a model run lm_eval with --apply_chat_template",
        )


def _read(source: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Return the results, and the samples of each task."""
    if source.is_dir():
        found = sorted(source.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ValueError(f"{source} has no results_*.json of lm_eval --output_path")
        source = found[-1]
    if not source.exists():
        raise FileNotFoundError(f"no file or folder {source}")
    name = re.fullmatch(r"(?:results|samples_.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl?", source.name)
    if name is None:
        raise ValueError(f"{source} is not named results_….json or samples_….jsonl, as lm_eval names its files")
    file = source.with_name(f"results_{name[1]}.json")
    one = source.suffix == ".jsonl"
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() or not one else {}
    files = [source] if one else sorted(source.parent.glob(f"samples_*_{name[1]}.jsonl"))
    samples = {}
    for path in files:
        task = path.name.removeprefix("samples_").removesuffix(f"_{name[1]}.jsonl")
        samples[task] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return results, samples


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


def _prompts(task: str, rows: list[dict[str, Any]], longest: int, tokenizer: Any) -> Check:
    requests = [request for row in rows for request in row["arguments"].values()]
    texts = [request["arg_0"] for request in requests]
    sizes = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]] if texts else []
    room = [_room(request.get("arg_1"), longest, tokenizer) for request in requests]
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
    return longest - int((asked or {}).get("max_gen_toks", DEFAULT_ANSWER))


def _answers(task: str, rows: list[dict[str, Any]]) -> Check:
    wrong = [row for row in rows if _scored_zero(row)]
    lost = [row for row in wrong if _holds_answer(row, row["resps"])]
    empty = [row for row in wrong if not _plain(row["resps"])]
    if lost:
        filtered = sum(not _holds_answer(row, row["filtered_resps"]) for row in lost)
        answer = " ".join(str(lost[0]["resps"][0][0]).split())
        return Check(
            f"answers of {task}",
            DIFFERS,
            f"{len(lost)} of the {len(wrong)} that score 0 hold the right answer {_targets(lost[0])[0]!r}, as in: "
            f"{answer[:80]!r}",
            meaning=f"the filter of the task took it out of {filtered} of them; the others have another case, sign or "
            "space, or say it at another place than the task looks at",
            fix="read these samples, and write a filter or process_results for the task that finds them",
        )
    if len(empty) > len(rows) / 2:
        return Check(
            f"answers of {task}",
            UNKNOWN,
            f"{len(empty)} of {len(rows)} are empty",
            meaning="the model ended its text at once, or began with what the task stops at (until)",
            fix="look at the task's until and at the chat template",
        )
    return Check(f"answers of {task}", HOLDS, f"none of the {len(wrong)} of {len(rows)} that score 0 is right")


def _scored_zero(row: Mapping[str, Any]) -> bool:
    scores = [row[name] for name in row["metrics"] if isinstance(row.get(name), int | float)]
    return 0 in scores and max(scores) == 0


def _targets(row: Mapping[str, Any]) -> list[str]:
    target = row["target"]
    if isinstance(target, str) and target[:1] == "[":  # how lm-eval writes a list of answers
        try:
            target = ast.literal_eval(target)
        except (ValueError, SyntaxError):
            return [target]
    return [str(one) for one in (target if isinstance(target, list) else [target])]


def _holds_answer(row: Mapping[str, Any], answers: Any) -> bool:
    plain, targets = _plain(answers), [_plain(target) for target in _targets(row)]
    return any(len(target) >= SHORTEST_ANSWER and target in plain for target in targets)


def _plain(text: Any) -> str:
    """Return the letters and digits of a text, or of lists of texts, in lower case."""
    if isinstance(text, list):
        return " ".join(map(_plain, text))
    return "".join(re.findall(r"[^\W_]+", str(text).lower()))
