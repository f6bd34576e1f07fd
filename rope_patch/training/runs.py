"""The output folder of a run: the run that it belongs to, and the checkpoint to resume from."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils.generic import flatten_dict

from rope_patch.checkpoints.adapters import CONFIG_FILE, file_hash
from rope_patch.checkpoints.tokenizer_files import TOKENIZER_FILES
from rope_patch.checkpoints.weight_files import model_files
from rope_patch.evaluation.tasks import TASKS
from rope_patch.methods import as_method
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import to_dict
from rope_patch.registry import is_built_in
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import HIDDEN_MARK, locked_output, remove, write_atomically
from rope_patch.runtime.parallel import from_first_process
from rope_patch.runtime.result_cache import key
from rope_patch.training.documents import text_files
from rope_patch.training.models import bundled_folder_or_name

SETTINGS_FILE = "run.json"
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class RunFolder:
    """A run's output folder, and what an earlier command left in it.

    Attributes:
        out: the folder that the adapter is written to.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        results: the results, if the run is finished; None otherwise.
    """

    out: Path
    checkpoint: Path | None = None
    results: dict[str, Any] | None = None

    @property
    def work(self) -> Path:
        """The folder of checkpoints and logs."""
        return self.out / "work"

    def begin(self, options: RecipeOptions) -> None:
        """Delete what an earlier run left and write what identifies this one, unless a checkpoint is resumed.

        The first of several processes does it, and the others wait.
        """

        def write() -> None:
            # Results first: if this is interrupted, the folder must not look finished.
            remove(self.out / RESULTS_FILE)
            remove(self.work)
            self.work.mkdir(parents=True)
            write_atomically(self.work / SETTINGS_FILE, json.dumps(identity(options), indent=1) + "\n")

        if self.checkpoint is None:
            from_first_process(write)


@contextlib.contextmanager
def run_folder(options: RecipeOptions, *, restart: bool = False) -> Iterator[RunFolder]:
    """Claim the output folder of a run for this command, and say what an earlier one left in it.

    Args:
        options: the options of the run.
        restart: whether to delete an earlier run of this folder.

    Raises:
        ValueError: the folder holds another run or other files, or the method or task is unknown.
        BlockingIOError: another command works in it.
    """
    as_method(options.patch.method or "default")  # a wrong name is refused before anything is loaded
    TASKS.find(options.evaluation.task)
    PartialState()  # connects the processes, which from_first_process needs
    with contextlib.ExitStack() as stack:

        def claim() -> RunFolder:
            stack.enter_context(locked_output(options.output.expanduser()))
            return inspect_folder(options, restart=restart)

        # The first process alone locks the folder: a second process would be refused as another command.
        yield from_first_process(claim)


def identity(options: RecipeOptions) -> dict[str, Any]:
    """Return what identifies a run: its options by name, the number of processes, and digests of what it reads.

    There are digests of the files of model, tokenizer and texts, of which every byte is read, as in loading, and of
    code: of methods that are not built in, and of the task. What is on the hub has none. The folder of the run is left
    out, since it may be moved.
    """
    values: dict[str, Any] = flatten_dict(to_dict(options)) | {"processes": int(os.environ.get("WORLD_SIZE", 1))}
    del values["output"]
    base = Path(bundled_folder_or_name(options.model.name))
    weights = model_files(base) or sorted(base.glob("pytorch_model*.bin"))
    code = base.glob("*.py") if options.model.trust_remote_code else ()
    files = {
        "model.name": [base, base / CONFIG_FILE, *weights, *(base / name for name in TOKENIZER_FILES), *code],
        "data.source": text_files(options.data.source),
        "evaluation.text": text_files(options.evaluation.spec.text or "builtin"),
        "evaluation.task": [Path(options.evaluation.task).expanduser()],  # which may be a file of questions
        "evaluation.haystack": text_files(options.evaluation.spec.haystack or "builtin"),
    }
    for name, paths in files.items():
        hashes = [file_hash(path) for path in paths if path.is_file()]
        if hashes:
            values[f"contents of {name}"] = key(files=hashes)
    method = as_method(options.patch.method or "default")
    own = [step for step in getattr(method, "steps", [method]) if not is_built_in(step)]
    for name, objects in {"patch.method": own, "evaluation.task": [TASKS.find(options.evaluation.task)]}.items():
        values[f"code of {name}"] = key(code=[_code_of(type(one)) for one in objects])
    return values


def _code_of(kind: type) -> str:
    """Return the source of the file that defines a class, or of the class alone where it is in a notebook."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:
        return inspect.getsource(kind)
    return Path(file).read_text(encoding="utf-8")


def inspect_folder(options: RecipeOptions, *, restart: bool) -> RunFolder:
    """Return what the output folder of a run holds; nothing is changed.

    Args:
        options: the options of the run.
        restart: whether to delete an earlier run of this folder.

    Raises:
        ValueError: the folder holds another run or other files.
    """
    out = options.output.expanduser()
    path = out / "work" / SETTINGS_FILE
    if not path.is_file():
        # Hidden files are what an interrupted write of this package leaves, so they are no one's work.
        if out.is_file() or any(HIDDEN_MARK not in file.name for file in out.rglob("*") if file.is_file()):
            raise ValueError(f"output: {out} holds files that are not of a run: give a new or empty folder")
        return RunFolder(out)
    earlier = read_json(path)
    checkpoint = last_checkpoint(out / "work", below=options.max_steps)
    results = None
    if (out / RESULTS_FILE).is_file() and any(out.glob("*.safetensors")):  # without weights it is run again
        results = read_json(out / RESULTS_FILE)
    now = identity(options)
    changes = [
        f"{name}={earlier.get(name)} (now {now.get(name)})"
        for name in sorted({*earlier, *now})
        if earlier.get(name) != now.get(name)
    ]
    if restart or (changes and checkpoint is None and results is None):  # in the second case no work is lost
        return RunFolder(out)
    if changes:
        raise ValueError(
            f"{out} holds a run with {'; '.join(changes)}: choose another output, or --restart to delete that run"
        )
    return RunFolder(out, checkpoint, results)


def last_checkpoint(work: Path, below: int = 0) -> Path | None:
    """Return the last complete checkpoint of a run, or None.

    One that is not before step ``below`` is skipped, unless that is 0: a Trainer that is resumed after its last step
    trains one more.

    Trainer writes its state after weights, optimizer and random state, so a checkpoint without it was cut short by a
    kill and is skipped. With several processes the kill may have come while another one wrote its random state; Trainer
    continues without that.
    """
    steps: dict[int, Path] = {}
    for path in work.glob("checkpoint-*"):
        with contextlib.suppress(OSError):
            read_json(path / TRAINER_STATE_NAME)
            step = int(path.name.rpartition("-")[2])
            if below < 1 or step < below:
                steps[step] = path
    if not steps:
        return None
    return steps[max(steps)]
