"""``rope_patch.extend``: look, measure, choose, adapt, write, report."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch.evaluation.compare import UNPATCHED, Comparison, Row, compare, row_name
from rope_patch.evaluation.finished_work import FinishedWork, open_work
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.evaluation.time_budget import FILLED_SHARE, default_tokens, speed
from rope_patch.extending.choose_method import Choice, MethodEvaluator
from rope_patch.extending.result import Extended
from rope_patch.extending.round_sizes import TOO_FEW, Round, rounds_within, windows_read
from rope_patch.extending.train_adapter import MODEL_COPY, Training, plan_training, train_adapter
from rope_patch.extending.write_extended import check_output, write_extended
from rope_patch.methods.scaling import owner_of
from rope_patch.options.extend import CANDIDATES, CANDIDATES_ON_SCALED, ExtendSettings
from rope_patch.options.yaml_and_json import options_from_dict, to_yaml
from rope_patch.patching.install import patched
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.verify import inspect_model, shortened, trained_length
from rope_patch.planning import plan
from rope_patch.runtime import progress
from rope_patch.runtime.captions import duration_text
from rope_patch.runtime.folders import locked_output, write_atomically
from rope_patch.runtime.parallel import alone, from_first_process, processes
from rope_patch.runtime.result_cache import RESULT_CACHE
from rope_patch.tables import choose_layer_types

MEASURING_SHARE = 0.4
"""Share of a budget that is for measuring the candidates, where a training follows."""
FEW_WINDOWS = 4
"""Windows below which an interval is too wide to be useful."""
DEFAULT_PASSES = 15
"""Windows that are read at least where no budget is given: two rounds of the default candidates."""
TRAINING_SHARE = 0.5
"""Share of a budget that is for the training."""


def extend(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output: str | Path,
    overwrite: bool = False,
    tokens: int | None = None,
    **options: Any,
) -> Extended:
    """Find the method that brings a model to a longer context, and write a checkpoint that plain transformers loads.

    Candidates are measured by successive halving: all of them on few windows of text, the better half on twice as
    many, until two are left and differ significantly. A needle lies in each window within the trained context, so that
    one reading measures the perplexity at all positions and asks for the needle at every length. Chosen is the method
    under which right answers are most probable at the target length; where these do not decide, the lowest perplexity
    there does, and then the lowest cost within the trained context. It must not raise perplexity within the trained
    context by more than the tolerance. Where no method will do, nothing is written, and the choice says what would
    help.

    Finished work is kept in ``OUTPUT.work``: after Ctrl-C or a crash the same call goes on where it was.

    Args:
        model: a causal language model that is not patched; it is left as it was.
        tokenizer: the tokenizer of the model.
        output: the folder to write; new or empty unless ``overwrite`` is given.
        overwrite: whether to write into a folder that holds files.
        tokens: the number of tokens that may be read; by default as many as fit into the budget, at the measured speed
            [tokens].
        **options: further options, the fields of :class:`~rope_patch.options.extend.ExtendSettings`, of which
            ``length`` is required: the context to reach [tokens].

    Raises:
        ValueError: a bad option or method, or a model that reaches the length already; raised before anything is
            measured.
        PatchError: the model is patched already.
        BlockingIOError: another run writes this output.
        RuntimeError: plain transformers gives other logits from what was written.

    Example:
        ``extend(model, tokenizer, length=32768, output="llama-32k", budget=1800)``
    """
    name = model.config.name_or_path or type(model).__name__
    settings = options_from_dict(ExtendSettings, {"model": name, **options})
    check_output(settings, Path(output), overwrite)
    run = Run(model, tokenizer, settings, Path(output), tokens)
    with contextlib.ExitStack() as stack:
        # The first process alone: the others would be refused as other commands.
        from_first_process(lambda: bool(stack.enter_context(locked_output(run.work))))
        run.say_what_the_model_is()
        return run.finish(overwrite=overwrite)


class Run:
    """One run of :func:`extend`: the values that its steps share, and the steps.

    Args:
        model: the model to be extended.
        tokenizer: the tokenizer of the model.
        options: the options of the run.
        output: the folder to write.
        tokens: the number of tokens that may be read, as :func:`extend` takes it [tokens].

    Raises:
        ValueError: something about the model, the methods or the text cannot be measured or patched, or no layer that
            rotates sees far enough for a longer context to need a patch.
        PatchError: the model is patched already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: ExtendSettings,
        output: Path,
        tokens: int | None = None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.options = options
        self.output = output
        self.tokens_in_budget = tokens
        self.work = output.with_name(f"{output.name}.work")
        location = locate(model)
        location.check_windowed()
        record = location.record
        if record is not None:
            raise PatchError(
                f"the model is patched already, with {record.to_method()}: give the checkpoint before the patch, or "
                "undo it with rope_patch.restore (rope-patch restore). If its weights were trained under that table, "
                "take rope_patch out of its config.json: the table stays, and is what is extended"
            )
        self.trained_length = trained_length(model)
        if options.length <= self.trained_length:
            raise ValueError(
                f"the model is trained at {self.trained_length} tokens, so {options.length} need no patch: give a "
                "longer length"
            )
        if hasattr(model, "peft_config"):
            raise ValueError("an adapter is on the model: merge it first, with model.merge_and_unload()")
        self.methods = self._fitting(options.methods)
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods must differ from each other, got {', '.join(self.methods)}")
        first, *others = options.evaluation.tasks
        self.suite = self._suite(first)
        self.suites = [self.suite, *map(self.suite.asking, others)]

    def _fitting(self, methods: Sequence[str]) -> list[str]:
        """Return the methods that fit the model, with their factors; default methods that do not fit are left out."""
        fitting = []
        try:
            # Whether the model can be patched at all, before any method is tried.
            with patched(self.model, UNPATCHED, target_length=self.options.length):
                pass
        except ValueError as error:  # its table changes with the length
            raise ValueError(f"{error} (rope-patch compare and rope-patch apply --freeze-at; extend cannot)") from error
        by_default = tuple(methods) == CANDIDATES
        tables = locate(self.model).tables
        scaled = [tables[kind] for kind in choose_layer_types(tables, None) if not tables[kind].is_plain]
        if by_default and scaled:
            own = [owner.name for owner in map(owner_of, scaled) if owner is not None]
            methods = [*dict.fromkeys((*own, *CANDIDATES_ON_SCALED))]
        left_out = defaultdict[str, list[str]](list)
        for name in methods:
            try:
                with patched(self.model, name, target_length=self.options.length) as patch:
                    fitting.append(str(patch.method))
            except ValueError as error:
                if not by_default:
                    raise ValueError(f"{name}: {error}") from error
                left_out[str(error)].append(name)
        for reason, names in left_out.items():
            progress.say(f"left out: {', '.join(names)}: {reason}")
        if methods and not fitting:
            raise ValueError("none of the methods fits the model: name others (methods, --methods)")
        return fitting

    def _suite(self, task: str) -> NeedleSuite:
        """Return the largest suite, of which each round takes a part."""
        length = self.options.length
        lengths = [self.trained_length]
        # The trained length, doubled until well before the target: reports show where a method begins to fail.
        while 2 * lengths[-1] <= 0.75 * length:
            lengths.append(2 * lengths[-1])
        largest = replace(self.options.evaluation, tasks=(task,), lengths=(*lengths, length), windows=64)
        try:
            suite = NeedleSuite(largest, self.tokenizer)
        except ValueError:  # the text has no room for so many windows
            suite = NeedleSuite(replace(largest, windows=None), self.tokenizer)
        if len(suite.windows) < FEW_WINDOWS:
            progress.say(
                f"the text has room for {len(suite.windows)} windows of {length} tokens only, which tell small "
                "differences poorly; a longer one (--text) has more"
            )
        return suite

    def say_what_the_model_is(self) -> None:
        """Say what the model is, and how much memory an answer at the new length takes."""
        length = self.options.length
        inspection = inspect_model(self.model)
        progress.say(
            f"{self.options.model}: {inspection.model_class}, trained at {self.trained_length} tokens; to reach: "
            f"{length} ({length / self.trained_length:g} times)"
        )
        for warning in inspection.warnings:
            progress.say(f"note: {warning}")
        dtype = str(self.model.dtype).removeprefix("torch.")
        try:
            memory = plan(self.model, length=length, dtype=dtype).reading
        except ValueError:  # the plan does not know the shapes of this family
            return
        answer, weights, cache = (memory[part] / 2**30 for part in ("retrieval", "weights", "KV cache"))
        sizes = f"{answer:.2g} GiB in {dtype} (weights {weights:.2g}, KV cache {cache:.2g})"
        progress.say(f"to answer a prompt of {length} tokens takes {sizes}")

    @cached_property
    def finished(self) -> FinishedWork | None:
        """The finished work of the model that is to be extended."""
        return open_work(self.model, self.work / RESULT_CACHE)

    @cached_property
    def speed(self) -> float:
        """How many tokens of windows are read in a second; a run that goes on keeps what it measured at first."""
        spec = self.suite.spec
        return speed(self.model, spec.longest, self.finished, chunk=spec.chunk)

    def plan(self) -> tuple[tuple[Round, ...], Training | None]:
        """Return the rounds and the training that the budget has time for."""
        tokens = self.tokens_in_budget
        options = self.options
        if tokens is None and options.budget is not None:
            tokens = int(FILLED_SHARE * options.budget * self.speed)
        # No larger than the suite; a round that would only repeat the one before is left out.
        most = len(self.suite.windows)
        rounds = tuple(dict.fromkeys(replace(one, windows=min(one.windows, most)) for one in self._rounds(tokens)))
        if not options.train:
            return rounds, None
        share = None if tokens is None else int(TRAINING_SHARE * tokens)
        return rounds, plan_training(self.model, options, self.trained_length, share)

    def _rounds(self, tokens: int | None) -> tuple[Round, ...]:
        """Return the rounds that the budget has time for.

        Raises:
            ValueError: the budget has no time for the smallest first round.
        """
        options = self.options
        candidates = len(self.methods)
        if tokens is None:
            return rounds_within(candidates, max(DEFAULT_PASSES, default_tokens(self.model) / self.suite.spec.longest))
        most = float(tokens)
        if options.train:
            most *= MEASURING_SHARE
        rounds = rounds_within(candidates, (most - self.tokens(())) / self.suite.spec.longest)
        least = self.tokens(rounds[:1])
        if least <= most:
            return rounds
        larger = "a larger budget"
        if options.budget and most >= 1:  # a tenth more than by the measured speed, which differs from run to run
            larger = f"--budget {math.ceil(1.1 * least / most * options.budget / 60)}m"
        raise ValueError(
            f"the first round of {candidates + 1} methods takes {least:,.0f} tokens, and the budget has time for "
            f"{most:,.0f} at the speed measured now: name fewer methods, or give {larger}"
        )

    def tokens(self, rounds: Sequence[Round]) -> int:
        """Return the new tokens of all rounds, with those that :meth:`choose_task` reads at least."""
        tokens = windows_read(tuple(rounds)) * self.suite.spec.longest
        if len(self.suites) > 1:
            tokens += self.trained_length
        return tokens

    def describe(self, rounds: Sequence[Round], training: Training | None) -> list[str]:
        """Return the steps of a run with their tokens, a line each."""
        lines = [f"methods: {', '.join(map(shortened, self.methods))}"]
        total = self.tokens(())
        if len(self.suites) > 1:
            tasks = " or ".join(suite.task for suite in self.suites)
            lines.append(f"needle: {tasks}, the first that the unpatched model answers in a window of {total} tokens")
        for number, one in enumerate(rounds, 1):
            tokens = self.tokens(rounds[:number]) - total
            lines.append(
                f"round {number}: {one.candidates} of them and the unpatched model, windows: {one.windows}; "
                f"{tokens:,} new tokens"
            )
            total += tokens
        lines.append(f"in all: {total:,} tokens, about {duration_text(total / self.speed)} at the speed measured now")
        if rounds[-1].windows <= 2:
            lines.append(TOO_FEW)
        if training is not None:
            lines.append(f"training: {training}, {training.tokens:,} tokens")
            lines.append(f"the adapted model: {rounds[-1].windows * self.suite.spec.longest:,} tokens")
        return lines

    def choose_task(self) -> None:
        """Ask for the first of the tasks that the unpatched model answers within its context, in one window.

        Where it answers none of them, the task whose right answer is most probable is asked.
        """
        if len(self.suites) == 1:
            return
        found = dict[NeedleSuite, tuple[float, float]]()
        for suite in self.suites:
            if found:
                progress.more(self.trained_length)
            probe = suite.smaller(1).asking(suite.task, [self.trained_length])
            with progress.stage(UNPATCHED):
                result = probe.run(self.model, resume=self.finished).retrieval[suite.task]
            found[suite] = result.accuracy(self.trained_length), result.logprob(self.trained_length)
            if result.accuracy(self.trained_length):
                break
        self.suite = max(found, key=found.__getitem__)
        missed = [suite.task for suite in found if not found[suite][0]]
        if missed:
            progress.say(
                f"asks for {self.suite.task}: in a window of {self.trained_length} tokens the unpatched model does not "
                f"answer {' or '.join(missed)}"
            )

    def measure(self, rounds: Sequence[Round]) -> list[Comparison]:
        """Measure the rounds in their order, and return their comparisons."""
        remaining = list(self.methods)
        comparisons = list[Comparison]()
        started = time.monotonic()
        for number, one in enumerate(rounds, 1):
            # The first process decides for all, since they have to measure the same rounds.
            late: bool = from_first_process(partial(self._has_no_time_for, rounds[:number], started))
            if comparisons and late:
                progress.say(f"the budget has no time for round {number}, so the choice rests on those before it")
                break
            suite = self.suite.smaller(one.windows)
            progress.say(
                f"round {number} of {len(rounds)}: {', '.join(shortened(m) for m in remaining)}; windows: {one.windows}"
            )
            measured = rounds[number - 2].windows if comparisons else 0
            # Only new windows were announced. The results of the others are there, which takes their tokens off again.
            progress.more((one.candidates + 1) * measured * suite.spec.longest)
            comparison = compare(self.model, self.tokenizer, [UNPATCHED, *remaining], suite, resume=self.finished)
            comparisons.append(comparison)
            evaluator = self._evaluator(comparison)
            if len(remaining) <= 2 and evaluator.settled():
                if number < len(rounds):
                    progress.say("more text and prompts would hardly change the choice: further rounds are left out")
                break
            if number < len(rounds):
                remaining = evaluator.leaders(rounds[number].candidates)
        return comparisons

    def _evaluator(self, comparison: Comparison) -> MethodEvaluator:
        # A method that will be trained may fail the conditions before.
        return MethodEvaluator(comparison, self.options.tolerance, conditions=not self.options.train)

    def _has_no_time_for(self, rounds: Sequence[Round], started: float) -> bool:
        """Tell whether the last of these rounds, at the speed of those before it, would end behind the budget."""
        if self.options.budget is None or len(rounds) == 1:
            return False
        needed = (time.monotonic() - started) * self.tokens(rounds) / self.tokens(rounds[:-1])
        budget = float(self.options.budget)
        if self.options.train:
            budget *= MEASURING_SHARE
        return needed > budget

    def finish(self, *, overwrite: bool) -> Extended:
        """Measure, choose, train if asked to, and write; finished work is not repeated.

        Args:
            overwrite: whether to write into a folder that holds files.
        """
        options = self.options
        rounds, training = self.plan()
        self.work.mkdir(parents=True, exist_ok=True)
        write_atomically(self.work / "extend.yaml", to_yaml(options))
        self.choose_task()
        comparisons = self.measure(rounds)
        choice = self._evaluator(comparisons[-1]).choose()
        adapter = None
        if training is not None and choice.method is not None:
            adapter, comparisons[-1], choice = self.adapt(choice.method, training, comparisons[-1])
            # The choice after the training may be the method without it, and then there is nothing to merge.
            if choice.chosen is None or not choice.chosen.trained:
                adapter = None
        write_atomically(self.work / "comparison.json", comparisons[-1].to_json())
        if choice.method:
            progress.say(f"chosen: {choice.reason}")
        else:
            progress.say(f"nothing is written: {choice.reason}")
        outcome = Extended(None, choice, tuple(comparisons), self.trained_length, training, self.work, options)
        if choice.method is None or processes()[0] > 0:  # the first process writes for all
            return outcome
        with alone():
            outcome = write_extended(outcome, self.output, self.model, self.tokenizer, adapter, overwrite=overwrite)
        # A second checkpoint, which the same command would write again.
        shutil.rmtree(self.work / MODEL_COPY, ignore_errors=True)
        return outcome

    def adapt(self, method: str, training: Training, comparison: Comparison) -> tuple[Path, Comparison, Choice]:
        """Train an adapter under a method, measure it beside the unadapted model, and choose again."""
        from rope_patch.checkpoints.save_load import load
        from rope_patch.checkpoints.source_files import on_device

        progress.say(f"training under {shortened(method)}: {training}")
        adapter = train_adapter(self.model, self.tokenizer, method, self.options, training, self.work)
        adapted: Any = load(adapter, dtype=self.model.dtype, **on_device(self.model.device)).eval()
        suite = self.suite.smaller(comparison.spec.samples)
        name = row_name(method, trained=True)
        progress.say("measuring the adapted model")
        with progress.stage(name):
            scores = suite.run(adapted, resume=self.work / RESULT_CACHE)
        row = Row(method, scores, inspect_model(adapted).tables, trained=True)
        comparison = replace(comparison, rows=(*comparison.rows, row))
        # Now that the training is over, the conditions hold for the method with it and without.
        return adapter, comparison, MethodEvaluator(comparison, self.options.tolerance).choose()
