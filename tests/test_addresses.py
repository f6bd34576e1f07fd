"""Where the tests of each module stand: in the file of its name, or where this map says.

`tests/tools/mutations.py` runs the file that it names first.
"""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "rope_patch"

HOLDS = {
    "analysis/test_analyze.py": "analysis/p_sweep analysis/result texts/domains",
    "analysis/test_heads.py": "analysis/attention_mass analysis/single_heads",
    "checkpoints/test_adapters.py": "checkpoints/model_without_weights checkpoints/callback",
    "checkpoints/test_checkpoints.py": "checkpoints/folder_patch checkpoints/save_load checkpoints/tokenizer_files",
    "checkpoints/test_from_gguf.py": "checkpoints/load_gguf",
    "checkpoints/test_image_text.py": "checkpoints/source_files",
    "checkpoints/test_older_loaders.py": "patching/older_keys",
    "checkpoints/test_public_functions.py": "checkpoints/inspect_verify",
    "cli/test_cli.py": "cli/app cli/doctor cli/apply runtime/command",
    "cli/test_command_lines.py": "cli/analyze cli/export cli/extend cli/finetune cli/plan cli/recipes cli/restore "
    "cli/tasks options/*",
    "cli/test_kv_check_command.py": "cli/kv_check",
    "cli/test_options.py": "cli/loading",
    "cli/test_parsing.py": "cli/compare cli/methods __main__",
    "cli/test_printed_answers.py": "cli/printing runtime/captions",
    "diagnosis/test_doctor.py": "diagnosis/*",
    "engines/test_asking.py": "engines/ask/__main__ engines/ask/transformers_layers engines/verdicts",
    "engines/test_compare_programs.py": "engines/forms engines/known_answers engines/programs engines/readings "
    "engines/stated_config",
    "engines/test_engine_rows.py": "engines/ask/*",
    "engines/test_export.py": "engines/write_export engines/folders engines/encodings",
    "engines/test_flags.py": "engines/program_contexts",
    "engines/test_statements.py": "cli/settings",
    "evaluation/test_answers.py": "evaluation/retrieval/chat_template",
    "evaluation/test_compare.py": "evaluation/metrics modeling/environment",
    "evaluation/test_perplexity.py": "evaluation/perplexity/* modeling/read_at_once",
    "evaluation/test_prompts.py": "evaluation/retrieval/haystack",
    "evaluation/test_retrieval.py": "evaluation/retrieval/*",
    "evaluation/test_spec_and_suite.py": "evaluation/suite evaluation/count_tokens",
    "evaluation/test_tasks.py": "evaluation/tasks/*",
    "evaluation/test_time_budget.py": "runtime/text",
    "extending/test_choose.py": "extending/evidence extending/explain",
    "extending/test_extend.py": "extending/begin extending/card extending/result extending/served_by "
    "extending/train_adapter extending/write_extended",
    "gguf/test_gguf_patch.py": "gguf/patch runtime/gguf_file",
    "gguf/test_gguf_table.py": "gguf/table",
    "harness/test_lm_eval.py": "harness/model harness/tasks harness/command",
    "harness/test_reading.py": "harness/answering_model",
    "kv_cache/test_kv_cache.py": "kv_cache/attention kv_cache/cache kv_cache/layer kv_cache/plans "
    "modeling/attention_layers modeling/temporary_modes",
    "kv_cache/test_kv_schemes.py": "kv_cache/blocks kv_cache/formats kv_cache/schemes",
    "kv_evaluation/test_kv_check.py": "kv_evaluation/*",
    "methods/test_methods.py": "methods/* tables",
    "modeling/test_capture.py": "modeling/attention_probe modeling/devices modeling/state_statistics "
    "modeling/visit_states modeling/inputs",
    "patching/test_apply.py": "patching/install patching/locate patching/encode patching/verify patching/record "
    "patching/config_settings",
    "patching/test_layouts.py": "patching/rotary",
    "patching/test_probing.py": "patching/probe patching/cache_argument",
    "planning/test_planning.py": "planning/*",
    "planning/test_serving.py": "cli/plan_serve",
    "reports/test_analysis_report.py": "reports/analysis reports/analysis_figures reports/plots/analysis",
    "reports/test_comparison_report.py": "reports/comparison runtime/number_format",
    "reports/test_kv_report.py": "reports/kv",
    "runtime/test_gguf_headers.py": "runtime/gguf_headers",
    "runtime/test_page.py": "runtime/plots",
    "test_packaging.py": "version",
    "test_paths.py": "runtime/packaged",
    "evaluation/test_finished_work.py": "runtime/result_cache",
    "theory/test_theory.py": "theory",
    "training/test_finetune.py": "training/callbacks training/results training/runs",
    "modeling/test_prefill.py": "modeling/attention",
    "modeling/test_reader.py": "modeling/after_decoder",
    "training/test_training.py": "training/checks",
}

MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"
)


def address(module: str) -> str | None:
    """Return the test file of a module such as ``patching/locate``; None if it has none."""
    folder, _, name = module.rpartition("/")
    mirror = Path(folder.partition("/")[0], f"test_{name}.py").as_posix()
    if (TESTS / mirror).is_file():
        return mirror
    named = [(file, pattern) for file, patterns in HOLDS.items() for pattern in patterns.split()]
    # A module that is named itself stands before the rest of its folder.
    exact = [file for file, pattern in named if pattern == module]
    return next(iter([*exact, *(file for file, pattern in named if fnmatch(module, pattern))]), None)


@pytest.mark.parametrize("module", MODULES)
def test_each_module_has_a_test_file(module):
    found = address(module)
    assert found is not None and (TESTS / found).is_file()


def test_the_map_names_what_is_there():
    for patterns in HOLDS.values():
        for pattern in patterns.split():
            held = [module for module in MODULES if fnmatch(module, pattern)]
            assert held, pattern
