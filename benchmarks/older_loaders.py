"""Check what other releases of transformers read from our folders: the patched tables, or an error.

    python benchmarks/older_loaders.py

saves a tiny model of every family that docs/families.md lists as working, under four methods, and loads each folder in
environments of their own with transformers 4.57.1, the minimum that pyproject.toml states, and a release between. A
folder that loads must give the logits of the patched model, to 1e-3; one whose table a release cannot read must fail
there. The one outcome that counts against us is a folder that loads with other logits, in silence. Families whose
unpatched folder a release reads otherwise are left out of that count, but for one thing: no patched folder may read as
the unpatched one does. Needs a package index, and three minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSIONS = ("4.57.1", "5.9.0", "5.17.0")
METHODS = {
    "abf": {"factor": 50.0},
    "yarn": {"factor": 4.0, "target_length": 256},
    "p_rope": {"p": 0.5},
    "truncated": {"cutoff_low": 0.002, "cutoff_high": 0.3, "floor": 0.05},
}
HERE = Path(__file__).resolve().parent
FAMILIES = HERE / "results" / "families.json"
PLAIN = "unpatched"


def write(root: Path, types: list[str]) -> Iterator[tuple[str, str]]:
    """Save patched models, and beside each folder the logits of the model; yield type and method."""
    import torch
    from safetensors.torch import save_file

    import rope_patch
    from family_models import IDS, tiny_model

    save_file({"ids": IDS}, root / "ids.safetensors")
    for model_type in types:
        for method, params in {PLAIN: {}, **METHODS}.items():
            model, folder = tiny_model(model_type), root / f"{model_type}-{method}"
            try:
                if method == PLAIN:
                    model.save_pretrained(folder)
                else:
                    rope_patch.apply(model, method, **params)
                    rope_patch.save(model, folder)
                with torch.no_grad():
                    logits = model(IDS, use_cache=False).logits.float().contiguous()
            except ValueError:  # the method refuses this model, with a reason
                continue
            save_file({"logits": logits}, f"{folder}.safetensors")
            yield model_type, method


def read(root: Path) -> dict[str, str]:
    """Load every folder and compare its logits; this runs under another transformers, and imports nothing of ours."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity(logging.CRITICAL)
    ids, outcomes, unpatched = load_file(root / "ids.safetensors")["ids"], {}, {}
    folders = (path for path in root.iterdir() if path.is_dir())
    # The unpatched folder of a family comes first: its logits show whether a patched one lost its patch.
    for folder in sorted(folders, key=lambda path: (not path.name.endswith(f"-{PLAIN}"), path.name)):
        family = folder.name.rpartition("-")[0]
        expected = load_file(f"{folder}.safetensors")["logits"]
        try:
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits.float()
            error = float((logits - expected).abs().max()) if logits.shape == expected.shape else float("inf")
            outcomes[folder.name] = "equal" if error < 1e-3 else f"differs by {error:.3g}"
            # The worst outcome: a patched folder that reads as the unpatched one, in silence.
            plain = unpatched.setdefault(family, logits)
            if error >= 1e-3 and plain is not logits and torch.allclose(logits, plain, atol=1e-5):
                outcomes[folder.name] = "loses the patch"
        except Exception as error:
            outcomes[folder.name] = (
                f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            )
    return outcomes


def environment(version: str, folder: Path) -> Path:
    """Make an environment with a release of transformers and the other packages of this one; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # Packages that the new environment lacks are found in this one; its own transformers comes first.
    (Path(site) / "ours.pth").write_text(sysconfig.get_paths()["purelib"])
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"transformers=={version}"]
    subprocess.run(install, check=True)
    return python


def outcome(outcomes: dict[str, str]) -> dict[str, Any]:
    """Count the outcomes of the folders whose unpatched form a release reads correctly."""
    known = {
        name.rpartition("-")[0] for name, result in outcomes.items() if name.endswith(f"-{PLAIN}") and result == "equal"
    }
    counted = {
        name: result
        for name, result in outcomes.items()
        if name.rpartition("-")[0] in known and not name.endswith(f"-{PLAIN}")
    }
    return {
        "families_it_reads": len(known),
        "folders": dict(Counter(result.partition(" ")[0] for result in counted.values())),
        "wrong_in_silence": {
            name: result for name, result in counted.items() if result.startswith(("differs", "loses"))
        },
        "loses_the_patch": sorted(name for name, result in outcomes.items() if result.startswith("loses")),
        "raises": {name: result for name, result in counted.items() if result.startswith("raises")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; those of docs/families.md that work by default")
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "older_loaders.json")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        print(json.dumps(read(given.read)))
        return
    from tqdm import tqdm
    from transformers import __version__
    from transformers.utils import logging

    from family_models import TYPES
    from measuring import command

    logging.disable_progress_bar()
    kinds = {entry["type"]: entry["result"] for entry in json.loads(FAMILIES.read_text())["results"]}
    # The families were measured with the newest release, which knows types that this one may not.
    types = given.types or [name for name, result in kinds.items() if result == "works" and name in TYPES]
    report: dict[str, Any] = {"command": command(), "written_by": __version__, "types": len(types), "read_by": {}}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "folders"
        root.mkdir()
        report["folders"] = sum(method != PLAIN for _, method in tqdm(write(root, types), desc="folders"))
        for version in given.versions:
            python = environment(version, Path(scratch) / version)
            done = subprocess.run([python, __file__, "--read", root], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"transformers {version}: {done.stderr[-2000:]}")
            report["read_by"][version] = outcome(json.loads(done.stdout.splitlines()[-1]))
            print(version, report["read_by"][version]["folders"], report["read_by"][version]["wrong_in_silence"])
    given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
