"""Check that the tests catch defects: plant one at a time in a copy of the project, and run the tests of its folder.

    python tests/tools/mutations.py --list
    python tests/tools/mutations.py --folder methods -o build/mutations.json
    python tests/tools/mutations.py -o build/mutations.json        # all: one to two hours of one core

A defect is one change of the text of a file, which must occur there exactly once; `mutation_lists` holds them. In
the copy the tests of the folder run until one fails (`pytest -x`), with the selection of `make test`: the defect is
caught by that test, by a time limit, or survives. Test files that import the changed module run first. If all defects
of a folder are caught, its tests run once more without any. If a run is interrupted, the same command continues it:
defects that the report holds are not run again, except survivors with --again, after a test was written.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from mutation_lists.mutation import Mutation
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds its own folder alone

from mutation_lists import MUTATIONS
from test_addresses import address

from rope_patch.runtime.folders import write_atomically

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv", "venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


def selection_of(root: Path) -> str:
    """Return the expression by which `make test` selects tests.

    Raises:
        SystemExit: the Makefile has none.
    """
    target = re.search(r'^test:.*\n\t.*pytest.* -m "([^"]+)"', (root / "Makefile").read_text("utf-8"), re.MULTILINE)
    if target is None:
        raise SystemExit(f"error: the target test of {root / 'Makefile'} selects no tests with -m")
    return target[1]


def commit_of(root: Path) -> str | None:
    """Return the commit that is checked out, with a + if files differ from it; None outside of a repository."""
    words = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def planted(mutation: Mutation, root: Path) -> str:
    """Return the text of the file with the defect.

    Raises:
        SystemExit: the text to be changed does not occur exactly once.
    """
    text = (root / mutation.file).read_text("utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise SystemExit(
            f"error: {mutation.name}: the text to be changed occurs {count} times in {mutation.file}, it must occur "
            f"once: {mutation.old!r}"
        )
    return text.replace(mutation.old, mutation.new)


def test_files(root: Path, folder: str, module: str) -> list[str]:
    """Return the test files of a module: that of its address, and those of its folder.

    Of the folder, those that import the module come first, then those that name it most often.
    """

    def place(path: Path) -> tuple[bool, int]:
        text = path.read_text("utf-8")
        imports = re.search(rf"\b{folder}(\.| import .*\b){module}\b", text) is not None
        return not imports, -len(re.findall(rf"\b{module}\b", text))

    files = sorted((root / "tests" / folder).rglob("test_*.py"))
    found = [str(path.relative_to(root)) for path in sorted(files, key=place)]
    first = f"tests/{address(f'{folder}/{module}')}"
    return list(dict.fromkeys([first, *found] if (root / first).is_file() else found))


def run_tests(root: Path, files: Sequence[str], selection: str, limit: float) -> dict[str, Any]:
    """Run test files until one fails.

    Args:
        root: the root of the project.
        files: the test files, in the order in which they run.
        selection: the expression for `-m` of pytest.
        limit: the time after which the tests count as failed [s].

    Returns:
        `outcome`, survived or caught; `by`, the test that failed or another reason; `seconds`.

    Raises:
        SystemExit: pytest could not run the tests, or selected none.
    """
    # -rfE prints the name of the test that failed, and COLUMNS is wide enough for it.
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", *files, "-m", selection]
    paths = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words,
            cwd=root,
            env={**os.environ, **paths},
            stdout=output,
            stderr=subprocess.STDOUT,
            # A process group of its own, so that _end also ends processes that tests started.
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    seconds = round(time.perf_counter() - began, 1)
    if status == 0:
        return {"outcome": "survived", "by": None, "seconds": seconds}
    if status is None:
        return {"outcome": "caught", "by": f"no end within {limit:g} s", "seconds": seconds}
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    # 1: tests failed; 2: interrupted, as by an import that fails; above: pytest itself could not run.
    if failed is None and status > 2:
        raise SystemExit(f"error: pytest ended with status {status}:\n{text[-2000:]}")
    return {"outcome": "caught", "by": failed[1] if failed else f"status {status}", "seconds": seconds}


def _write(path: Path, text: str) -> None:
    """Write a module and delete its compiled form: Python compares times of whole seconds only."""
    path.write_text(text, "utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(mutations: Sequence[Mutation], root: Path, report: dict[str, Any], args: argparse.Namespace) -> None:
    """Run every mutation that a report does not hold, and write the report after each."""
    # This checks that every defect can be planted before any test runs.
    texts = {mutation.name: planted(mutation, root) for mutation in mutations}
    report["selection"] = selection_of(root)
    commit = commit_of(root)
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(mutations), unit="mutation") as bar:
        copy = shutil.copytree(root, Path(scratch) / "copy", ignore=shutil.ignore_patterns(*NOT_COPIED))
        for mutation in mutations:
            bar.set_description(mutation.name)
            done = report["mutations"].get(mutation.name)
            same = done is not None and (done["file"], done["old"], done["new"]) == mutation[1:4]
            if not same or (args.again and done["outcome"] == "survived"):
                path = copy / mutation.file
                text = path.read_text("utf-8")
                _write(path, texts[mutation.name])
                files = test_files(copy, mutation.folder, path.stem)
                result = run_tests(copy, files, report["selection"], args.limit)
                _write(path, text)
                if result["outcome"] == "survived" and mutation.why:
                    result["outcome"] = "equivalent"
                report["mutations"][mutation.name] = {**mutation._asdict(), **result, "commit": commit}
                write_report(report, args.output)
            bar.update()
        _check_unchanged(report, copy, args)


def _check_unchanged(report: dict[str, Any], root: Path, args: argparse.Namespace) -> None:
    """Raise if the tests of a folder fail without a defect; if a defect survived, they have already passed."""
    rows = report["mutations"].values()
    folders = {Path(row["file"]).parts[1]: row for row in rows}
    passed = {Path(row["file"]).parts[1] for row in rows if row["outcome"] != "caught"}
    for folder in sorted(folders.keys() - passed - report["passed_unchanged"].keys()):
        files = test_files(root, folder, Path(folders[folder]["file"]).stem)
        result = run_tests(root, files, report["selection"], args.limit)
        if result["outcome"] == "caught":
            report["mutations"] = {
                name: row for name, row in report["mutations"].items() if Path(row["file"]).parts[1] != folder
            }
            write_report(report, args.output)
            raise SystemExit(f"error: {result['by']} fails without any defect: nothing is known of {folder}")
        report["passed_unchanged"][folder] = result["seconds"]
        write_report(report, args.output)


def write_report(report: dict[str, Any], output: Path | None) -> None:
    """Write a report as JSON; without a file nothing is written."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, json.dumps(report, indent=1) + "\n")


