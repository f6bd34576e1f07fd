"""Reading the right answers of our tasks in lm-eval: the cut is the engine's, and so are the scores."""

from __future__ import annotations

import lm_eval
import pytest
import torch
from harness.instances import answers_of, instance
from lm_eval.models.huggingface import HFLM
from support.number_tokenizers import KINDS, tokenizer_of
from support.prompting import TOKENIZER, bold
from support.scored import naive, spy_ids
from support.task_index import our_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.harness.model import RopePatchLM
from rope_patch.harness.tasks import retrieval_documents

LLAMA = str(rope_patch.data_path("assets") / "llama")
CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']\\n' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)


def evaluated(model, names, *, chat=False, predict_only=False, **metadata):
    options = {"apply_chat_template": chat, "predict_only": predict_only, "log_samples": True, "bootstrap_iters": 0}
    return lm_eval.simple_evaluate(model, tasks=names, task_manager=our_tasks(**metadata), **options)


def right_answer(prompt, target, tokens):
    doc = {"prompt": prompt, "target": target, "answer_tokens": tokens}
    return instance("loglikelihood", doc, (prompt, target), 1)


@pytest.fixture(scope="module")
def llama():
    """The bundled model beyond its trained length, where it answers some of the prompts."""
    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()


def lm(model, *, max_length=512, **options):
    return RopePatchLM(pretrained=model, tokenizer=TOKENIZER, device="cpu", max_length=max_length, **options)


# --- the scores of the engine


def test_first_choice_and_log_probabilities_are_those_of_the_engine(llama):
    names = {"rope_passkey": "passkey", "rope_niah": "niah"}
    model = lm(llama, batch_size=4)
    options = {"samples": 3, "seed": 4, "depths": [0.0, 0.5, 0.9, 1.0]}
    plain = evaluated(model, list(names), **options)
    read = evaluated(model, list(names), first_choice=True, **options)
    shares = []
    for name, task in names.items():
        engine = retrieval(llama, TOKENIZER, task, lengths=[512], **options)
        scores = read["results"][name]
        assert scores["first_choice_512,none"] == pytest.approx(engine.first_choice(512))
        expected = [(cell.samples[i].logprob, cell.samples[i].first_choice) for i in range(3) for cell in engine.cells]
        scored = [answers_of(sample)[1] for sample in read["samples"][name]]
        for (score, greedy), (logprob, first_choice) in zip(scored, expected, strict=True):
            assert (score, greedy) == (pytest.approx(logprob, abs=1e-4), first_choice)
        assert scores["512,none"] == plain["results"][name]["512,none"]
        assert "first_choice_512,none" not in plain["results"][name]
        shares.append(scores["first_choice_512,none"])
    assert any(0 < share < 1 for share in shares), "a score that could be seen to differ"


def test_of_several_values_all_have_to_be_first_choice(llama):
    model = lm(llama)
    options = {"samples": 6, "seed": 0, "depths": [0.2, 0.9]}
    result = evaluated(model, ["rope_niah_multivalue"], first_choice=True, **options)
    engine = retrieval(llama, TOKENIZER, "multivalue", lengths=[512], **options)
    whole = [all(sample.first_choice for sample in haystack) for haystack in engine.haystacks(512)]
    assert result["results"]["rope_niah_multivalue"]["first_choice_512,none"] == pytest.approx(sum(whole) / 6)
    joined = [sum(sample.logprob for sample in haystack) for haystack in engine.haystacks(512)]
    read = [answers_of(sample)[1][0] for sample in result["samples"]["rope_niah_multivalue"]]
    assert read == pytest.approx(joined, abs=1e-4)


