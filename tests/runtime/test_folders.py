"""Files and folders appear whole or not at all, and nothing stays of a process that was killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rope_patch.runtime.folders import (
    file_in_one_move,
    folder_in_one_move,
    folder_to_write,
    holds_files,
    link_or_copy,
    locked_output,
    scratch_folder,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, text: str = "new") -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (folder / name).write_text(text)


def script(code: str, *args: Path) -> subprocess.CompletedProcess[str]:
    """Run lines of Python in a process of their own."""
    head = "import os, sys\nfrom pathlib import Path\nfrom rope_patch.runtime.folders import *"
    code = f"{head}\nargs = list(map(Path, sys.argv[1:]))\n{code}"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def killed(code: str, *args: Path) -> None:
    """Run lines of Python in a process of their own that is killed at their end."""
    assert script(f"{code}\nos.kill(os.getpid(), 9)", *args).returncode == -signal.SIGKILL


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_nothing_stays_after_an_error_and_no_folder_made_on_the_way(tmp_path):
    for writer in (folder_in_one_move(tmp_path / "a" / "out"), scratch_folder(tmp_path / "a" / "out")):
        with pytest.raises(ZeroDivisionError), writer as folder:
            fill(folder)
            raise ZeroDivisionError
        assert names(tmp_path) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(ZeroDivisionError), folder_in_one_move(tmp_path / "out") as folder:
        fill(folder)
        raise ZeroDivisionError
    assert names(tmp_path / "out") == []


def test_a_folder_that_holds_files_is_kept_unless_it_may_be_overwritten(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(FileExistsError, match="empty"), folder_in_one_move(tmp_path, overwrite=False):
        pass
    with folder_in_one_move(tmp_path) as folder:
        fill(folder)
    assert names(tmp_path) == ["config.json", "mine", "model.safetensors", "tokenizer.json"]


def test_hidden_files_of_others_count_as_content(tmp_path):
    assert not holds_files(tmp_path) and not holds_files(tmp_path / "nowhere")
    (tmp_path / ".git").mkdir()
    assert holds_files(tmp_path)


def test_a_full_disk_is_named_by_what_is_written(tmp_path, monkeypatch):
    for error in (
        OSError(errno.ENOSPC, "No space left"),
        OSError(errno.ENOSPC, "No space left", "source", None, "copy"),  # as shutil raises it
    ):
        with pytest.raises(OSError, match=r"device: .*out'") as raised, folder_in_one_move(tmp_path / "out"):
            raise error
        assert raised.value.errno == errno.ENOSPC
    for large in (OSError(errno.EFBIG, "", "source"), shutil.Error([("source", "out", "[Errno 27] File too large")])):
        with pytest.raises(OSError, match=r"large: .*out'"), folder_in_one_move(tmp_path / "out"):
            raise large
    with pytest.raises(ValueError, match="mine"), folder_in_one_move(tmp_path / "out"):
        raise ValueError("mine")
    with pytest.raises(OSError, match=r"device: .*out'"), folder_in_one_move(tmp_path / "out"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: os.write(os.open("/dev/full", os.O_WRONLY), content))
    with pytest.raises(OSError, match=r"device: .*results\.json'"):
        write_atomically(tmp_path / "results.json", "{}")


# --- two at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        (folder_in_one_move, "folder_to_write(args[0], [])"),
        (lambda out: folder_to_write(out, []), "folder_in_one_move(args[0])"),
    ],
)
def test_two_processes_do_not_write_one_output(tmp_path, held, asked):
    out = tmp_path / "out"
    out.mkdir()
    with held(out):
        assert "BlockingIOError: another command writes" in script(f"with {asked}: pass", out).stderr
    assert names(tmp_path) == ["out"]


def eight_at_once(call):
    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_two_that_begin_before_either_ends_one_wins(tmp_path):
    """The first has checked that nothing is in the way when the second publishes: it must look again."""
    outcome = []

    def write(text: str, wait: float) -> None:
        try:
            with folder_in_one_move(tmp_path / "out", overwrite=False) as folder:
                fill(folder, text)
                time.sleep(wait)
            outcome.append(text)
        except (FileExistsError, BlockingIOError):
            outcome.append("refused")

    eight_at_once(lambda number: write(str(number), 0.05))
    assert outcome.count("refused") == 7
    assert names(tmp_path) == ["out"]
    assert len({path.read_text() for path in (tmp_path / "out").iterdir()}) == 1


def test_many_writers_of_one_small_file_wait_for_each_other(tmp_path):
    path = tmp_path / "record.json"
    eight_at_once(lambda number: write_atomically(path, str(number) * 9))
    assert len(set(path.read_text())) == 1
    assert names(tmp_path) == ["record.json"]


# --- what a killed process left ---------------------------------------------------------------------------------------


def test_what_a_killed_process_left_goes_with_the_next_run(tmp_path):
    code = """
