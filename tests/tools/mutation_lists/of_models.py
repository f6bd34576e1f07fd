"""Defects of the folders `methods`, `patching`, `checkpoints`, `kv_cache`: see `mutations.py`."""

from __future__ import annotations

from mutation_lists.mutation import Mutation

METHODS = (
    Mutation(
        "chain_ignores_the_factors_of_its_other_steps",
        "rope_patch/methods/parse.py",
        "scaling[0].context_of(table) * others, target_length",
        "scaling[0].context_of(table), target_length",
    ),
    Mutation(
        "method_of_another_scaling_alone_counts_as_the_identity",
        "rope_patch/methods/method.py",
        "table.inv_freq) and new.attention_scaling == table.attention_scaling:",
        "table.inv_freq):",
    ),
    Mutation(
        "whole_factor_counts_from_the_stated_context",
        "rope_patch/methods/scaling.py",
        "self.with_factor(self.stretch * context_reached(table) / original, table)",
        "self.with_factor(self.stretch, table)",
    ),
    Mutation(
        "yarn_of_a_card_counts_from_the_stated_context",
        "rope_patch/methods/already_scaled.py",
        "return max(stated, reached)",
        "return stated",
    ),
    Mutation(
        "softmax_scale_stays_where_a_raised_yarn_moves_it",
        "rope_patch/patching/install.py",
        "        for owner, name, _, value in following:\n            setattr(owner, name, value)\n",
        "",
    ),
    Mutation(
        "attention_factor_of_a_raised_yarn_stays",
        "rope_patch/methods/yarn.py",
        "if attention is not None and math.isclose(",
        "if False and math.isclose(",
    ),
    Mutation(
        "stopped_pairs_turn_again",
        "rope_patch/methods/scaling.py",
        "return stopped_as(table, whole.computed(plain))",
        "return whole.computed(plain)",
    ),
    Mutation(
        "giraffe_keeps_the_pair_at_the_low_cutoff",
        "rope_patch/methods/truncated.py",
        "inv_freq > self.cutoff_low,",
        "inv_freq >= self.cutoff_low,",
    ),
    Mutation(
        "nope_drops_the_scaling_of_the_checkpoint",
        "rope_patch/methods/nope.py",
        "return table.attention_scaling * grown",
        "return grown",
    ),
    Mutation(
        "longrope_drops_the_scaling_of_the_checkpoint",
        "rope_patch/methods/longrope.py",
        "return math.sqrt(grown) * table.attention_scaling",
        "return math.sqrt(grown)",
    ),
    Mutation(
        "error_says_the_context_in_place_of_what_the_factor_reaches",
        "rope_patch/methods/scaling.py",
        "reaches {round(self.factor * context)} tokens",
        "reaches {round(context)} tokens",
    ),
)

PATCHING = (
    Mutation(
        "table_of_a_tracer_is_kept",
        "rope_patch/patching/rotary.py",
        "if type(cached) is Tensor:  #",
        "if isinstance(cached, Tensor):  #",
    ),
    Mutation(
        "config_shares_its_settings_with_the_record",
        "rope_patch/patching/config_settings.py",
        "setattr(config, key, copy.deepcopy(value))",
        "setattr(config, key, value)",
    ),
    Mutation(
        "verify_allows_a_hundred_times_the_error",
        "rope_patch/patching/verify.py",
        "(2e-6 + 2e-7 * angles)",
        "(2e-6 + 2e-5 * angles)",
    ),
    Mutation(
        "one_config_answers_for_all_of_its_class",
        "rope_patch/patching/locate.py",
        "key = (type(self.model), whole.to_json_string(use_diff=False), str(settings))",
        "key = type(self.model)",
    ),
    Mutation(
        "experts_that_fail_without_numbers_end_the_probe",
        "rope_patch/patching/probe.py",
        "            return next(iter(tensors), None)\n",
        "            raise\n",
    ),
    Mutation(
        "dynamic_table_shrinks_below_its_context",
        "rope_patch/patching/locate.py",
        'encoding["factor"] * max(length, table.max_position_embeddings) /',
        'encoding["factor"] * length /',
    ),
    Mutation(
        "stated_context_and_the_one_that_is_reached_are_exchanged",
        "rope_patch/patching/encode.py",
        "reaches {furthest} tokens, the checkpoint still states a context of {stated}",
        "reaches {stated} tokens, the checkpoint still states a context of {furthest}",
    ),
)

