"""One run from options to a verified adapter with its scores: what the recipe, the studies and ``make adapt`` call."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.trainer import TRAINER_STATE_NAME

from rope_patch import __version__, checkpoints
from rope_patch.evaluation.result_cache import ResultCache
from rope_patch.files import write_atomically
from rope_patch.modeling.scoring import fingerprint
from rope_patch.patching.locate import find_rotary
from rope_patch.processes import from_first
from rope_patch.training.card import card
from rope_patch.training.collators import Collator, PackedCollator, PoSECollator, RandPosCollator
from rope_patch.training.judging import Judge, Judgement
from rope_patch.training.models import load_model, prepare, resolve
from rope_patch.training.options import FIT, Options
from rope_patch.training.runs import RESULTS, Run, begun, check_base, look, note
from rope_patch.training.sources import Rows, make_rows, reading_processes
from rope_patch.training.tables import FITTED, TableTraining, begun_with, check_table, fit_table
from rope_patch.training.trainer import LongTrainer

SCHEMA = 1
_CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)  # later releases call it by the first

OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
"""What transformers calls them, where it has another name."""


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        folder: the adapter (or model), loaded by :func:`rope_patch.load`.
        results: the contents of ``results.json``: options, command, scores before and after, the curve. Empty in all
            processes but the first.
        again: it was finished before, and nothing was run.
    """

    folder: Path
    results: dict[str, Any]
    again: bool = False


def finetune(options: Options, *, command: str = "", restart: bool = False) -> Result:
    """Train as the options say, and leave an adapter that cannot be loaded onto the wrong positions.

    ``options.output`` gets the adapter (or model) with its patch record, the tokenizer, ``results.json``,
    ``evaluation.json`` (every prompt and text position that was judged) and a model card; under ``work``: rows,
    checkpoints, TensorBoard logs. A run that was interrupted goes on from its last whole checkpoint; one that is
    finished is returned as it is.

    Args:
        options: of the run.
        command: that started it, for the card.
        restart: throw away what an earlier run left in the output folder.

    Raises:
        ValueError: options that do not fit the model or the data, or an output folder that holds another run.
        PatchError: the patch does not fit the model.
        torch.OutOfMemoryError: with advice from the plan.
    """
    processes = reading_processes()
    first = int(os.environ.get("RANK", 0)) == 0
    _check_device(options)
    source = resolve(options.model.name)
    args = arguments(options, Path(options.output).expanduser() / "work")

    def found() -> Run:
        return look(options, processes, source=source, restart=restart)

    PartialState()  # has the processes know of each other
    run = from_first(found)
    if run.results is not None:
        return Result(run.out, run.results if first else {}, again=True)
    model, tokenizer = load_model(options.model, options.train.precision)
    identity = from_first(lambda: fingerprint(model))  # FSDP may give the others no weights to look at
    fitting = options.patch.method == FIT
    if fitting or options.patch.trainable:
        check_table(model, options)
    if not fitting:
        model = prepare(model, options)
        if options.patch.trainable:
            TableTraining(model, options.patch.learning_rate)  # refuses what cannot be, while nothing is written
    check_base(run, model, identity)
    judge = Judge(options.evaluation, options.evaluation_lengths, tokenizer)
    with contextlib.ExitStack() as held:
        from_first(lambda: held.enter_context(begun(run, identity, found)))
        if fitting:
            done = run.checkpoint
            method = fit_table(model, tokenizer, options, run.work) if done is None else begun_with(done)
            model = prepare(model, options, method)
            check_base(run, model, identity)
        return _train(options, run, args, model, tokenizer, judge, identity, command, processes, first)