with folder_in_one_move(args[0]) as folder:
    (folder / "half").write_text("")
    with scratch_folder(args[0]) as scratch:
        (scratch / "half").write_text("")
        os.kill(os.getpid(), 9)"""
    killed(code, tmp_path / "out")
    assert len(names(tmp_path)) == 3 and not holds_files(tmp_path)
    with folder_in_one_move(tmp_path / "out", overwrite=False) as folder, scratch_folder(tmp_path / "out"):
        fill(folder)
    assert names(tmp_path) == ["out"]


def test_a_mount_point_is_written_from_within(tmp_path, monkeypatch):
    """Another place is on another disk, from which nothing is renamed."""
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path / "out")
    (tmp_path / "out" / ".rope-patch.tmp").mkdir(parents=True)  # of a killed process
    with folder_in_one_move(tmp_path / "out", overwrite=False) as folder:
        fill(folder)
        assert folder.parent.parent == tmp_path / "out"
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_kill_while_a_file_is_written_leaves_the_old_one(tmp_path):
    (tmp_path / "record.json").write_text("old")
    killed(
        """
os.replace = lambda *_: os.kill(os.getpid(), 9)
write_atomically(args[0] / "record.json", "half")""",
        tmp_path,
    )
    assert (tmp_path / "record.json").read_text() == "old" and holds_files(tmp_path)
    assert len(names(tmp_path)) == 2
    with folder_to_write(tmp_path, []):
        assert names(tmp_path) == ["record.json"], "the next run of the folder deletes what was begun"
    killed(
        """
with file_in_one_move(args[0] / "model.gguf") as path:
    path.write_text("x")
    os.kill(os.getpid(), 9)""",
        tmp_path,
    )
    assert not (tmp_path / "model.gguf").exists()
    with file_in_one_move(tmp_path / "model.gguf") as path:
        path.write_text("whole")
    assert not list(tmp_path.glob(".model.gguf*"))


# --- moving into a folder that exists ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("stop", range(1, 8))
def test_an_error_while_files_are_moved_puts_everything_back(tmp_path, monkeypatch, stop, error):
    fill(tmp_path, "old")
    (tmp_path / "notes").write_text("mine")
    stock = os.replace
    calls = []

    def replace(source, target):
        calls.append(source)
        if len(calls) == stop:
            raise error
        stock(source, target)

    with pytest.raises(type(error)), folder_in_one_move(tmp_path) as folder:
        fill(folder)
        (folder / "inner").mkdir()
        (folder / "inner" / "more").write_text("new")
        monkeypatch.setattr("rope_patch.runtime.folders.os.replace", replace)
    monkeypatch.undo()
    assert len(calls) >= stop
    assert [path for path in names(tmp_path) if path != "inner"] == [
        "config.json",
        "model.safetensors",
        "notes",
        "tokenizer.json",
    ]
    assert {path.read_text() for path in tmp_path.glob("*.*")} == {"old"}
    assert not list(tmp_path.glob("inner/*"))


def test_something_of_another_kind_in_the_way_is_said_before_anything_moves(tmp_path):
    fill(tmp_path, "old")
    (tmp_path / "inner").write_text("mine")
    (tmp_path / "generation_config.json").mkdir()
    for name in ("inner/more", "generation_config.json"):
        with pytest.raises(FileExistsError, match="in the way"), folder_in_one_move(tmp_path) as folder:
            fill(folder)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
    assert {path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {"old", "mine"}


@pytest.mark.parametrize("stop", range(1, 9))
def test_between_two_checkpoints_a_folder_does_not_load(tmp_path, stop):
    """Whatever a kill leaves: the old config only with the old weights, the new one only with all that is new."""
    code = f"""