def test_in_a_chat_the_answer_stands_behind_the_ids_that_generation_reads(llama, tmp_path):
    chatty = AutoTokenizer.from_pretrained(LLAMA)
    chatty.chat_template = CHAT
    chatty.save_pretrained(tmp_path)
    model = RopePatchLM(pretrained=llama, tokenizer=chatty, device="cpu", max_length=512)
    options = {"tokenizer": str(tmp_path), "samples": 2, "depths": [0.3]}
    with spy_ids(llama) as ids:
        result = evaluated(model, ["rope_passkey"], chat=True, first_choice=True, **options)
    prompts = {tuple(part[0].tolist()) for part in ids if part.shape[1] == 507}
    answers = [part[0].tolist() for part in ids if part.shape[1] == 511]
    assert {tuple(row[:507]) for row in answers} == prompts
    assert len(answers) == len(prompts) == 2
    engine = retrieval(llama, chatty, lengths=[512], depths=[0.3], samples=2, chat_template="on")
    read = [answers_of(sample)[1][0] for sample in result["samples"]["rope_passkey"]]
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
        own_token = prompt.text.endswith(" ")
        ((theirs, _),) = stock.loglikelihood([request], disable_tqdm=True)
        assert theirs == pytest.approx(-float(loss[-prompt.answer - own_token :].sum()), abs=1e-4)
        assert (abs(score - theirs) > 0.1) is own_token
    assert own_token is (kind != "byte-level")


def test_other_requests_are_those_of_hf_beside_an_answer():
    coder = tokenizer_of("byte-level, single digits")
    coder.pad_token = coder.eos_token
    model = bold().eval()
    ours, stock = (cls(pretrained=model, tokenizer=coder, device="cpu") for cls in (RopePatchLM, HFLM))
    others = [instance("loglikelihood", {}, pair) for pair in [("The key is ", "12345"), ("", "12345"), ("A ", "b")]]
    others.append(instance("loglikelihood", {"answer_tokens": 1, "target": "2"}, ("The magic number is ", "12")))
    expected = stock.loglikelihood(others, disable_tqdm=True)
    answer = right_answer("The pass key is 1", "2345", 4)
    scores = ours.loglikelihood([answer, *others], disable_tqdm=True)[1:]
    for (score, greedy), (wanted, best) in zip(scores, expected, strict=True):
        assert (score, greedy) == (pytest.approx(wanted, abs=1e-4), best)


def test_documents_of_another_tokenizer_are_an_error(llama):
    model = lm(llama)
    prompt = PromptMaker(TOKENIZER, "noise").prompts("passkey", 100, [0.5])[0]
    with pytest.raises(ValueError, match="tokenizer"):
        model.loglikelihood([right_answer(prompt.text, prompt.target, prompt.answer + 1)], disable_tqdm=True)


def test_the_answer_of_every_kind_of_task_can_be_cut():
    model = lm(bold().eval(), max_length=1024)
    options = {"length": 1024, "samples": 1, "depths": [0.5], "seed": 0, "haystack": "builtin", "pretrained": LLAMA}
    docs = [doc for task in ("passkey", "multivalue", "json_kv", "qa2") for doc in retrieval_documents(task, **options)]
    requests = [instance("loglikelihood", doc, (doc["prompt"], doc["target"]), 1) for doc in docs]
    with spy_ids(model.model) as ids:
        model.loglikelihood(requests, disable_tqdm=True)
    assert [row.shape[1] for row in ids] == [1023] * len(docs)


# --- the option


def test_it_is_off_by_default_and_takes_only_true_or_false():
    task = our_tasks(samples=1).load(["rope_passkey"])["tasks"]["rope_passkey"]
    assert not any("first_choice" in metric for metric in task.aggregation())
    with pytest.raises(ValueError, match="first_choice=true"):
        our_tasks(samples=1, first_choice=1).load(["rope_passkey"])


def test_nothing_is_scored_where_answers_are_only_predicted(llama):
    model = lm(llama)
    result = evaluated(model, ["rope_passkey"], predict_only=True, first_choice=True, samples=1, depths=[0.5])
    assert not any("first_choice" in metric for metric in result["results"]["rope_passkey"])
    assert len(result["samples"]["rope_passkey"][0]["filtered_resps"]) == 2
