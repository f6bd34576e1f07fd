"""The output folder of a run: the run that it belongs to, and the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.generic import flatten_dict

from rope_patch.checkpoints.adapters import CONFIG_FILE, file_hash
from rope_patch.checkpoints.tokenizer_files import TOKENIZER_FILES
from rope_patch.checkpoints.weight_files import model_files
from rope_patch.frequencies import geometric
from rope_patch.methods import as_method
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import to_dict
from rope_patch.registry import is_built_in
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import HIDDEN_MARK, remove, write_atomically
from rope_patch.runtime.result_cache import key
from rope_patch.tables import RotaryTable
from rope_patch.training.models import bundled_folder_or_name
from rope_patch.training.pack_rows import rows_per_step, text_files

SETTINGS_FILE = "run.json"
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class RunFolder:
    """A run's output folder, and what an earlier command left in it.

    Attributes:
        out: the folder that the adapter is written to.
        settings: the settings that identify the run: its options, and the number of rows in a step. The folder is not
            among them, since it may be moved.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        results: the results, if the run is finished; None otherwise.
    """

    out: Path
    settings: dict[str, Any]
    checkpoint: Path | None = None
    results: dict[str, Any] | None = None

    @property
    def work(self) -> Path:
        """The folder of rows, checkpoints and logs."""
        return self.out / "work"

    def begin(self, options: RecipeOptions) -> None:
        """Delete what an earlier run left and write what identifies this one, unless a checkpoint is resumed."""
        if self.checkpoint is None:
            # Results first: if this is interrupted, the folder must not look finished.
            remove(self.out / RESULTS_FILE)
            remove(self.work)
            self.work.mkdir(parents=True)
            settings = {**self.settings, "contents": contents(options)}
            write_atomically(self.work / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")


def contents(options: RecipeOptions) -> dict[str, str]:
    """Return digests of the files of model and tokenizer, of texts and of a method's table, by the name of the option.

    Every byte is read, as in loading. What is on the hub has none, and neither has a method that is built in.
    """
    digests = {}
    method = as_method(options.patch.method or "default")
    if not all(map(is_built_in, getattr(method, "steps", [method]))):
        # The code of a user's own method may change under its name: it is asked what it makes of a table.
        plain = RotaryTable(geometric(1e4, 128), 1.0, 1e4, "default", 4096)
        try:
            digests["patch.method"] = method.on_tables([plain], options.target_length)(plain).fingerprint
        except ValueError as error:  # it is for other tables
            digests["patch.method"] = str(error)
    base = Path(bundled_folder_or_name(options.model.name))
    weights = model_files(base) or sorted(base.glob("pytorch_model*.bin"))
    code = base.glob("*.py") if options.model.trust_remote_code else ()
    files = {
        "model.name": [base, base / CONFIG_FILE, *weights, *(base / name for name in TOKENIZER_FILES), *code],
        "data.source": text_files(options.data.source),
        "evaluation.text": text_files(options.evaluation.spec.text or "builtin"),
        "evaluation.haystack": text_files(options.evaluation.spec.haystack or "builtin"),
    }
    for name, paths in files.items():
        hashes = [file_hash(path) for path in paths if path.is_file()]
        if hashes:
            digests[name] = key(files=hashes)
    return digests


def inspect_folder(options: RecipeOptions, *, restart: bool) -> RunFolder:
    """Return what the output folder of a run holds; nothing is changed.

    Args:
        options: the options of the run.
        restart: whether to delete an earlier run of this folder.

    Raises:
        ValueError: the folder holds another run or other files.
    """
    out = options.output.expanduser()
    settings = {"rows_per_step": rows_per_step(options), **to_dict(options)}
    del settings["output"]
    path = out / "work" / SETTINGS_FILE
    if not path.is_file():
        # Hidden files are what an interrupted write of this package leaves, so they are no one's work.
        if out.is_file() or any(HIDDEN_MARK not in file.name for file in out.rglob("*") if file.is_file()):
            raise ValueError(f"output: {out} holds files that are not of a run: give a new or empty folder")
        return RunFolder(out, settings)
    earlier = read_json(path)
    checkpoint = last_checkpoint(out / "work")
    results = None
    if (out / RESULTS_FILE).is_file() and any(out.glob("*.safetensors")):  # without weights it is run again
        results = read_json(out / RESULTS_FILE)
    changes = _changes(earlier, settings, contents(options))
    if restart or (changes and checkpoint is None and results is None):  # in the second case no work is lost
        return RunFolder(out, settings)
    if changes:
        raise ValueError(f"{out} holds a run with {changes}: choose another output, or --restart to delete that run")
    return RunFolder(out, settings, checkpoint, results)


def last_checkpoint(work: Path) -> Path | None:
    """Return the last complete checkpoint of a run, or None.

    Trainer writes its state after weights, optimizer and random state, so a checkpoint without it was cut short by a
    kill and is skipped. With several processes the kill may have come while another one wrote its random state; Trainer
    continues without that.
    """
    steps: dict[int, Path] = {}
    for path in work.glob("checkpoint-*"):
        with contextlib.suppress(OSError):
            read_json(path / TRAINER_STATE_NAME)
            steps[int(path.name.rpartition("-")[2])] = path
    if not steps:
        return None
    return steps[max(steps)]


def _changes(earlier: dict[str, Any], settings: dict[str, Any], digests: dict[str, str]) -> str:
    """Return what differs between two runs, such as ``train.steps=100 (now 200)``.

    Files that are gone do not count, since the rows are packed.
    """
    stored = earlier.pop("contents", {})  # versions before 0.3 wrote none
    before = flatten_dict(earlier)
    now = flatten_dict(settings)
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    changes = [f"{name}={before.get(name)} (now {now.get(name)})" for name in names]
    changed = [name for name, digest in stored.items() if digests.get(name, digest) != digest]
    return "; ".join(changes + [f"other contents of {name} than now" for name in changed])
