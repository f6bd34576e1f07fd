"""Files and folders that appear whole or not at all, and which of them are checkpoints.

An output is written under a hidden name beside it, or within it where it is a mount point, and then moved into its
place; a lock of that name keeps other processes from it. What a killed process left there, the next one that writes the
same output deletes.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

HIDDEN_MARK = ".rope-patch"
"""What the names of all hidden files and folders of this module contain."""


CONFIG_FILES = ("config.json", "adapter_config.json")
"""The configs of a model and of an adapter: without its config a folder does not load as a checkpoint."""

_ADAPTER = ("adapter_config.json", "adapter_model.*")
# By the config that arrives: what a loader would prefer to the new weights, or mix with them. Old configs come first,
# so that a folder between two checkpoints does not load. An adapter leaves the base model beside it alone.
_STALE_PATTERNS = {
    "config.json": (
        "config.json",
        *_ADAPTER,
        "model.*safetensors*",
        "model-*-of-*.safetensors",
        "pytorch_model*.bin*",
        "rope_patch.json",
    ),
    "adapter_config.json": _ADAPTER,
}


def is_gguf(source: str | Path) -> bool:
    """Tell whether a source is a GGUF file by its name, which no folder has."""
    return str(source).lower().endswith(".gguf") and not Path(source).is_dir()


def check_source(source: str | Path, configs: Sequence[str] = CONFIG_FILES) -> None:
    """Raise unless a source is a checkpoint or adapter on this disk, or its name may be that of a hub repository.

    The hub is asked for nothing: with retries that takes half a minute.

    Args:
        source: the folder, GGUF file or hub id ``org/name``, where no folder here is called ``org``.
        configs: the files of :data:`CONFIG_FILES` of which a folder must hold one; a GGUF file stands for the first.

    Raises:
        ValueError: a file, a folder without such a file, or no folder; the message says what was expected.
        FileNotFoundError: there is no such GGUF file.
    """
    path = Path(source)
    expected = f"a folder with {' or '.join(configs)}, "
    if CONFIG_FILES[0] in configs:
        expected += "a GGUF file, "
    expected += "or a hub id such as org/name"
    if path.is_dir():
        if not any((path / config).is_file() for config in configs):
            below = [str(file.parent) for config in configs for file in sorted(path.glob(f"*/{config}"))]
            hint = f". Did you mean {' or '.join(below[:3])}?" if below else ""
            raise ValueError(f"{source} has no {' or '.join(configs)}: give {expected}{hint}")
    elif is_gguf(source):
        if not path.is_file():
            raise FileNotFoundError(f"no file {source}")
        if CONFIG_FILES[0] not in configs:
            raise ValueError(f"{source} is a GGUF file: give {expected}")
    elif path.exists():
        raise ValueError(f"{source} is a file: give {expected}")
    elif not re.fullmatch(r"[^.~/\\][^/\\]*/[^/\\]+", str(source)) or path.parent.is_dir():
        raise ValueError(f"no folder {source}: give {expected}")


def holds_files(folder: Path) -> bool:
    """Tell whether a folder exists and holds more than hidden files of this module."""
    return folder.is_dir() and any(HIDDEN_MARK not in path.name for path in folder.iterdir())


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents; do nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(path: Path, place: Path) -> None:
    """Link a file into another folder, or copy it where the system allows no link, as Windows does without a right."""
    try:
        place.symlink_to(path.resolve())
    except OSError:
        shutil.copyfile(path, place)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of errors that are about the output, whichever file the system names."""


@contextlib.contextmanager
def naming(out: Path) -> Iterator[None]:
    """Name what is written in errors of the system about a full disk, a file too large or a hidden file.

    What copies a file names its source, and libraries have errors of their own.

    Args:
        out: the file or folder that is written.
    """
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        filename = str(getattr(error, "filename", None))
        for full in _NO_ROOM:
            # safetensors says it in a text, and shutil in a list of errors.
            if os.strerror(full) in str(error):
                number = full
        if number in _NO_ROOM or (number is not None and HIDDEN_MARK in filename):
            raise OSError(number, os.strerror(number), str(out)) from error
        raise


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it: readers see the old content or the new, never a part.

    Raises:
        OSError: the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    # A random part, since two processes may write the same file at once.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{HIDDEN_MARK}.tmp")
    try:
        with naming(path):
            if isinstance(content, str):
                content = content.encode()
            temporary.write_bytes(content)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def real_path(out: str | Path) -> Path:
    """Return the path of an output without links and steps back.

    Raises:
        FileNotFoundError: it steps back from a folder that does not exist, as ``new/../out`` does. The system finds
            nothing at such a path, so that what would be written could not be read there.
    """
    out = Path(out)
    for step in (out, *out.parents):
        if step.name == ".." and not step.exists():
            raise FileNotFoundError(f"no folder {step.parent}, which {out} leads through: give a shorter path")
    return Path(os.path.realpath(out))


