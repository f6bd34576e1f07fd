"""Defects of the folders `evaluation` and `training`: see `mutations.py`."""

from __future__ import annotations

from mutation_lists.mutation import Mutation

EVALUATION = (
    Mutation(
        "interval_over_haystacks_has_a_degree_of_freedom_too_many",
        "rope_patch/evaluation/intervals.py",
        "(z / float(stats.t.ppf((1 + confidence) / 2, total - 1))) ** 2",
        "(z / float(stats.t.ppf((1 + confidence) / 2, total))) ** 2",
    ),
    Mutation(
        "answer_with_an_early_mistake_counts_as_right",
        "rope_patch/evaluation/retrieval/generate_answers.py",
        "!= expected).long()[missed].argmax(1).min())",
        "!= expected).long()[missed].argmax(1).max())",
    ),
    Mutation(
        "interval_of_retrieval_takes_prompts_for_independent",
        "rope_patch/evaluation/retrieval/measure.py",
        "len(self.samples(length)), confidence, count=count)",
        "len(self.samples(length)), confidence)",
    ),
    Mutation(
        "characters_beyond_the_basic_plane_have_three_bytes",
        "rope_patch/texts/documents.py",
        "+ (points > 0x7FF) + (points > 0xFFFF)",
        "+ (points > 0x7FF)",
    ),
    Mutation(
        "answers_are_given_to_the_wrong_depths",
        "rope_patch/evaluation/retrieval/prompts.py",
        "return [by_depth[depth] for depth in depths]",
        "return prompts",
    ),
)


TRAINING = (
    Mutation(
        "perplexity_outweighs_a_prompt",
        "rope_patch/training/evaluate_run.py",
        "- nll / (100 * prompts)",
        "- nll / prompts",
    ),
    Mutation(
        "scorer_of_the_task_may_be_edited",
        "rope_patch/training/runs.py",
        "key(code=[_code_of(type(one)) for one in objects])",
        "key(code=len(objects))",
    ),
    Mutation(
        "seed_of_positions_is_ignored",
        "rope_patch/training/position_collator.py",
        'random.Random(f"{self.seed}/{digest}")',
        "random.Random(digest)",
    ),
    Mutation(
        "a_finished_run_is_resumed_and_trains_one_more_step",
        "rope_patch/training/runs.py",
        "if below < 1 or step < below:",
        "if True:",
    ),
    Mutation(
        "documents_of_the_evaluation_are_trained_on",
        "rope_patch/training/documents.py",
        "shuffled.select(range(len(held_out), len(shuffled))), held_out",
        "shuffled, held_out",
    ),
    Mutation(
        "wrong_loss_of_trl_is_trained_on",
        "rope_patch/training/checks.py",
        "if not abs(of_trl - own) <= 1e-2 * abs(own):",
        "if False:",
    ),
)