def _train(
    options: Options,
    run: Run,
    args: TrainingArguments,
    model: Any,
    tokenizer: Any,
    judge: Judge,
    identity: str,
    command: str,
    processes: int,
    first: bool,
) -> Result:
    out, work, checkpoint = run.out, run.work, run.checkpoint

    def packed() -> str:
        name = make_rows(options, tokenizer, work, processes=processes, known=run.rows).name
        if checkpoint is None:
            note(run, identity, rows=name)
        return name

    rows = make_rows(options, tokenizer, work, processes=processes, known=from_first(packed))
    judged = Judged(judge, work / "judged.jsonl")
    args.eval_on_start = options.evaluation.before and checkpoint is None
    trainer = build_trainer(model, args, rows, options, tokenizer, judged, checkpoint)
    clock = Clock(work / "seconds.json", checkpoint is not None)
    trainer.add_callback(clock)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trained: Any = trainer.model
    state = _whole_state(trainer)
    if first:  # before it is judged: a judgement that fails costs no adapter
        given: dict[str, Any] = {} if state is None else {"state_dict": state}
        checkpoints.save(trained, out, tokenizer=tokenizer, **given)
    final = judged.final(trained, trainer.state)
    trainer.accelerator.wait_for_everyone()
    if not first:
        return Result(out, {})
    results = _results(options, trainer, rows, judged, final, clock.seconds, command, processes)
    scores = {"before": judged.before.get("judged"), "after": _to_json(final)}
    write_atomically(out / "evaluation.json", json.dumps(scores, allow_nan=False))
    write_atomically(out / "README.md", card(results, final))
    write_atomically(out / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")
    return Result(out, results)


class Clock(TrainerCallback):
    """Counts the seconds of a run over all its parts; what was lost to a kill does not count.

    Args:
        path: where they are kept.
        resumed: the run goes on.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        kept = resumed and path.is_file()
        self.began = time.time() - (json.loads(path.read_text(encoding="utf-8")) if kept else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds so far, evaluations included."""
        return time.time() - self.began

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep them with each checkpoint."""
        if state.is_world_process_zero:
            write_atomically(self.path, json.dumps(round(self.seconds, 1)))


def arguments(options: Options, folder: Path) -> TrainingArguments:
    """Return transformers' arguments for these options.

    Raises:
        ValueError: a scheduler that transformers does not know, or a precision this machine has not.
    """
    train, every = options.train, options.evaluation.every
    checkpointing: dict[str, Any] = {_CHECKPOINTING: train.checkpointing}
    checkpointing[f"{_CHECKPOINTING}_kwargs"] = {"use_reentrant": False}
    warmup = round(train.warmup * train.steps) if train.warmup < 1 else int(train.warmup)
    return TrainingArguments(
        str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=train.batch,
        gradient_accumulation_steps=train.accumulate,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.scheduler,
        warmup_steps=warmup,
        optim=OPTIMIZERS.get(train.optimizer, train.optimizer),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        bf16=train.precision == "bfloat16",
        fp16=train.precision == "float16",
        **checkpointing,
        use_liger_kernel=train.liger,
        # Its fused loss and rotary kernels would take the place of ours.
        liger_kernel_config={"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False},
        seed=train.seed,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=train.keep,
        eval_strategy="steps" if every else "no",
        eval_steps=every or None,
        metric_for_best_model="score" if every else None,
        greater_is_better=True if every else None,
        load_best_model_at_end=bool(every),
        logging_steps=train.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a loss that is no number is shown as it is
        report_to=["tensorboard"] if is_tensorboard_available() else [],
        ddp_find_unused_parameters=False,
        ddp_timeout=6 * 3600,  # seconds; the others wait while the first packs rows
        use_cpu=not torch.cuda.is_available(),
    )


def build_trainer(
    model: Any,
    args: TrainingArguments,
    rows: Rows,
    options: Options,
    tokenizer: Any,
    judge: Any = None,
    checkpoint: Path | None = None,
) -> LongTrainer:
    """Return the trainer of a run: rows, positions, early stop."""
    stop = []
    if options.evaluation.patience:
        stop.append(EarlyStoppingCallback(options.evaluation.patience))
        if checkpoint is not None:  # Trainer begins to count anew
            state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            kept = state["stateful_callbacks"].get("EarlyStoppingCallback", {}).get("attributes", {})
            stop[0].early_stopping_patience_counter = kept.get("early_stopping_patience_counter", 0)
    table = TableTraining(model, options.patch.learning_rate) if options.patch.trainable else None
    return LongTrainer(model, args, rows, collator(options, tokenizer), table=table, judge=judge, callbacks=stop)


class Judged:
    """A judge that keeps every judgement on disk, so that a resumed run still has the first.

    Args:
        judge: measures.
        path: of the file.
    """

    def __init__(self, judge: Judge, path: Path) -> None:
        self.judge, self.log = judge, ResultCache(path)
        self.made: dict[int, Judgement] = {}

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """Measure a model, and return the numbers that the Trainer logs."""
        found = self.made[step] = self.judge(model)

        def keep() -> dict[str, float]:
            self.log[str(step)] = {"metrics": found.metrics(), "judged": _to_json(found)}
            return found.metrics()

        return from_first(keep)  # all decide by the same numbers which checkpoint is best

    @property
    def before(self) -> dict[str, Any]:
        """What was measured before training; empty where nothing was."""
        found: dict[str, Any] = self.log.get("0", {})
        return found

    def final(self, model: Any, state: Any) -> Judgement:
        """Return the judgement of the model that is kept: the best one was measured already."""
        step = best_step(state)
        step = state.global_step if step is None else step
        return self.made[step] if step in self.made else self.judge(model)


def best_step(state: Any) -> int | None:
    """Return the step of the checkpoint that Trainer loads at the end; None where it loads none."""
    best = state.best_model_checkpoint
    return None if best is None else int(Path(best).name.rpartition("-")[2])


def collator(options: Options, tokenizer: Any) -> Collator:
    """Return what gives the rows their positions and masks."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    seed, target = options.train.seed, options.target_length
    match options.data.positions, options.data.boundaries:
        case "pose", _:
            return PoSECollator(pad, seed, target=target, chunks=options.data.chunks)
        case "randpos", _:
            return RandPosCollator(pad, seed, target=target)
        case _, "apart":
            return PackedCollator(pad, seed)
    return Collator(pad, seed)


def _check_device(options: Options) -> None:
    packed = options.model.quantization != "none"
    if packed and not torch.cuda.is_available() and (options.evaluation.every or options.evaluation.before):
        raise ValueError(
            "bitsandbytes on a CPU packs quantized weights anew when a model is first evaluated, and trains it wrongly "
            "after that: set evaluation.every=0 and evaluation.before=false, so that only the end is judged"
        )
    if packed and options.train.liger:
        raise ValueError("train.liger replaces MLPs that model.quantization would pack: use one of the two")


def _to_json(found: Judgement) -> dict[str, Any]:
    """A judgement as JSON: every prompt, every position bucket of every window."""
    return {
        "retrieval": asdict(found.retrieval),
        "perplexity": None if found.perplexity is None else asdict(found.perplexity),
    }


def _whole_state(trainer: LongTrainer) -> dict[str, Any] | None:
    """The weights gathered from all devices, where each holds a share of them."""
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return None
    state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return state


def _results(
    options: Options,
    trainer: LongTrainer,
    rows: Rows,
    judged: Judged,
    final: Judgement,
    seconds: float,
    command: str,
    processes: int,
) -> dict[str, Any]:
    state, trained = trainer.state, trainer.model
    record = None if trained is None else find_rotary(trained).record
    fitted = Path(str(trainer.args.output_dir)) / FITTED
    before, after = judged.before.get("metrics"), final.metrics()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    worse = before is not None and after["score"] < before["score"]
    if worse:
        warnings.warn("after training the model scores lower than before: the card says so", stacklevel=2)
    return {
        "schema": SCHEMA,
        "command": command or " ".join(sys.argv),
        "options": options.to_dict(),
        "base": resolve(options.model.name) if options.model.name != resolve(options.model.name) else None,
        "patch": None if record is None else str(record.to_method()),
        "fit": json.loads(fitted.read_text(encoding="utf-8")) if fitted.is_file() else None,
        "steps": state.global_step,
        "best_step": best_step(state),
        "target_length": (record.target_length if record else None) or options.target_length,
        "worse": worse,
        "tokens": rows.tokens(state.global_step * options.train.batch * options.train.accumulate * processes),
        "seconds": round(seconds, 1),
        "before": before,
        "curve": [
            {"step": step, **judged.log[str(step)]["metrics"]}
            for step in sorted(map(int, judged.log))
            if step <= state.global_step
        ],
        "after": after,
        "losses": [{"step": e["step"], "loss": e["loss"]} for e in state.log_history if "loss" in e],
        "environment": {
            "rope_patch": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device,
            "processes": processes,
        },
    }
