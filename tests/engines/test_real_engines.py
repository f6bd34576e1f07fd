"""What ``doctor`` says of other programs, held against the programs themselves: `make test-engines`.

Each engine runs in an environment of its own under ``.venv/engines``, and reads the same folders; one that is not there
is skipped. Log-probabilities are compared with those of plain transformers: where ``doctor`` says *holds*, they must
agree; where it says *differs* by a table, a layer or a window, they must not; where it says that a program refuses a
folder, it must fail. SGLang has no package for a CPU: of it the tables are compared that its Python builds.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import sglang_reader
from support.commands import run
from support.engine_folders import METHODS, PROMPT, TARGET, method_of, prompt, random_folders, toys
from support.engine_forms import stated_of
from support.engines import Case, answers, difference, report
from support.patches import config_of

from rope_patch.engines.compare_programs import ProgramReading, compare_programs

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
AGREES, DIFFERS = 1e-2, 2e-2
"""Differences of a log-probability [nats]. MLX and llama.cpp compute GELU in another way, which costs up to 5e-3."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {path.name: path for path in (*toys(root), *random_folders(root))}


@pytest.fixture(scope="module")
def cases(folders) -> list[Case]:
    """A case for each folder, whose prompt fits into the context that the folder states."""
    ids = prompt()
    found = []
    for name, path in folders.items():
        context = config_of(path)["max_position_embeddings"]
        found.append(Case(name, path, ids[: min(PROMPT, context)], name))
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory, cases) -> dict[str, Any]:
    """Log-probabilities of plain transformers by folder, without those that it cannot read."""
    root = tmp_path_factory.mktemp("transformers")
    found = answers("transformers", root, cases)
    return {case.name: np.load(root / f"{case.name}.npy") for case in cases if "error" not in found[case.name]}


def for_vllm(cases: list[Case], folders: dict[str, Path]) -> list[Case]:
    """Return fewer cases, since vLLM takes seconds for each, with an adapter among them."""
    plain = (" base", " window", " other-layers", " learned", " merged", " longrope-5")
    chosen = [c for c in cases if (":" in c.name and not c.name.endswith("export")) or c.name.endswith(plain)]
    chosen += [c for c in cases if c.name.startswith("llama ") and c.name.endswith("-5") and c not in chosen]
    merged = folders["adapter merged"]
    lora = {"lora": str(merged.with_name("adapter"))}
    return [*chosen, Case("adapter base", merged.with_name("adapter base"), prompt(), "adapter merged", lora)]


def contradiction(answer: dict[str, Any], off: float, said: list[ProgramReading]) -> str:
    """Return what an engine shows against the verdict on it; empty if nothing. No rows mean that it must agree."""
    verdicts = {row.verdict for row in said}
    if "error" in answer:
        return "" if "refuses" in verdicts else answer["error"]
    if "refuses" in verdicts:
        return "it reads what it is said to refuse"
    # One with a shorter context has the same table.
    same = all(row.verdict == "agrees" or "it computes the same table" in row.found for row in said)
    if same and off > AGREES:
        return "it differs where it is said to agree"
    if not same and off < DIFFERS:
        return "it agrees where it is said to differ"
    return ""


@pytest.fixture(scope="module")
def compared(cases) -> dict[Case, tuple[ProgramReading, ...]]:
    """What is said of all programs by folder, without those of which transformers reads no table."""
    rows = {}
    for case in cases:
        with contextlib.suppress(ValueError):
            rows[case] = compare_programs(case.path).rows
    return rows


def with_factor_of_mlx(cases: list[Case], root: Path) -> dict[str, Any]:
    """Return log-probabilities of plain transformers where Gemma's factor of embeddings is rounded as MLX rounds it.

    It is a root, 12.649 for the bundled checkpoint, and 12.625 in bfloat16; that of random checkpoints is whole.
    """
    chosen = [Case(c.name, c.path, c.ids, options={"factor_of_mlx": True}) for c in cases if "toy-gemma3" in c.name]
    found = answers("transformers", root, chosen)
    return {case.name: np.load(root / f"{case.name}.npy") for case in chosen if "error" not in found[case.name]}


def known_of(program: str, cases: list[Case], compared: dict[Case, tuple[ProgramReading, ...]]) -> dict[Case, Any]:
    """Return what is said of a program by case, where it is known.

    Of an adapter nothing is said: it must do what it is written for.
    """
    known: dict[Case, Any] = {case: [] for case in cases if case.options}
    for case in cases:
        rows = compared.get(case, ())
        said = [row for row in rows if row.program == program]
        if said and "unverified" not in {row.verdict for row in said}:
            known[case] = said
    return known


