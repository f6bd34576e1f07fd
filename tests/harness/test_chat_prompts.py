"""lm-eval's --apply_chat_template: prompts of our tasks keep their exact length, and are those of our engine."""

import pytest
from lm_eval.models.huggingface import HFLM
from support.task_index import our_tasks
from support.tiny import LLAMA, small
from transformers import AutoTokenizer

from rope_patch.evaluation.retrieval.chat_template import chat_frame
from rope_patch.evaluation.retrieval.prompts import PromptMaker

TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=["", "{{ bos_token }}"], ids=["without BOS", "with BOS"])
def folder(request, tmp_path_factory):
    """The folder of a tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("chatty")
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    tokenizer.chat_template = request.param + TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def task_of(folder, name):
    task = our_tasks(pretrained=str(folder), samples=2, depths=[0.0, 0.5]).load([name])["tasks"][name]
    task.set_config("num_fewshot", 0)
    return task


@pytest.mark.parametrize(("name", "kind"), [("rope_passkey", "passkey"), ("rope_niah_multivalue", "niah_multivalue")])
def test_prompts_of_a_chat_have_the_named_length_with_the_template(folder, name, kind):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = HFLM(pretrained=small(), tokenizer=tokenizer, device="cpu")
    task = task_of(folder, name)
    task.build_all_requests(
        apply_chat_template=True, chat_template=model.apply_chat_template, tokenizer_name="chatty", limit=3
    )
    maker = PromptMaker(tokenizer, "noise", frame=chat_frame(tokenizer))
    for request in task.instances:
        text, options = request.args
        assert "[assistant]\n" in text and text.endswith((" is ", " are "))
        ids, _ = model.tok_batch_encode([text])
        assert ids.shape[1] + options["max_gen_toks"] == 512
    if tokenizer.chat_template.startswith("{{ bos_token"):  # else lm-eval adds one of its own, as for any text
        expected = [p.text for p in maker.prompts(kind, 512, [0.0, 0.5])]
        assert [request.args[0] for request in task.instances][: len(expected)] == expected


def test_a_system_prompt_is_refused(folder):
    model = HFLM(pretrained=small(), tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")
    with pytest.raises(ValueError, match="--system_instruction"):
        task_of(folder, "rope_passkey").build_all_requests(
            apply_chat_template=True, chat_template=model.apply_chat_template, system_instruction="Answer."
        )
