"""Claims on an output: one process at a time writes it, and the next one finds what a killed process left.

While something is written, two hidden names stand beside it: what is written so far (``*.rope-patch.tmp``) and a lock
(``*.rope-patch.lock``) that the operating system lets go when its process ends, however it ends. Before a new folder
appears, the lock's file lists what will be in it. So a lock file that no process holds means that the process was
killed before it reported the folder.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

MARK = ".rope-patch"
TEMPORARY, LOCK = f"{MARK}.tmp", f"{MARK}.lock"


@dataclass
class Claim:
    """An output that this process alone writes.

    Attributes:
        temporary: a path that no other process uses, with nothing there.
        handle: of the lock; None on Windows and on a file system without locks.
        left: the files there, where this same command wrote them and was then killed.
    """

    temporary: Path
    handle: int | None
    left: tuple[Path, ...]

    def say(self, new: Iterable[Path]) -> None:
        """Record what is about to be moved to an empty place, so that the same command recognizes it after a kill."""
        if self.handle is None:  # nobody could tell a killed process from one that still writes
            return
        files = [file.lstat().st_ino for file in _files((*new, *self.left))]
        text = json.dumps({"command": sys.argv, "files": files}).encode()
        os.pwrite(self.handle, text, 0)
        os.ftruncate(self.handle, len(text))


_held = threading.local()
"""The claims of this thread: work on the way to an output may claim it before the output itself is written."""


def _places(out: Path) -> tuple[tuple[Path, str], tuple[Path, str]]:
    """Return where the temporary files of an output stand, inside and beside it, and the prefix of their names."""
    return (out, ""), (out.parent, f".{out.name}")


def left_by_a_kill(out: Path) -> bool:
    """Tell whether everything at an output was written by this same command, which was then killed."""
    out = Path(os.path.realpath(out))
    mine: dict[Path, Claim] = _held.__dict__.get("claims", {})
    for lock in (place / f"{prefix}{LOCK}" for place, prefix in _places(out)):
        if lock in mine:
            if mine[lock].left:
                return True
            continue
        with contextlib.suppress(OSError), lock.open("rb") as file:
            if _try(file.fileno(), wait=False) and _noted(file.fileno(), out):
                return True
    return False


def _noted(handle: int, out: Path) -> tuple[Path, ...]:
    """Return what this command recorded in its lock before a kill, if that is all there is, and unchanged."""
    text, since = os.pread(handle, 1 << 20, 0), os.fstat(handle).st_mtime
    note = json.loads(text) if text else {}
    if note.get("command") != sys.argv or not out.exists():
        return ()
    outputs = [path for path in out.iterdir() if MARK not in path.name] if out.is_dir() else [out]
    states = [file.lstat() for file in _files(outputs)]
    same = {file.st_ino for file in states} <= set(note["files"])  # a move does not change it, another file has another
    return tuple(outputs) if same and all(file.st_mtime <= since for file in states) else ()


def _files(paths: Iterable[Path]) -> list[Path]:
    return [file for path in paths for file in (path, *path.rglob("*")) if not file.is_dir()]


@contextlib.contextmanager
def claim_folder(out: Path) -> Iterator[Claim]:
    """Claim a folder, or a file: what a killed run left inside or beside it is removed."""
    inside, beside = _places(out)
    with make_parents(out), contextlib.ExitStack() as held:
        claim = held.enter_context(claim_output(*(inside if out.is_dir() else beside), out))
        if out.is_dir():
            try:  # a run that was killed may have begun before there was a folder
                claim.left += held.enter_context(claim_output(*beside, out)).left
            except BlockingIOError:
                raise
            except OSError:
                pass  # a mount point, say
        yield claim


@contextlib.contextmanager
def claim_output(folder: Path, prefix: str, out: Path, *, wait: bool = False) -> Iterator[Claim]:
    """Claim an output; its temporary files are deleted at the end.

    Args:
        folder: where its temporary names stand.
        prefix: of these.
        out: the output, for messages.
        wait: for another process, instead of an error.
    """
    lock, temporary = folder / f"{prefix}{LOCK}", folder / f"{prefix}{TEMPORARY}"
    mine: dict[Path, Claim] = _held.__dict__.setdefault("claims", {})
    if lock in mine:
        yield mine[lock]
        return
    handle = _lock(lock, out, wait)
    if handle is None:  # use unique names: other processes cannot be detected
        temporary = folder / f"{prefix}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
    try:
        left = () if handle is None else _noted(handle, out)
        if handle is not None:
            for path in folder.glob(f"{glob.escape(prefix)}{MARK}.*"):
                if path != lock:
                    remove(path)
            if not left:
                os.ftruncate(handle, 0)
        mine[lock] = Claim(temporary, handle, left)
        yield mine[lock]
    finally:
        mine.pop(lock, None)
        with contextlib.suppress(OSError):
            remove(temporary)
        if handle is not None:
            with contextlib.suppress(OSError):
                lock.unlink()
            os.close(handle)


def _lock(path: Path, out: Path, wait: bool) -> int | None:
    """Open and lock a file, and return its handle; None, and no file, on Windows and a file system without locks."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(out)) from None
        held = _try(handle, wait)
        if held is False:
            os.close(handle)
            raise BlockingIOError(f"another command writes {out}: wait for it, or give another output")
        if held is None:
            os.close(handle)  # first: Windows deletes no open file
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # the process that held it has deleted it in the meantime


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
def make_parents(path: Path) -> Iterator[None]:
    """Create the parent folders of a path; new ones that are empty at the end are deleted."""
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents; do nothing if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
