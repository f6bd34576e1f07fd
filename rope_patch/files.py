"""Files and folders that appear whole or not at all; what a killed process left of them is removed by the next.

While something is written, two hidden names stand beside it: what is written so far (``*.rope-patch.tmp``) and a lock
(``*.rope-patch.lock``) that the operating system lets go when its process ends, however it ends. Before a new folder
appears the lock is told what will be in it: a lock that nobody holds says that no process lived to report that folder.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_MARK = ".rope-patch"
_TEMPORARY, _LOCK = f"{_MARK}.tmp", f"{_MARK}.lock"

CONFIGS = ("config.json", "adapter_config.json")
"""Without its own one of these, no loader takes a folder for a checkpoint."""

# What an older checkpoint leaves in a folder that a loader would prefer to a model's new weights, or mix with them.
_STALE = ("model.safetensors*", "model-*-of-*.safetensors", "pytorch_model*.bin*", "adapter_model.*", "rope_patch.json")


def holds_files(folder: Path) -> bool:
    """Tell whether a folder is there and holds anything but what a killed process of ours left.

    That is what was being written; and for the same command also what it had put there when it was killed.
    """
    if not folder.is_dir() or all(_MARK in path.name for path in folder.iterdir()):
        return False
    return not _left_by_a_kill(folder)


def file_stands(path: Path) -> bool:
    """Tell whether a file is there that the same command did not put there when it was killed."""
    return path.exists() and not _left_by_a_kill(path)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it: readers see the old content or the new, never a part.

    Raises:
        OSError: the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    with _claimed(path.parent, f".{path.name}", path, wait=True) as claim:
        claim.temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(claim.temporary, path)


@contextlib.contextmanager
def file_in_one_move(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary path to write to; at the end it becomes ``out``, or vanishes after an error.

    Raises:
        FileExistsError: ``out`` exists, and ``overwrite`` is not said.
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    with _claimed(out.parent, f".{out.name}", out) as claim:
        if out.exists() and not overwrite and not claim.left:
            raise FileExistsError(f"{out} exists: give another name, or allow overwriting (--force)")
        yield claim.temporary
        claim.say([claim.temporary])
        os.replace(claim.temporary, out)


@contextlib.contextmanager
def folder_in_one_move(out: str | Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Give a temporary folder to fill; at the end it becomes ``out``, or vanishes after an error.

    A new ``out`` appears in one rename. Into a folder that exists, also a link or a mount point, the files are moved
    one by one after all are written. Before them the old config is deleted, and where a whole model is written the
    weights and adapter of an older checkpoint, which a loader would take for the new ones; the new config comes last:
    so a folder between two checkpoints does not load. Other files stay.

    Args:
        out: the folder.
        overwrite: write into a folder that holds files.

    Raises:
        FileExistsError: it holds files, and ``overwrite`` is not said.
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    out = Path(os.path.realpath(out))
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file: give a folder to save into")
    exists = out.is_dir()
    if exists and not os.access(out, os.W_OK):
        raise PermissionError(f"cannot write into {out}: choose another output folder")
    with _claimed_folder(out) as claim:
        if not overwrite and holds_files(out) and not claim.left:
            raise FileExistsError(f"{out} is not empty: give a new folder, or allow overwriting (--force)")
        claim.temporary.mkdir()
        yield claim.temporary
        if not holds_files(out) or claim.left:
            claim.say(claim.temporary.iterdir())
        if exists:
            _move_into(claim.temporary, out, claim.left)
            return
        made = FileExistsError(f"{out} was made by another process meanwhile: give another output folder")
        if holds_files(out):
            raise made
        try:
            os.replace(claim.temporary, out)
        except OSError as error:
            raise made from error


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Give a folder for work on the way to ``out``, on its disk; it goes at the end, or with the next run after a kill.

    Args:
        out: file or folder to be written in the same block.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    out = Path(os.path.realpath(out))
    with _claimed_folder(out) as claim:
        scratch = claim.temporary.with_name(claim.temporary.name.replace(_TEMPORARY, f"{_MARK}.scratch"))
        scratch.mkdir()
        try:
            yield scratch
        finally:
            remove(scratch)


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Keep other processes from an output while long work goes on that ends in writing it.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: the place cannot be written.
    """
    with _claimed_folder(Path(os.path.realpath(out))):
        yield


