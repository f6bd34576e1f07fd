"""lm-eval in two processes: each answers half of the requests, once, and the scores are those of one."""

import json

import lm_eval
import pytest
from support.forks import together
from support.scored import spy_ids
from support.task_index import our_tasks

import rope_patch
from rope_patch.harness.model import RopePatchLM

pytestmark = pytest.mark.slow

LLAMA = str(rope_patch.data_path("assets") / "llama")
TASKS = ["rope_passkey", "rope_ppl"]


def apart(value):
    """What JSON holds of a value without its numbers, and these: rows side by side differ in the eighth digit."""
    numbers = []
    return json.loads(json.dumps(value), parse_float=lambda text: numbers.append(float(text))), numbers


def scores():
    """Scores of all tasks, each answer, and the tokens that this process has read."""
    model = RopePatchLM(LLAMA, method="yarn:factor=4", target_length=1024, dtype="float32", device="cpu", batch_size=2)
    manager = our_tasks(samples=1, windows=3, depths=[0.1, 0.5, 0.9])
    with spy_ids(model.model) as read:
        found = lm_eval.simple_evaluate(model, tasks=TASKS, task_manager=manager, log_samples=True, bootstrap_iters=0)
    answers = {}
    if found is not None:
        answers = {
            task: sorted((s["doc_id"], s["filtered_resps"], s["resps"]) for s in samples)
            for task, samples in found["samples"].items()
        }
    results = None if found is None else found["results"]
    return [results, answers, sum(ids.numel() for ids in read)]


def test_two_processes_score_what_one_scores(tmp_path):
    alone = scores()  # first: both processes inherit the text that is encoded by then
    together(lambda rank: (tmp_path / f"{rank}.json").write_text(json.dumps(scores())), tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    (texts, numbers) = apart(first[:2])
    (expected, wanted) = apart(alone[:2])
    # Batches of other shapes round logits of about 10 differently in float32, by some 1e-6: small losses, too.
    assert (
        texts == expected
        and numbers == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        and len(alone[1]["rope_passkey"]) == 3
    )
    assert second[0] is None, "the first process alone has the results of all"
    assert 0.2 * alone[2] < second[2] < 0.8 * alone[2] and first[2] < 0.8 * alone[2]