calls = []
def counted(stock):
    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == {stop}:
            os.kill(os.getpid(), 9)
        return stock(*args, **kwargs)
    return call
with folder_in_one_move(args[0]) as folder:
    (folder / "sub").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json", "a.json"):
        (folder / name).write_text("new")
        (folder / "sub" / name).write_text("new")
    os.replace, os.unlink = counted(os.replace), counted(os.unlink)"""
    fill(tmp_path, "old")
    (tmp_path / "adapter_config.json").write_text("old")
    killed(code, tmp_path)
    state = {
        path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file() and "rope-patch" not in path.name
    }
    if state.get("config.json") == "old":
        assert state["model.safetensors"] == "old" and not any("-of-" in name for name in state)
    if state.get("config.json") == "new":
        assert "model.safetensors" not in state and sum("-of-" in name for name in state) == 2
    with folder_in_one_move(tmp_path) as folder:
        fill(folder)
    assert {path.name for path in tmp_path.iterdir()} - {"sub", "a.json"} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


# --- the place of an output -------------------------------------------------------------------------------------------


WRITERS = (folder_in_one_move, file_in_one_move, scratch_folder, locked_output, lambda out: folder_to_write(out, []))


@pytest.mark.parametrize("place", ["new/../out", "new/..", "new/deep/../../out", "there/new/../../out", "link/../out"])
@pytest.mark.parametrize("writer", WRITERS)
def test_an_output_that_the_system_would_not_find_again_is_refused(tmp_path, writer, place):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = names(tmp_path)
    with pytest.raises(FileNotFoundError, match="leads through"), writer(tmp_path / place):
        pytest.fail("it was written")
    assert names(tmp_path) == before


def test_an_output_that_steps_back_through_folders_is_where_the_system_finds_it(tmp_path):
    (tmp_path / "there" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "deep")
    for place in ("there/../out", "link/../new/out"):
        with folder_in_one_move(tmp_path / place) as folder:
            fill(folder)
        assert (tmp_path / place / "config.json").is_file()
    assert (tmp_path / "there" / "new" / "out").is_dir()  # the link leads there


def test_a_file_is_copied_where_the_system_allows_no_links(tmp_path, no_links):
    (tmp_path / "file").write_text("content")
    link_or_copy(tmp_path / "file", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "content" and not (tmp_path / "copy").is_symlink()


# --- a folder to write into -------------------------------------------------------------------------------------------


def test_results_do_not_go_into_a_checkpoint(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(FileExistsError, match="as a checkpoint does"), folder_to_write(tmp_path, []):
        pass
    assert names(tmp_path) == ["config.json"]


def test_a_folder_made_for_nothing_goes_again(tmp_path, monkeypatch):
    out = tmp_path / "deep" / "out"
    with pytest.raises(ZeroDivisionError), folder_to_write(out, []):
        assert out.is_dir() and all("rope-patch" in path.name for path in out.iterdir())
        1 / 0  # noqa: B018
    assert not (tmp_path / "deep").exists()
    with pytest.raises(ZeroDivisionError), folder_to_write(out, []):
        (out / "kept").touch()
        1 / 0  # noqa: B018
    assert (out / "kept").exists()
    with folder_to_write(tmp_path / "deep", []):
        (out / "kept").unlink()
        out.rmdir()
    assert (tmp_path / "deep").exists()  # it was there before

    def denied(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("rope_patch.runtime.folders.os.open", denied)
    denial = pytest.raises(OSError, match=r"Permission denied: .*new")
    with denial, folder_to_write(tmp_path / "new", []):
        pytest.fail("it went on")
    assert not (tmp_path / "new").exists()