@contextlib.contextmanager
def folder_to_write(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Make a folder before long work, for this process alone, and see that its files can be written.

    Made anew and left empty, it goes again.

    Args:
        folder: to be written.
        names: of the files.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: something else is in the place of the folder or a file, or nothing can be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{str(folder)!r} is a file: give a folder to write")
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{str(folder / name)!r} is a folder: remove it, or give another folder to write")
    with contextlib.ExitStack() as made:
        try:
            made.enter_context(_parents(folder / "file"))
            made.enter_context(_claimed(folder, "", folder))
        except BlockingIOError:
            raise
        except OSError as error:
            raise OSError(f"cannot write into {str(folder)!r}: {error.strerror}") from None
        yield


# --- the lock ------------------------------------------------------------------------------------------------------


@dataclass
class _Claim:
    """An output that this process alone writes.

    Attributes:
        temporary: a path that no other process uses, with nothing there.
        handle: of the lock.
        left: all that stands there, where this very command put it there and was killed thereafter.
    """

    temporary: Path
    handle: int
    left: tuple[Path, ...]

    def say(self, new: Iterable[Path]) -> None:
        """Note what is about to be moved to where nothing else is, for the same command after a kill."""
        files = [file.lstat().st_ino for file in _files((*new, *self.left))]
        text = json.dumps({"command": sys.argv, "files": files}).encode()
        os.pwrite(self.handle, text, 0)
        os.ftruncate(self.handle, len(text))


_mine = threading.local()
"""The claims of this thread: work on the way to an output may claim it before the output itself is written."""


def _places(out: Path) -> tuple[tuple[Path, str], tuple[Path, str]]:
    """Where the temporary names of an output stand, inside (of a folder) and beside it, and what they begin with."""
    return (out, ""), (out.parent, f".{out.name}")


def _left_by_a_kill(out: Path) -> bool:
    """Tell whether all that stands at an output was put there by this very command, which was killed thereafter."""
    out = Path(os.path.realpath(out))
    mine: dict[Path, _Claim] = _mine.__dict__.get("claims", {})
    for lock in (place / f"{prefix}{_LOCK}" for place, prefix in _places(out)):
        if lock in mine:
            if mine[lock].left:
                return True
            continue
        with contextlib.suppress(OSError), lock.open("rb") as file:
            if _try(file.fileno(), wait=False) and _published(file.fileno(), out):
                return True
    return False


def _published(handle: int, out: Path) -> tuple[Path, ...]:
    """Return what this command noted in its lock when it was killed, if that is all there is, and untouched since."""
    said, since = os.pread(handle, 1 << 20, 0), os.fstat(handle).st_mtime
    note = json.loads(said) if said else {}
    if note.get("command") != sys.argv or not out.exists():
        return ()
    there = [path for path in out.iterdir() if _MARK not in path.name] if out.is_dir() else [out]
    seen = [file.lstat() for file in _files(there)]
    same = {file.st_ino for file in seen} <= set(note["files"])  # a move does not change it, another file has another
    return tuple(there) if same and all(file.st_mtime <= since for file in seen) else ()


def _files(paths: Iterable[Path]) -> list[Path]:
    return [file for path in paths for file in (path, *path.rglob("*")) if not file.is_dir()]


@contextlib.contextmanager
def _claimed_folder(out: Path) -> Iterator[_Claim]:
    """Claim a folder, or a file: what a killed run left inside or beside it is removed."""
    inside, beside = _places(out)
    with _parents(out), contextlib.ExitStack() as held:
        claim = held.enter_context(_claimed(*(inside if out.is_dir() else beside), out))
        if out.is_dir():
            try:  # a run that was killed may have begun before there was a folder
                claim.left += held.enter_context(_claimed(*beside, out)).left
            except BlockingIOError:
                raise
            except OSError:
                pass  # a mount point, say
        yield claim


@contextlib.contextmanager
def _claimed(folder: Path, prefix: str, out: Path, *, wait: bool = False) -> Iterator[_Claim]:
    """Claim an output; what is temporary of it is gone at the end.

    Args:
        folder: where its temporary names stand.
        prefix: of these.
        out: the output, for messages.
        wait: for another process, instead of an error.
    """
    lock, temporary = folder / f"{prefix}{_LOCK}", folder / f"{prefix}{_TEMPORARY}"
    mine: dict[Path, _Claim] = _mine.__dict__.setdefault("claims", {})
    if lock in mine:
        yield mine[lock]
        return
    handle, held = _lock(lock, out, wait)
    if not held:  # a file system without locks: names of our own, and nothing can be said of others'
        temporary = folder / f"{prefix}.{uuid.uuid4().hex[:8]}{_TEMPORARY}"
    try:
        left = _published(handle, out) if held else ()
        if held:
            for path in folder.glob(f"{glob.escape(prefix)}{_MARK}.*"):
                if path != lock:
                    remove(path)
            if not left:
                os.ftruncate(handle, 0)
        mine[lock] = _Claim(temporary, handle, left)
        yield mine[lock]
    finally:
        mine.pop(lock, None)
        with contextlib.suppress(OSError):
            remove(temporary)
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(handle)


def _lock(path: Path, out: Path, wait: bool) -> tuple[int, bool]:
    """Open and lock a file; returns its handle, and whether this file system knows locks."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(out)) from None
        held = _try(handle, wait)
        if held is False:
            os.close(handle)
            raise BlockingIOError(f"another command writes {out}: wait for it, or give another output")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle, bool(held)
        os.close(handle)  # the one who held it has removed it meanwhile


def _try(handle: int, wait: bool) -> bool | None:
    """Lock an open file; False where another process holds it, None where the file system knows no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None


@contextlib.contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders above a path; those made go again where nothing is in them at the end."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()


# --- moving into a folder that exists ------------------------------------------------------------------------------


def _move_into(source: Path, out: Path, replaced: Sequence[Path] = ()) -> None:
    """Move the files of one folder into another, so that what stands there on the way does not load.

    An error or Ctrl-C on the way puts everything back to where it was.

    Args:
        source: with the new files.
        out: may hold older ones.
        replaced: what else in ``out`` goes.

    Raises:
        FileExistsError: a folder in the place of a file, or a file in that of a folder; nothing was moved.
    """
    new = sorted(source.rglob("*"), key=lambda path: (path.name in CONFIGS, path.suffix == ".json", path.name))
    for path in new:
        place = out / path.relative_to(source)
        if place.exists() and place.is_dir() != path.is_dir():
            raise FileExistsError(f"{place} is in the way: it is a {'folder' if place.is_dir() else 'file'}")
    old, moved = source.with_name(source.name.replace(_TEMPORARY, f"{_MARK}.old")), []

    def move(path: Path, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        moved.append((path, to))
        os.replace(path, to)

    try:
        for path in _retired({path.name for path in source.iterdir()}, out, replaced):
            move(path, old / path.relative_to(out))
        for path in new:
            place = out / path.relative_to(source)
            if path.is_dir():
                continue
            if place.exists() or place.is_symlink():
                move(place, old / path.relative_to(source))
            move(path, place)
    except BaseException:
        for path, to in reversed(moved):
            with contextlib.suppress(FileNotFoundError):  # the move that failed
                os.replace(to, path)
        remove(old)
        raise
    remove(old)


def _retired(new: set[str], out: Path, replaced: Sequence[Path]) -> list[Path]:
    """Return what has to go before new files of these names come: the old config first."""
    names = [name for name in CONFIGS if name in new]
    if "config.json" in new:  # a whole model; an adapter leaves the base model beside it alone
        names += [CONFIGS[1], *(path.name for pattern in _STALE for path in out.glob(pattern))]
    elif CONFIGS[1] in new:
        names += [path.name for path in out.glob("adapter_model.*")]
    paths = [out / name for name in dict.fromkeys(names) if (out / name).exists()]
    return [*dict.fromkeys((*paths, *replaced))]


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; what is not there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
