"""Reading the right answers of our tasks in lm-eval: the cut is the engine's, and so are the scores."""

from __future__ import annotations

import json

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from number_tokenizers import KINDS, tokenizer_of
from prompting import bold
from scored import naive, spy_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.harness.model import RopePatchLM
from rope_patch.harness.tasks import OfflineTask, retrieval_documents

LLAMA = str(rope_patch.data_path("assets") / "llama")
TASKS = str(rope_patch.data_path("eval_tasks"))
CHAT = (
    "{% for message in messages %}{{ '[' + message['role'] + ']\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)


def manager(**metadata):
    return TaskManager(include_defaults=False, include_path=TASKS, metadata={"pretrained": LLAMA, **metadata})


def evaluated(model, names, *, tokenizer=LLAMA, chat=False, limit=None, **metadata):
    tasks = manager(**{"pretrained": tokenizer, **metadata})
    options = {"apply_chat_template": chat, "log_samples": True, "bootstrap_iters": 0, "limit": limit}
    return lm_eval.simple_evaluate(model, tasks=names, task_manager=tasks, **options)


def right_answer(prompt, target, tokens):
    doc = {"prompt": prompt, "target": target, "answer_tokens": tokens}
    return Instance("loglikelihood", doc, (prompt, target), 1)


@pytest.fixture(scope="module")
def llama():
    """The bundled model beyond its trained length, where it answers some of the prompts."""
    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA)


# --- the scores of the engine


@pytest.mark.parametrize("batch_size", [1, 4])
def test_first_choice_and_log_probabilities_are_those_of_the_engine(llama, tokenizer, batch_size):
    depths, names = (
        [0.0, 0.5, 0.9, 1.0],
        {"passkey_512": ("passkey", "single"), "niah_multikey_512": ("niah", "multikey")},
    )
    model = RopePatchLM(pretrained=llama, tokenizer=tokenizer, device="cpu", max_length=512, batch_size=batch_size)
    asked = {"samples": 3, "seed": 4, "depths": depths}
    plain = evaluated(model, list(names), **asked)
    read = evaluated(model, list(names), first_choice=True, **asked)
    shares = []
    for name, (task, mode) in names.items():
        engine = retrieval(llama, tokenizer, task, lengths=[512], depths=depths, samples=3, seed=4, mode=mode)
        scores = read["results"][name]
        assert scores["first_choice,none"] == pytest.approx(engine.first_choice(512))
        cells = [(cell.samples[i].logprob, cell.samples[i].first_choice) for i in range(3) for cell in engine.cells]
        answers = [sample["filtered_resps"][1] for sample in read["samples"][name]]
        for (score, greedy), (logprob, first_choice) in zip(answers, cells, strict=True):
            assert (score, greedy) == (pytest.approx(logprob, abs=1e-4), first_choice)
        assert scores["exact_match,none"] == plain["results"][name]["exact_match,none"]
        said = [[sample["filtered_resps"][0] for sample in found["samples"][name]] for found in (plain, read)]
        assert said[0] == said[1]
        assert "first_choice,none" not in plain["results"][name]
        shares.append(scores["first_choice,none"])
    assert any(0 < share < 1 for share in shares), "a score that could be seen to differ"


def test_of_several_values_all_have_to_be_first_choice(llama, tokenizer):
    model = RopePatchLM(pretrained=llama, tokenizer=tokenizer, device="cpu", max_length=512)
    asked = {"samples": 6, "seed": 0, "depths": [0.2, 0.9]}
    found = evaluated(model, ["niah_multivalue_512"], first_choice=True, **asked)
    engine = retrieval(llama, tokenizer, "multivalue", lengths=[512], **asked)
    whole = [all(sample.first_choice for sample in haystack) for haystack in engine.haystacks(512)]
    assert found["results"]["niah_multivalue_512"]["first_choice,none"] == pytest.approx(sum(whole) / 6)
    joined = [sum(sample.logprob for sample in haystack) for haystack in engine.haystacks(512)]
    read = [sample["filtered_resps"][1][0] for sample in found["samples"]["niah_multivalue_512"]]
    assert read == pytest.approx(joined, abs=1e-4)