@pytest.mark.parametrize("program", ["transformers-4", "mlx", "llama.cpp", "vllm"])
def test_engines_do_what_doctor_says(program, cases, folders, expected, compared, tmp_path):
    if program == "vllm":
        cases = for_vllm(cases, folders)
    cases = [case for case in cases if case.expected in expected]
    if program == "mlx":
        expected = expected | with_factor_of_mlx(cases, tmp_path)
    known = known_of(program, cases, compared)
    found = answers(program, tmp_path, list(known))
    rows: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for case, said in known.items():
        verdict = " ".join(dict.fromkeys(row.verdict for row in said)) or "must agree"
        row = {"said": verdict, **found[case.name]}
        off = 0.0
        if "error" not in row:
            off = difference(np.load(tmp_path / f"{case.name}.npy"), expected[case.expected], case.ids)
            row["difference"] = float(f"{off:.2g}")
        rows[case.name] = row
        if reason := contradiction(row, off, said):
            wrong[case.name] = f"{verdict}, {off:.2g}: {reason}"
    seconds = round(sum(row["seconds"] for row in rows.values()))
    unknown = len(cases) - len(known)
    results = {"versions": found["versions"], "seconds": seconds, "unverified": unknown, "wrong": wrong, "rows": rows}
    report(program, results)
    assert not wrong


def test_vllm_runs_an_unchanged_checkpoint_by_what_doctor_prints(folders, expected, tmp_path):
    """The lines that are printed go through a shell's quoting and vLLM's own parser of options."""
    cases = []
    rows = {}
    for name, method in itertools.product(("toy-llama", "toy-gemma3"), METHODS[:5]):
        base = folders[f"{name} base"]
        arguments = (method_of(method, base), "--for", "vllm", "--target-length", TARGET)
        lines = [line.strip() for line in run("settings", base, *arguments).splitlines()]
        options = {"command_line": " ".join(line for line in lines if line.startswith("--"))}
        cases.append(Case(f"{name} {method}", base, prompt(), options=options))
    found = answers("vllm", tmp_path, cases)
    for case in cases:
        row = rows[case.name] = {"said": "must agree", **found[case.name]}
        if "error" not in row:
            row["difference"] = difference(np.load(tmp_path / f"{case.name}.npy"), expected[case.name], case.ids)
    report("vllm options", {"versions": found["versions"], "rows": rows})
    assert not {name: row for name, row in rows.items() if not row.get("difference", AGREES) < AGREES}
    assert all(row["context"] == TARGET for row in rows.values())


def test_sglang_builds_the_tables_that_its_source_was_read_to_build(cases, tmp_path):
    """The rows of SGLang in ``assets/engines.json`` follow from this reading."""
    stated = {}
    for case in cases:
        with contextlib.suppress(ValueError):
            found = stated_of(config_of(case.path))
            if found.model_type in sglang_reader.FAMILIES and not sglang_reader.answer_of(found).unread:
                stated[case] = found
    answered = answers("sglang", tmp_path, list(stated), script="sglang_tables.py")
    rows: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for case, config in stated.items():
        row = rows[case.name] = dict(answered[case.name])
        refused = sglang_reader.answer_of(config).error
        if "error" in row or refused:
            if "error" not in row or not refused:
                wrong[case.name] = f"{refused}: {row}"
            continue
        tables = np.load(tmp_path / f"{case.name}.npz")
        row["difference"] = max(
            _from_table(kind, *sglang_reader.table_of(config, kind), tables) for kind in config.tables
        )
        if row["difference"] > 1e-5:
            wrong[case.name] = f"{row}"
    report("sglang", {"versions": answered["versions"], "wrong": wrong, "rows": rows})
    assert not wrong


def _from_table(kind: str | None, inv_freq: torch.Tensor, attention_scaling: float, tables: Any) -> float:
    """Return the largest difference of cos and sin from those of the table that a program is said to build."""
    theirs = torch.from_numpy(tables[kind if kind in tables else "all"])[:256]
    angles = torch.arange(len(theirs)).float()[:, None] * inv_freq
    ours = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_scaling
    return float((theirs - ours).abs().max()) if theirs.shape == ours.shape else float("inf")
