"""The wheel is complete: built, installed into a bare environment, and used outside the repository."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import rope_patch

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "lm_eval",
    "matplotlib",
    "liger_kernel",
    "gguf",
)

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the repository's reach, return what it printed, and show all of it on failure."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    env |= {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_COLOR": "1"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel of the working tree."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the folder of commands of a new environment that holds the wheel.

    Its dependencies are those of the running interpreter, added to the path by a .pth file. The editable
    install of the checkout is not among them: a folder that a .pth file adds has its own .pth files unread.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent)
    commands = venv / ("Scripts" if os.name == "nt" else "bin")
    python = commands / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=venv.parent)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv.parent).strip()
    borrowed = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (Path(site) / "borrowed.pth").write_text("\n".join(borrowed) + "\n")

    where = run(python, "-c", "import rope_patch; print(rope_patch.__file__)", cwd=venv.parent).strip()
    assert Path(where).is_relative_to(venv), "the checkout was imported, not the wheel"
    return commands


def files_below(folder: Path) -> set[str]:
    """Return the relative paths of the files of a folder, leaving out what running Python leaves behind."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_is_small_and_holds_every_file(wheel):
    assert wheel.stat().st_size < 10e6
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "rope_patch/py.typed" in names
    for folder, inside in {
        "rope_patch": "rope_patch",  # with the assets
        "eval_tasks": "rope_patch/_data/eval_tasks",
        "recipes": "rope_patch/_data/recipes",
    }.items():
        expected = {f"{inside}/{name}" for name in files_below(ROOT / folder)}
        assert expected
        assert expected <= names, f"missing from the wheel: {sorted(expected - names)}"
    assert any(name.startswith("rope_patch/assets/") for name in names)
    assert {name.split("/")[0] for name in names} == {"rope_patch", f"rope_patch-{rope_patch.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_citation_and_the_changelog_name_this_version():
    assert f"\nversion: {rope_patch.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{rope_patch.__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_wheel_built_from_the_source_archive_is_the_same(wheel, tmp_path):
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 brought it
        tar.extractall(tmp_path, **safely)
    tree = tmp_path / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tree, cwd=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_commands_run_from_the_wheel(installed, tmp_path):
    command = installed / "rope-patch"

    tasks = Path(run(command, "tasks", "--folder", cwd=tmp_path).strip())
    assert tasks.is_relative_to(installed.parent)
    assert files_below(tasks) == files_below(ROOT / "eval_tasks")

    copied = tmp_path / "my_recipes"
    run(command, "recipes", "copy", copied, cwd=tmp_path)
    assert files_below(copied) == files_below(ROOT / "recipes")


def test_a_bare_install_needs_no_extra(installed, tmp_path):
    hide = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"  # None there makes `import` fail
    use = "import rope_patch, rope_patch.cli.app; [getattr(rope_patch, name) for name in rope_patch.__all__]; "
    use += "rope_patch.load(rope_patch.data_path('assets') / 'gemma3', 'yarn:factor=4')"
    run(installed / "python", "-c", f"{hide}; {use}", cwd=tmp_path)


@pytest.mark.full
def test_a_typed_project_sees_the_public_names_and_their_types(installed, tmp_path):
    names = ", ".join(name for name in rope_patch.__all__ if name != "__version__")
    wrong = 'rope_patch.apply(nn.Linear(1, 1), "yarn", target_length="32k")'
    (tmp_path / "user.py").write_text(
        f"""from collections.abc import Sequence
import rope_patch
from rope_patch import {names}
from torch import nn

def widen(model: nn.Module) -> Patch:
    return rope_patch.apply(model, Yarn(factor=4.0), target_length=32768)

lengths: Sequence[int] = EvalSpec(lengths=[512]).lengths
{wrong}
"""
    )
    skipped = "torch.*,transformers.*,numpy.*,scipy.*,matplotlib.*,peft.*,accelerate.*,datasets.*"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\n[mypy-{skipped}]\nfollow_imports = skip\n")
    checker = [sys.executable, "-m", "mypy", "--python-executable", installed / "python"]
    with pytest.raises(AssertionError) as failed:
        run(*checker, "--cache-dir", os.devnull, "user.py", cwd=tmp_path)
    assert 'user.py:10: error: Argument "target_length" to "apply"' in str(failed.value)
    assert "Found 1 error in 1 file" in str(failed.value)