@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"], ids=["without BOS", "with BOS"])
def test_in_a_chat_the_ids_are_those_that_generation_reads(llama, tokenizer, bos, tmp_path):
    chatty = AutoTokenizer.from_pretrained(LLAMA)
    chatty.chat_template = bos + CHAT
    chatty.save_pretrained(tmp_path)
    model = RopePatchLM(pretrained=llama, tokenizer=chatty, device="cpu", max_length=512)
    asked = {"tokenizer": str(tmp_path), "samples": 2, "depths": [0.3]}
    with spy_ids(llama) as ids:
        found = evaluated(model, ["passkey_512"], chat=True, first_choice=True, **asked)
    prompts = [part[0] for part in ids if part.shape[1] == 507]
    answers = [part[0] for part in ids if part.shape[1] == 511]
    assert len(prompts) == len(answers) == 2
    assert {tuple(row[:507].tolist()) for row in answers} == {tuple(row.tolist()) for row in prompts}
    assert all(row[0] == chatty.bos_token_id != row[1] for row in answers)
    if bos:
        engine = retrieval(llama, chatty, lengths=[512], depths=[0.3], samples=2, chat_template="on")
        read = [sample["filtered_resps"][1][0] for sample in found["samples"]["passkey_512"]]
        assert read == pytest.approx([sample.logprob for sample in engine.samples(512)], abs=1e-4)


# --- the cut


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_cut_where_its_prompt_ends(kind):
    """Where the space is a token of its own, lm-eval's own model scores it with the answer."""
    coder = tokenizer_of(kind)
    coder.pad_token = coder.eos_token
    model = bold().eval()
    options = {"pretrained": model, "tokenizer": coder, "device": "cpu", "max_length": 200}
    ours, stock = RopePatchLM(**options), HFLM(**options)
    for prompt in PromptMaker(coder, "noise", prefix=()).prompts("passkey", 200, [0.1, 0.8], seed=2):
        loss = naive(model, torch.tensor([prompt.ids]))[0]
        request = right_answer(prompt.text, prompt.target, prompt.answer)
        ((score, _),) = ours.loglikelihood([request], disable_tqdm=True)
        assert score == pytest.approx(-float(loss[-prompt.answer :].sum()), abs=1e-4)
        context, continuation = stock._encode_pair(prompt.text, prompt.target)
        own_token = prompt.text.endswith(" ")
        assert len(continuation) == prompt.answer + own_token
        assert [*context, *continuation] == list(prompt.ids)
        ((theirs, _),) = stock.loglikelihood([request], disable_tqdm=True)
        assert theirs == pytest.approx(-float(loss[-prompt.answer - own_token :].sum()), abs=1e-4)
        assert (abs(score - theirs) > 0.1) is own_token
    assert own_token is (kind != "byte-level")


def test_other_requests_are_those_of_hf_beside_an_answer():
    coder = tokenizer_of("byte-level, single digits")
    coder.pad_token = coder.eos_token
    model = bold().eval()
    ours, stock = (cls(pretrained=model, tokenizer=coder, device="cpu") for cls in (RopePatchLM, HFLM))
    pairs = [("The pass key is ", "12345"), ("The pass key is", " 12345"), ("", "12345"), ("A  ", " b")]
    others = [Instance("loglikelihood", doc, pair, 0) for doc in ({}, None) for pair in pairs]
    others.append(Instance("loglikelihood", {"answer_tokens": 1, "target": "2"}, ("The magic number is ", "12"), 0))
    expected = stock.loglikelihood(others, disable_tqdm=True)
    answer = right_answer("The pass key is 1", "2345", 4)
    found = ours.loglikelihood([answer, *others], disable_tqdm=True)[1:]
    for (score, greedy), (wanted, best) in zip(found, expected, strict=True):
        assert (score, greedy) == (pytest.approx(wanted, abs=1e-4), best)


@pytest.mark.parametrize("tokens", [4, 6])
def test_tokens_that_are_not_the_prompts_are_an_error(llama, tokenizer, tokens):
    """Documents that were made for another tokenizer."""
    model = RopePatchLM(pretrained=llama, tokenizer=tokenizer, device="cpu")
    prompt = PromptMaker(tokenizer, "noise").prompts("passkey", 100, [0.5])[0]
    with pytest.raises(ValueError, match=rf"has {tokens} tokens behind its prompt of 95, .* gives 100 for both: make"):
        model.loglikelihood([right_answer(prompt.text, prompt.target, tokens)], disable_tqdm=True)
    assert model.loglikelihood([right_answer(prompt.text, prompt.target, 5)], disable_tqdm=True)


