"""What ``doctor`` says of each published case, and of its healthy twin."""

import warnings

import pytest
from support.broken import CASES

from rope_patch import doctor
from rope_patch.engines.programs import PROGRAMS

SAID = {
    "table_of_a_fork_is_not_filled": ("table in use", "never filled"),
    "table_is_what_the_memory_held": ("table in use", "never filled"),
    "table_is_nan_in_the_second_process": ("table in use", "never filled"),
    "table_is_zero": ("table in use", "never filled"),
    "table_is_cast_with_the_weights": ("table in use", "rounded to bfloat16"),
    "table_was_cast_and_cast_back": ("table in use", "rounded to bfloat16"),
    "scaling_is_written_after_loading": ("table in use", "(yarn) is not applied"),
    "older_name_loses_the_base": ("config", "rope_scaling is the older name"),
    "older_name_sets_nothing": ("config keys", "sets nothing"),
    "class_ignores_the_base": ("config", "leaves a part of it out"),
    "class_ignores_the_scaling": ("config", "leaves a part of it out"),
    "attention_factor_is_lost": ("table in use", "are multiplied by 1 and not by 1.13863"),
    "tables_of_the_layer_types_are_exchanged": ("[full_attention]", "table of the sliding_attention"),
    "linear_factor_of_full_attention_is_dropped": ("[full_attention]", "(linear) is not applied"),
    "rotated_pairs_are_paired_within_their_prefix": ("rotary module", "other pairs"),
    "dynamic_table_keeps_the_longest_text": ("dynamic table", "the same text gives other logits"),
    "tokenizer_cuts_at_the_old_context": ("tokenizer", "truncation=True"),
    "saved_tokenizer_cuts_at_the_old_context": ("tokenizer", "truncation=True"),
    "converter_drops_the_scaling": ("config", "changed after the patch"),
    "base_is_stated_twice": ("config.json", "other programs may take the other value"),
    "folder_of_transformers_5": ("transformers 4", "base of its own"),
    "stated_attention_factor_is_ignored": ("SGLang", "another attention factor"),
    "scaling_of_sliding_layers_is_dropped": ("transformers 4", "plain RoPE"),
    "yarn_is_ignored": ("MLX", "computes plain RoPE"),
}
"""Parts of the name of the check that differs and of what it says, for each case."""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.program in (None, *PROGRAMS)])
def test_doctor_names_the_fault_and_finds_the_healthy_twin_well(name, tmp_path):
    case = CASES[name]
    programs = () if case.program is None else (case.program,)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`rope_scaling` is deprecated", FutureWarning)
        pair = case.build(tmp_path)
    broken, healthy = (
        doctor(*(one if isinstance(one, tuple) else (one,)), for_programs=programs)
        for one in (pair.broken, pair.healthy)
    )
    assert healthy.ok, healthy
    assert broken.status == 1
    parts = SAID[name]
    said = [(check.name, check.found + check.meaning) for check in broken.found("differs")]
    assert any(all(part in text for part, text in zip(parts, texts, strict=True)) for texts in said), broken