@contextlib.contextmanager
def locked_output(out: str | Path) -> Iterator[Path]:
    """Keep other processes from an output while it is written; the same thread may claim it again meanwhile.

    Args:
        out: the file or folder; new parent folders that are empty at the end are deleted.

    Yields:
        The path of the lock, in a folder on the same disk. What else has its name, but another ending, is temporary.

    Raises:
        BlockingIOError: another process is writing the output.
        OSError: the place cannot be written.
    """
    out = real_path(out)
    path = out.with_name(f".{out.name}{HIDDEN_MARK}.lock")
    # A rename works within one disk, and needs a parent folder in which this user may write.
    if out.is_dir() and (out.is_mount() or not os.access(out.parent, os.W_OK)):
        path = out / f"{HIDDEN_MARK}.lock"
    # One lock object for each path: a nested claim in the same thread counts it up, instead of being refused.
    lock = FileLock(path, timeout=0, is_singleton=True)
    with _parents(out), naming(out):
        try:
            lock.acquire()
        except Timeout:
            raise BlockingIOError(f"another command writes {out}: wait for it, or give another output") from None
        first = lock.lock_counter == 1
        try:
            if first:
                # What a killed process left behind, of the output itself and of small files within it. Not in a nested
                # claim of the same output: there these files are in use.
                for left in (*path.parent.glob(f"{glob.escape(path.stem)}.*"), *out.glob(f".*{HIDDEN_MARK}.tmp")):
                    if left != path:
                        remove(left)
            yield path
        finally:
            if first:
                with contextlib.suppress(OSError):  # Windows deletes no open file; filelock does so after the release
                    path.unlink()
            lock.release()


@contextlib.contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Create the parent folders of a path; new ones that are empty at the end are deleted."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):  # it is not empty, and stays
                parent.rmdir()


@contextlib.contextmanager
def scratch_folder(out: str | Path) -> Iterator[Path]:
    """Give a temporary folder on the disk of ``out``; it is deleted at the end, or by the next run after a kill.

    Args:
        out: the file or folder that is written in the same block; its lock is held meanwhile.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    # A name that begins like that of the lock, by which the next claim finds it after a kill.
    with locked_output(out) as lock, tempfile.TemporaryDirectory(prefix=f"{lock.stem}.", dir=lock.parent) as scratch:
        yield Path(scratch)


@contextlib.contextmanager
def file_in_one_move(out: Path) -> Iterator[Path]:
    """Give a temporary path to write to; at the end it becomes ``out``, or vanishes after an error.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    with scratch_folder(out) as scratch:
        yield scratch / out.name
        os.replace(scratch / out.name, out)


@contextlib.contextmanager
def folder_in_one_move(out: str | Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Give a temporary folder to fill; at the end it becomes ``out``, or vanishes after an error.

    A new ``out`` appears in one rename. Into a folder that exists, also a link or a mount point, the files are moved
    one by one after all are written. Before them the old config is deleted, and where a whole model is written the
    weights and adapter of an older checkpoint, which a loader would take for the new ones; the new config comes last:
    so a folder between two checkpoints does not load. Other files stay.

    Args:
        out: the folder that appears, or into which the files are moved.
        overwrite: whether to write into a folder that holds files.

    Raises:
        FileExistsError: the folder holds files, and ``overwrite`` is not given.
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    out = real_path(out)
    if out.is_file():
        raise NotADirectoryError(f"{out} is a file: give a folder to save into")
    with scratch_folder(out) as scratch:
        if not overwrite and holds_files(out):
            raise FileExistsError(f"{out} is not empty: give a new folder, or allow overwriting (--force)")
        folder = scratch / "new"
        folder.mkdir()
        yield folder
        if out.exists():
            _move_into(folder, out)
        else:
            os.replace(folder, out)


@contextlib.contextmanager
def folder_to_write(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Create a folder before long work, claim it for this process, and check that its files can be written.

    A new folder that is empty at the end is deleted.

    Args:
        folder: the folder to be written.
        names: the names of the files that will be written into it.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: the folder holds the config of a checkpoint, something else is in the place of the folder or a file, or
            nothing can be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file: give a folder to write")
    for config in CONFIG_FILES:
        if (folder / config).is_file():
            raise FileExistsError(f"{str(folder)!r} holds {config}, as a checkpoint does: give another folder to write")
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{str(folder / name)!r} is a folder: remove it, or give another folder to write")
    with _parents(real_path(folder) / "file"), locked_output(folder):
        yield


# --- moving into a folder that exists ------------------------------------------------------------------------------


def _move_into(source: Path, out: Path) -> None:
    """Move the files of one folder into another, which does not load as a checkpoint until all are there.

    After an error or Ctrl-C everything is moved back to where it was.

    Args:
        source: the temporary folder that holds the new files.
        out: the folder that they are moved into, which may hold files of an older checkpoint.

    Raises:
        FileExistsError: a folder in the place of a file, or a file in that of a folder; nothing was moved.
    """
    # What is replaced is kept beside until everything is in its place, so that it can be put back.
    old = source.with_name("old")
    patterns = next((patterns for config, patterns in _STALE_PATTERNS.items() if (source / config).exists()), ())
    stale = [path for pattern in patterns for path in out.glob(pattern)]
    moves = [(path, old / path.name) for path in stale]
    # Weights come first, then the JSON files that list them, and the configs last: until then the folder does not load.
    new = sorted(source.rglob("*"), key=lambda path: (path.name in CONFIG_FILES, path.suffix == ".json", path.name))
    for path in new:
        place = out / path.relative_to(source)
        if place.exists() and place.is_dir() != path.is_dir():
            kind = "folder" if place.is_dir() else "file"
            raise FileExistsError(f"{place} is in the way: it is a {kind}")
        if path.is_dir():
            continue
        if os.path.lexists(place) and place not in stale:
            moves.append((place, old / place.relative_to(out)))
        moves.append((path, place))
    try:
        for start, end in moves:
            end.parent.mkdir(parents=True, exist_ok=True)
            os.replace(start, end)
    except BaseException:
        for start, end in reversed(moves):
            if not os.path.lexists(start):  # it was moved
                with contextlib.suppress(FileNotFoundError):  # or somebody else deleted it
                    os.replace(end, start)
        raise