def table(report: dict[str, Any]) -> str:
    """Return a text: the number of defects of each folder that were caught, and the names of those that survived."""
    rows = report["mutations"].values()
    planted_in = Counter(Path(row["file"]).parts[1] for row in rows)
    caught = Counter(Path(row["file"]).parts[1] for row in rows if row["outcome"] == "caught")
    equal = Counter(Path(row["file"]).parts[1] for row in rows if row["outcome"] == "equivalent")
    lines = [
        f"{folder:12} {caught[folder]:3} of {count:3} caught"
        + (f", {equal[folder]} do nothing" if equal[folder] else "")
        for folder, count in sorted(planted_in.items())
    ]
    lines += [f"{row['outcome']}: {row['name']} {row['why']}" for row in rows if row["outcome"] != "caught"]
    return "\n".join(lines)


def main(mutations: Sequence[Mutation] = MUTATIONS, root: Path = ROOT) -> None:
    """Run the chosen defects, write the JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the mutations and run nothing")
    parser.add_argument("--folder", action="append", help="of rope_patch: only its mutations; may be given again")
    parser.add_argument("--again", action="store_true", help="run those of the report that survived once more")
    parser.add_argument("--limit", type=float, default=600, help="after which the tests of a folder have failed [s]")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    chosen = [mutation for mutation in mutations if args.folder is None or mutation.folder in args.folder]
    if not chosen:
        raise SystemExit(f"error: no mutation in {args.folder}. Known: {sorted({one.folder for one in mutations})}")
    if args.list:
        print("\n".join(f"{mutation.file:45} {mutation.name}" for mutation in chosen))
        return
    report: dict[str, Any] = {"passed_unchanged": {}, "mutations": {}}
    if args.output is not None and args.output.exists():
        report = json.loads(args.output.read_text(encoding="utf-8"))
    run(chosen, root, report, args)
    print(table(report))


if __name__ == "__main__":
    main()