CHECKPOINTS = (
    Mutation(
        "record_without_a_hash_counts_for_any_adapter",
        "rope_patch/checkpoints/adapters.py",
        "if weights is not None and tied != file_hash(weights):",
        "if weights is not None and tied not in (None, file_hash(weights)):",
    ),
    Mutation(
        "table_that_the_loader_built_is_not_verified",
        "rope_patch/checkpoints/save_load.py",
        "        verify_model(model)\n        reapply(",
        "        reapply(",
    ),
    Mutation(
        "offsets_of_tensors_are_not_aligned",
        "rope_patch/runtime/gguf_file.py",
        "offset += piece.size + -piece.size % alignment",
        "offset += piece.size",
    ),
    Mutation(
        "tokenizer_beside_the_weights_is_replaced",
        "rope_patch/checkpoints/tokenizer_files.py",
        "if not source or any((beside / name).is_file() for name in TOKENIZER_FILES):",
        "if not source:",
    ),
    Mutation(
        "file_that_states_a_longer_context_is_verified",
        "rope_patch/gguf/patch.py",
        "if table.max_position_embeddings != record.stated_length:",
        "if table.max_position_embeddings < record.stated_length:",
    ),
    Mutation(
        "adapters_beyond_the_first_get_no_record",
        "rope_patch/checkpoints/adapters.py",
        'for name in ("", *getattr(saved_module(model), "peft_config", ())):',
        'for name in ("",):',
    ),
    Mutation(
        "report_of_an_export_is_copied",
        "rope_patch/checkpoints/folder_patch.py",
        '_NOT_COPIED = ("config.json", RECORD_FILE, "export.json")',
        '_NOT_COPIED = ("config.json", RECORD_FILE)',
    ),
)

KV_CACHE = (
    Mutation(
        "attention_scaling_is_applied_twice",
        "rope_patch/kv_cache/plans.py",
        "            cos = cos / size\n            sin = -sin / size\n",
        "            sin = -sin\n",
    ),
    Mutation(
        "copy_of_a_cache_shares_its_blocks",
        "rope_patch/kv_cache/layer.py",
        "        copied.frozen = dict(self.frozen)\n",
        "",
    ),
    Mutation(
        "fp8_overflows",
        "rope_patch/kv_cache/formats.py",
        "return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)",
        "return x.to(torch.float8_e4m3fn)",
        "torch 2.13 saturates in this cast; test_fp8_with_a_scale_of_one_is_a_cast_that_saturates holds that",
    ),
    Mutation(
        "cache_that_is_reset_keeps_its_blocks",
        "rope_patch/kv_cache/layer.py",
        "        self.frozen.clear()\n",
        "",
    ),
    Mutation(
        "sliding_window_is_a_token_too_long",
        "rope_patch/kv_cache/attention.py",
        "hidden = (distance < 0) | (distance >= window)",
        "hidden = (distance < 0) | (distance > window)",
    ),
    Mutation(
        "doctor_ends_well_where_a_check_could_not_be_made",
        "rope_patch/diagnosis/check.py",
        "return 3 if self.found(UNKNOWN) else 0",
        "return 0",
    ),
    Mutation(
        "a_wrong_table_of_a_patched_model_is_in_order",
        "rope_patch/diagnosis/in_memory.py",
        "    if measured.problem is None:\n        yield Check(\n",
        "    if measured.problem is None or subject.location.record is not None:\n        yield Check(\n",
    ),
    Mutation(
        "prompts_that_full_precision_fails_too_count_as_lost",
        "rope_patch/kv_evaluation/results.py",
        "in zip(before, after, strict=True) if was.correct]",
        "in zip(before, after, strict=True)]",
    ),
    Mutation(
        "answers_of_another_cache_format_are_taken",
        "rope_patch/harness/model.py",
        ', "scheme": scheme_identity(self.scheme)}',
        "}",
    ),
)