def test_every_answer_of_every_task_can_be_cut(tokenizer):
    model = RopePatchLM(pretrained=bold().eval(), tokenizer=tokenizer, device="cpu", max_length=1024)
    options = {"length": 1024, "samples": 1, "depths": [0.5], "seed": 0, "haystack": "builtin", "pretrained": LLAMA}
    asked = []
    for task in ("passkey", "niah", "multivalue", "vt", "json_kv", "passage_retrieval", "qa2", "cwe", "fwe"):
        docs = retrieval_documents(task, **options)["test"]
        asked += [Instance("loglikelihood", doc, (doc["prompt"], doc["target"]), 1) for doc in docs]
    with spy_ids(model.model) as ids:
        model.loglikelihood(asked, disable_tqdm=True)
    assert [row.shape[1] for row in ids] == [1023] * len(asked)


# --- the option


def test_it_is_off_by_default_and_takes_only_true_or_false():
    task = manager(samples=1).load(["passkey_512"])["tasks"]["passkey_512"]
    assert task.first_choice is False and set(task.aggregation()) == {"exact_match"}
    with pytest.raises(
        ValueError, match="first_choice must be true or false, got 1: give --metadata first_choice=true"
    ):
        manager(samples=1, first_choice=1).load(["passkey_512"])
    with pytest.raises(ValueError, match=r"unknown --metadata first_choise=\. Did you mean 'first_choice'\?"):
        manager(samples=1, first_choise=True).load(["passkey_512"])


def test_the_request_cache_knows_whether_right_answers_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))

    def kinds(**metadata):
        task = manager(samples=2, depths=[0.5], **metadata).load(["passkey_512"])["tasks"]["passkey_512"]
        task.set_config("num_fewshot", 0)
        built = []
        with monkeypatch.context() as patch:
            patch.setattr(OfflineTask, "fewshot_context", lambda self, doc, **_: built.append(1) or doc["prompt"])
            task.build_all_requests(limit=1, cache_requests=True)
        return [request.request_type for request in task.instances], len(built)

    assert kinds() == (["generate_until"], 2)
    assert kinds(first_choice=True) == (["generate_until", "loglikelihood"], 2)
    assert kinds(first_choice=True) == (["generate_until", "loglikelihood"], 0), "kept"
    assert kinds() == (["generate_until"], 0)


def test_the_command_line_takes_it_with_what_else_keeps_something(shell, capsys, tmp_path):
    start = ["rope-patch-eval", "--tasks", "passkey_512,rope_ppl_256", "--device", "cpu", "--limit", "2"]
    start += ["--model_args", f"pretrained={LLAMA},method=yarn:factor=4,target_length=1024,dtype=float32"]
    start += ["--metadata", "samples=2", "windows=2", "first_choice=true", "--cache_requests", "true"]
    tables = []
    for _ in range(2):
        shell([*start, "--output_path", str(tmp_path / "out"), "--log_samples"])
        printed = capsys.readouterr()
        assert "|first_choice" in printed.out.replace(" ", "") and "loglikelihood: reads" in printed.err
        tables.append(printed.out)
    assert tables[0] == tables[1]
    path = min((tmp_path / "out").rglob("samples_passkey_512_*.jsonl"))
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["doc_id"] for sample in samples] == [0, 1]
    for sample in samples:
        assert sample["metrics"] == ["exact_match", "first_choice"]
        assert str(bool(sample["first_choice"])) == sample["filtered_resps"][1][1]
        first, second = sample["arguments"].values()
        assert first["arg_0"] == second["arg_0"] and second["arg_1"] == sample["target"]
    shell([*start, "--predict_only", "--output_path", str(tmp_path / "predicted")])
    assert "first_choice" not in capsys.readouterr().out, "--predict_only scores nothing"


def test_lm_evals_own_model_runs_it_and_scores_the_space_too(llama, tokenizer):
    """The bundled tokenizer writes the space before a digit as a token of its own."""
    found = {}
    for kind in (RopePatchLM, HFLM):
        model = kind(pretrained=llama, tokenizer=tokenizer, device="cpu", max_length=512)
        found[kind] = evaluated(model, ["passkey_512"], first_choice=True, samples=2, depths=[0.9])
    ours, theirs = ([s["filtered_resps"][1][0] for s in f["samples"]["passkey_512"]] for f in found.values())
    assert all(a > b for a, b in zip(ours, theirs, strict=True))
    assert "first_choice,none" in found[HFLM]["results"]["passkey_512"]
