"""``doctor`` on results of lm-eval: samples as its files hold them; a run of lm-eval itself is in ``tests/harness``."""

from __future__ import annotations

import json

import pytest
from support.commands import invoke

from rope_patch import data_path
from rope_patch.diagnosis.eval_results import check_results

LLAMA = data_path("assets") / "llama"
STAMP = "2026-11-26T06-43-14.154957"
PROMPT = "def f(x):"
RIGHT = {"exact_match": 1.0}
SCORES = {"128,none": 0, "256,none": -1}


class Characters:
    """A tokenizer of a character per token, with a template."""

    chat_template = "{{ messages }}"

    def __call__(self, text, **_):
        return {"input_ids": list(text)}


def sample(said, target="['28334']", kept=None, **more):
    return {
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": PROMPT, "arg_1": {"max_gen_toks": 5}}},
        "resps": [[said]],
        "filtered_resps": [said if kept is None else kept],
        "metrics": ["exact_match"],
        "exact_match": 0.0,
        **more,
    }


def written(folder, *samples, **results):
    results = {"config": {"model": "hf"}, "max_length": 64, "results": {}} | results
    path = folder / f"results_{STAMP}.json"
    path.write_text(json.dumps(results))
    lines = [json.dumps({"doc_id": i} | each, ensure_ascii=False) for i, each in enumerate(samples)]
    (folder / f"samples_niah_{STAMP}.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("check", "state", "said", "samples", "results"),
    [
        ("lengths of niah", "differs", "scores at 128 tokens", [], {"results": {"niah": SCORES}}),
        ("prompts of niah", "holds", "all 1 fit", [sample("")], {"max_length": len(PROMPT) + 5}),
        ("prompts of niah", "differs", "1 of 1 were cut: up to 1 ", [sample("")], {"max_length": len(PROMPT) + 4}),
        ("answers of niah", "differs", "as in: 'It is 28,334.'", [sample("It is 28,334."), sample("no")], {}),
        ("answers of niah", "differs", "from 1 of them the filter", [sample("is 28334", kept="is")], {}),
        ("answers of niah", "differs", "1 of the 1 that score 0", [sample("I\u2028say YES-A", target="yes a")], {}),
        ("answers of niah", "holds", "none of the 1 of 2", [sample("28333"), sample("28334", **RIGHT)], {}),
        ("answers of niah", "holds", "none of the 0 of 1", [sample("28334"), sample("28334", doc_id=0, **RIGHT)], {}),
        ("answers of niah", "note", "too short", [sample("1234", target="4")], {}),
        ("answers of niah", "unknown", "2 of 3 are empty", [sample(""), sample("\n"), sample("no")], {}),
        ("chat template", "note", "without it", [], {"chat_template": None}),
    ],
)
def test_what_results_say(tmp_path, check, state, said, samples, results):
    written(tmp_path, *samples, **results)
    (found,) = [one for one in check_results(tmp_path, Characters()) if one.name == check]
    assert found.state == state and said in f"{found.found} {found.meaning}"


@pytest.mark.parametrize(
    ("target", "said", "right"),
    [
        ("北京大学", "答案是北京大学。", True),
        ("東京", "答えは東京です", True),
        ("กรุงเทพ", "คำตอบคือกรุงเทพครับ", True),
        ("28334", "答案是２８３３４号", True),
        ("28334", "الجواب ٢٨٣٣٤", True),
        ("28,334", r"\boxed{28{,}334.00}", True),
        ("caf\u00e9 Stra\u00dfe", "**CAFE\u0301** STRASSE", True),
        ("the U.S.A.", "\u201cThe\nUSA\u2019s\u201d", True),
        ("28334", "९२८३३४, 0.28334, 28334.5 and 28,334,000", False),
        ("北京大学", "北京小学", False),
        ("हिन्दी भाषा", "हन्दा भाषा", False),  # its vowels are marks
        ("Iran", "I ran", False),
    ],
)
def test_a_right_answer_however_it_is_written(tmp_path, target, said, right):
    written(tmp_path, sample(said, target=target))
    (found,) = [one for one in check_results(tmp_path, Characters()) if one.name == "answers of niah"]
    assert found.state == ("differs" if right else "holds")


def test_a_program_that_cuts_nothing_and_a_template_that_was_applied_say_nothing(tmp_path):
    path = written(tmp_path, sample("no"), config={"model": "rope_patch"}, max_length=1, chat_template="{{ messages }}")
    assert [one.name for one in check_results(path, Characters())] == ["results", "answers of niah"]


def test_an_answer_that_is_scored_takes_a_token_less(tmp_path):
    scored = {"arguments": {"gen_args_0": {"arg_0": PROMPT, "arg_1": "28"}}, "exact_match": 1.0}
    written(tmp_path, sample("") | scored, max_length=len(PROMPT) + 1)
    (found,) = [one for one in check_results(tmp_path, Characters()) if one.name.startswith(("prompts", "answers"))]
    assert (found.name, found.state) == ("prompts of niah", "holds")


def test_the_command_counts_them(tmp_path):
    path = written(tmp_path, sample("It is 28334."))
    printed = invoke("doctor", str(LLAMA), "--results", str(path))
    assert printed.exit_code == 1 and "hold the right answer '28334'" in " ".join(printed.output.split())
    of_samples = invoke("doctor", str(LLAMA), "--results", str(tmp_path / f"samples_niah_{STAMP}.jsonl"))
    assert of_samples.output == printed.output
    for wrong, said in [(tmp_path / "none", "none"), (LLAMA, "has no results_"), (LLAMA / "config.json", "is no")]:
        printed = invoke("doctor", str(LLAMA), "--results", str(wrong))
        assert printed.exit_code == 2 and said in printed.output, printed.output
