"""Learned tables: fit the frequencies of a checkpoint to a longer context, its weights frozen.

The table is trained by gradient descent on the logarithm of its frequencies, over text and retrieval prompts of many
lengths; what is kept is chosen on held-out retrieval first and perplexity second, and is never worse there than the
table it started from. Related: LongRoPE (Ding et al., arXiv:2402.13753) searches the same factors by evolution.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.evaluation.documents import Source, documents, prefix_ids, spread_windows
from rope_patch.evaluation.intervals import paired_shares
from rope_patch.evaluation.journal import Journal, key
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.prompts import Haystack, PromptMaker, find_task
from rope_patch.evaluation.retrieval import check_asked, retrieval
from rope_patch.evaluation.scoring import Reader, fingerprint
from rope_patch.evaluation.text import Corpus, builtin_text
from rope_patch.methods import METHODS, Chain, Method, MethodLike, Table, as_method
from rope_patch.registry import create, did_you_mean
from rope_patch.rotary import RotaryTable
from rope_patch.sites import device_of, find_rotary, in_eval_mode, read_slots
from rope_patch.surgery import Patch, apply
from rope_patch.training.data import NEEDLES
from rope_patch.training.loss import IGNORED, token_loss

T = TypeVar("T")
_PARTS = [f"p_rope:p={p}" for p in (1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.25)]
FAMILIES: Mapping[str, Sequence[str]] = {
    "p_rope": [*_PARTS, *(f"abf:factor={base}+{part}" for base in (10, 50) for part in _PARTS)]
}
"""What ``family`` knows: p of p-RoPE, with the base found, 10 and 50 times it."""
VALIDATION = 0.1
"""Share of the text, at its end, that is never fitted to: what is kept is chosen on it."""
HAY = 1_000_000
"""Characters of the text that needles of training are hidden in."""
LIMIT = 64_000_000
"""Characters read of a text."""
WARM = 1 / 8
"""Share of the steps over which the learning rate rises: Adam's first ones go by the sign of a gradient of noise."""
SCALED = ("pi", "ntk", "yarn", "llama3")
"""Methods whose ``factor`` is the one that the context grows by, and is filled in."""
WORSE, WATCHED = 1.0, 5
"""A fit diverges when the mean loss of so many steps lies so far above that of the first [nats]."""
SEED = 2_000_003
"""Added to the seed of held-out prompts, so that no comparison with a small seed asks the same."""


@dataclass(frozen=True)
class Objective:
    """What is minimised: ``(1 - retrieval) * text + retrieval * answers``, each a mean loss per token.

    Attributes:
        retrieval: weight of the answers of retrieval prompts, in [0, 1).
        prompts: share of the rows that are prompts, in [0, 1).
        task: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        full: share of the steps whose rows have the target length; those of the others are drawn between the trained
            length and the target, evenly on a logarithmic scale.

    Raises:
        ValueError: a share out of its range, or one of ``retrieval`` and ``prompts`` without the other.
    """

    retrieval: float = 0.6
    prompts: float = 0.75
    task: str = "passkey"
    full: float = 0.5

    def __post_init__(self) -> None:
        for name in ("retrieval", "prompts"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 <= self.full <= 1:
            raise ValueError(f"full must be in [0, 1], got {self.full}")
        if bool(self.retrieval) != bool(self.prompts):
            raise ValueError("retrieval and prompts go together: both 0 for text alone")
        find_task(self.task)


@dataclass(frozen=True)
class Constraint:
    """What a fitted table may be.

    Attributes:
        band: no frequency leaves its start by more than this factor; None for no limit.
        monotone: no pair overtakes a faster one.
        curve: the factors on the frequencies follow so many cosines over the pairs, a smooth curve; None for a factor
            of its own per pair.
        scaling: fit the factor on cos and sin, too.

    Raises:
        ValueError: a band of 1 or less, or a curve of no cosine.
    """

    band: float | None = None
    monotone: bool = False
    curve: int | None = None
    scaling: bool = True

    def __post_init__(self) -> None:
        if self.band is not None and not self.band > 1:
            raise ValueError(f"band must be a factor > 1, got {self.band}")
        if self.curve is not None and self.curve < 1:
            raise ValueError(f"curve must be >= 1 cosines, got {self.curve}")


class TrainableTable(nn.Module):
    """A rotary embedding whose tables are parameters, float64: the logarithms of factors on the frequencies.

    It stands in for a :class:`~rope_patch.RotaryTable` while a table is fitted, and computes what that computes. Still
    pairs stay still. The logarithm of a pair that makes many turns within the trained context counts in units of its
    angle there: a percent more of a fast frequency is many radians far away, and steps of one size for all pairs would
    shake the fast ones. A cast would round the parameters, and raises.

    Args:
        module: what it stands in for.
        kinds: the layer types whose tables are fitted.
        constraint: on them.

    Raises:
        ValueError: nothing moves in a table, or ``monotone`` from a table that is not.
    """

    def __init__(self, module: RotaryTable, kinds: Sequence[str | None], constraint: Constraint) -> None:
        super().__init__()
        self.module, self.kinds, self.constraint = (module,), tuple(kinds), constraint
        self.config = module.config
        self.log_factors, self.log_scaling = nn.ParameterList(), nn.ParameterList()
        for kind in kinds:
            slot = module.slots[kind]
            moving = ~frequencies.still(slot.inv_freq)
            count = int(moving.sum())
            if not count:
                raise ValueError(f"all pairs of {slot.path} are still: there is no frequency to fit")
            if constraint.monotone and bool((slot.inv_freq[moving].diff() > 0).any()):
                raise ValueError("monotone needs a start whose pairs are in order, fast to slow")
            size = count if constraint.curve is None else min(constraint.curve, count)
            self.log_factors.append(nn.Parameter(torch.zeros(size, dtype=torch.float64)))
            scaling = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=constraint.scaling)
            self.log_scaling.append(scaling)

    def table(self, kind: str | None) -> tuple[Tensor, Tensor]:
        """Return inv_freq (pairs,) [rad/token] and the attention scaling of a layer type, float64, with gradients."""
        i = self.kinds.index(kind)
        slot, log_factors = self.module[0].slots[kind], self.log_factors[i]
        start = slot.inv_freq.to(log_factors.device, torch.float64)
        moving = ~frequencies.still(start)
        if self.constraint.curve is not None:
            log_factors = _cosines(int(moving.sum()), len(log_factors)).to(log_factors.device) @ log_factors
        if self.constraint.band is not None:
            limit = math.log(self.constraint.band)
            log_factors = limit * torch.tanh(log_factors / limit)
        turns = start[moving] * slot.context / (2 * math.pi)
        fitted = start[moving] * (log_factors / (1 + turns)).exp()
        if self.constraint.monotone:
            fitted = fitted.cummin(0).values
        return start.masked_scatter(moving, fitted), slot.attention_scaling * self.log_scaling[i].exp()

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin as :meth:`RotaryTable.forward <rope_patch.RotaryTable.forward>` does, with gradients."""
        if layer_type not in self.kinds:
            cos, sin = self.module[0](x, position_ids, layer_type)
            return cos, sin
        table, scaling = self.table(layer_type)
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = position_ids[..., None].to(kind) * table.to(x.device, kind)
        angles = torch.cat((angles, angles), dim=-1)
        scaling = scaling.to(x.device, kind)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    def method(self) -> Method:
        """Return the tables as they are now, as a method."""
        made = []
        for kind in self.kinds:
            table, scaling = self.table(kind)
            values = tuple(frequencies.settle(table.detach().float().cpu()).tolist())
            made.append(Table(values, float(scaling.detach()), kind if len(self.kinds) > 1 else None))
        return made[0] if len(made) == 1 else Chain(tuple(made))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrainableTable:
        if fn(torch.empty(0, dtype=torch.float64)).dtype != torch.float64:
            raise TypeError("a cast would round the table that is being fitted: cast the model before, or after")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]


def _cosines(pairs: int, count: int) -> Tensor:
    """Return the first cosines over pairs: (pairs, count) float64."""
    places = (torch.arange(pairs, dtype=torch.float64) + 0.5) / pairs
    return torch.cos(math.pi * places[:, None] * torch.arange(count, dtype=torch.float64))


# --- what is found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A table, and how it did on held-out text and prompts.

    Attributes:
        name: ``"start"``, ``"step 30"``, ``"average"`` (of the second half), ``"halfway"`` (from the start to that).
        method: that puts it in.
        hits: which prompts were answered, by length.
        answers: mean loss of an answer's token over all prompts [nats].
        nll: mean loss of text between the lengths, by the end of the bucket [nats/token].
    """

    name: str
    method: Method
    hits: Mapping[int, tuple[bool, ...]]
    answers: float
    nll: Mapping[int, float]

    @property
    def retrieval(self) -> dict[int, float]:
        """Share of prompts answered, by length."""
        return {length: sum(found) / len(found) for length, found in self.hits.items()}

    def never_worse(self, other: Candidate) -> bool:
        """Whether no fewer prompts are answered in all, at no length surely fewer, and no bucket is predicted worse.

        Surely: the paired 95 % interval of a length's difference lies below 0. A prompt more here and one less there is
        what chance does to equals.
        """
        return (
            sum(map(sum, self.hits.values())) >= sum(map(sum, other.hits.values()))
            and all(paired_shares(self.hits[n], other.hits[n])[1] >= 0 for n in other.hits)
            and all(self.nll[n] <= other.nll[n] for n in other.nll)
        )

    @property
    def rank(self) -> tuple[int, float]:
        """Retrieval first, perplexity second; the larger the better."""
        return sum(map(sum, self.hits.values())), -math.fsum(self.nll.values())


@dataclass(frozen=True, eq=False)
class FittedPatch(Patch):
    """A patch whose table was fitted.

    Attributes:
        candidates: by the start they came from: that start, and what was found from it.
        chosen: name of the one in use.
        losses: of every step, by start [nats].
        stopped: why a fit ended early, by start; empty where it did not.
    """

    candidates: Mapping[str, tuple[Candidate, ...]] = field(default_factory=dict)
    chosen: str = ""
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)


# --- fitting ---------------------------------------------------------------------------------------------------------


def fit(
    model: nn.Module,
    tokenizer: Any,
    data: Source | None = None,
    *,
    target_length: int,
    init: MethodLike | Sequence[MethodLike] = "yarn",
    objective: Objective = Objective(),
    constraint: Constraint = Constraint(),
    steps: int = 60,
    batch_tokens: int | None = None,
    learning_rate: float = 0.02,
    checks: int = 4,
    patience: int = 3,
    windows: int = 8,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 4,
    haystack: str | Path | Haystack | None = None,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    replace: bool = False,
    checkpointing: bool = False,
    seed: int = 0,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    progress: Callable[[str, int], None] = lambda name, tokens: None,
) -> FittedPatch:
    """Fit the tables of a model to a longer context, and leave the best one in place; no weight is touched.

    Args:
        model: a causal language model, bare, quantized or under an adapter.
        tokenizer: its own.
        data: text to fit to; its last tenth is held out, and decides. By default the training part of the built-in one.
        target_length: to fit to; rows have lengths from the trained one up to it [tokens].
        init: the table to start from, or several of them, each fitted and all compared. A bare ``pi``, ``ntk``,
            ``yarn`` or ``llama3`` takes its factor from the lengths.
        objective: what is minimised.
        constraint: what the table may be.
        steps: of Adam, with a learning rate that rises over an eighth of them and falls to 0.
        batch_tokens: of a step, over all processes; two rows of the target by default, 4096 at least [tokens].
        learning_rate: on the logarithms of the frequencies.
        checks: how often the table is judged on the way, the end included.
        patience: checks without a better held-out objective before a fit is stopped.
        windows: of held-out text, as long as the target.
        depths: of the needles of held-out prompts.
        samples: haystacks at each length; the lengths double from the trained one to the target.
        haystack: of the held-out prompts, as in :func:`~rope_patch.evaluation.retrieval.retrieval`; by default the
            held-out text.
        layer_types: which tables are fitted, on mixed models; as :func:`rope_patch.apply` chooses by default.
        freeze_at: as in ``apply``.
        replace: replace an earlier patch, starting again from the base table.
        checkpointing: compute activations again in the backward pass, for memory.
        seed: of rows, crops, prompts.
        resume: file (or mapping) in which finished work is kept: the same call goes on where it was.
        progress: told what is done, and the tokens just read.

    Returns:
        The patch in place; its ``candidates`` say what was measured.

    Raises:
        ValueError: a target below the trained length, a text shorter than it, options that cannot be: before anything
            is changed.
        PatchError: the model is patched already.
    """
    starts = [init] if isinstance(init, str | Method | Mapping) else list(init)
    for name, value in (("steps", steps), ("checks", checks), ("patience", patience), ("windows", windows)):
        if value < (0 if name == "steps" else 1):
            raise ValueError(f"{name} must be >= {0 if name == 'steps' else 1}, got {value}")
    if not starts:
        raise ValueError("init names no table to start from")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}")
    slots, _ = read_slots(find_rotary(model), freeze_at=freeze_at)
    trained = min(slot.context for slot in slots.values())
    if target_length < trained:
        raise ValueError(f"the target of {target_length} tokens lies below the trained length of {trained}")
    wanted = [_start(start, target_length / trained) for start in starts]
    labels = [str(method) for method in wanted]
    if len(set(labels)) < len(labels):
        raise ValueError(f"starts must differ from each other, got {', '.join(labels)}")
    lengths = _doubling(trained, target_length)
    lengths, depths = check_asked(objective.task, "single", lengths, depths, samples, None)
    fitted, held_out = _split(data)
    texts, digest = spread_windows(tokenizer, held_out, target_length, windows)
    rows = _Rows(
        tokenizer, fitted, objective, trained, target_length, batch_tokens or max(4096, 2 * target_length), seed
    )
    judged = _Judging(model, tokenizer, texts, lengths, depths, samples, objective, seed,
                      PromptMaker(tokenizer, haystack or Haystack(held_out, "held-out text")), progress)  # fmt: skip
    for length in lengths:
        judged.maker.prompts(objective.task, length, depths, seed=SEED + seed)
    rows.check()
    kept = Journal(resume) if isinstance(resume, str | Path) else resume
    if _processes()[0]:
        kept = None  # the first process keeps the work of all
    options: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at, "target_length": target_length}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    losses: dict[str, tuple[float, ...]] = {}
    stopped: dict[str, str] = {}
    first = apply(model, wanted[0], replace=replace, **options)
    try:
        with _plain_weights(model):
            for label, method in zip(labels, wanted, strict=True):
                apply(model, method, replace=True, **options)
                about = {
                    "fit": label,
                    "model": fingerprint(model),
                    "text": [digest, rows.digest],
                    "objective": asdict(objective),
                    "constraint": asdict(constraint),
                    "asked": [
                        steps,
                        learning_rate,
                        checks,
                        patience,
                        windows,
                        list(depths),
                        samples,
                        rows.tokens,
                        seed,
                    ],
                }
                run = _Run(model, method, rows, judged, objective, constraint, options, kept, about, progress)
                candidates[label] = run(steps, learning_rate, checks, patience, checkpointing)
                losses[label], stopped[label] = tuple(run.losses), run.stopped
            found = {label: _best(several) for label, several in candidates.items()}
            label = max(found, key=lambda name: found[name].rank)
        last = apply(model, found[label].method, replace=True, **options)
    except BaseException:
        first._state.reinstate()
        raise
    known = {f.name: getattr(last, f.name) for f in fields(Patch)} | {"_state": first._state}  # what restore() gives
    name = f"{label}, {found[label].name}"
    return FittedPatch(**known, candidates=candidates, chosen=name, losses=losses, stopped=stopped)


class _Rows:
    """Rows to fit to; those of a step follow from the seed and the step."""

    def __init__(
        self, tokenizer: Any, text: str, objective: Objective, trained: int, target: int, tokens: int, seed: int
    ) -> None:
        if tokens < target:
            raise ValueError(f"batch_tokens must hold a row of the target's {target} tokens, got {tokens}")
        self.tokenizer, self.text, self.objective, self.seed = tokenizer, text, objective, seed
        self.trained, self.target, self.tokens = trained, target, tokens
        self.prefix = prefix_ids(tokenizer)
        self.digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        start = random.Random(f"hay/{seed}").randrange(max(1, len(text) - HAY))
        self.maker = PromptMaker(tokenizer, Haystack(text[start : start + HAY], "text to fit to"))
        self.needles = NEEDLES if find_task(objective.task).joined else 1

    def check(self) -> None:
        """Raise ValueError where the text has no room for a row of the target, or of prompts."""
        self._crop(random.Random(0), self.target)
        if self.objective.prompts:
            self._prompt(random.Random(0), self.target, 0)

    def __call__(self, step: int, share: int = 0, shares: int = 1) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the rows of a step of one length each: ids, labels and weights, (rows, tokens) each.

        Args:
            step: number of it.
            share: number of this process.
            shares: processes that divide the rows.
        """
        rng = random.Random(f"fit/{self.seed}/{step}")
        length = self.target
        if rng.random() >= self.objective.full:
            length = round(math.exp(rng.uniform(math.log(self.trained), math.log(self.target))))
        count = self.tokens // length
        prompts = math.floor(count * self.objective.prompts + rng.random())  # on average the share asked for
        made = [self._row(random.Random(f"fit/{self.seed}/{step}/{i}"), length, step * count + i, count, i < prompts)
                for i in range(count) if i % shares == share]  # fmt: skip
        if made:
            ids, weights = (torch.tensor([row[i] for row in made]) for i in (0, 1))
            labels = ids.masked_fill(weights == 0, IGNORED)
            size = max(1, self.target // length)
            for low in range(0, len(made), size):
                part = slice(low, low + size)
                yield ids[part], labels[part], weights[part]

    def _row(
        self, rng: random.Random, length: int, number: int, count: int, prompt: bool
    ) -> tuple[list[int], list[float]]:
        """Return ids and weights; over all rows of all steps the weights add up to the objective."""
        weight, share = self.objective.retrieval, self.objective.prompts
        if prompt:
            ids, answer = self._prompt(rng, length, number)
            each = weight / share / count / answer
            return ids, [0.0] * (len(ids) - answer) + [each] * answer
        ids = self._crop(rng, length)
        each = (1 - weight) / (1 - share) / count / (len(ids) - 1)
        return ids, [0.0] + [each] * (len(ids) - 1)

    def _prompt(self, rng: random.Random, length: int, number: int) -> tuple[list[int], int]:
        depths = [rng.random() for _ in range(self.needles)]
        (prompt,) = self.maker.prompts(self.objective.task, length, depths, seed=rng.getrandbits(32), sample=number)
        return list(prompt.ids), prompt.answer

    def _crop(self, rng: random.Random, length: int) -> list[int]:
        """Return a row that begins anywhere in the text."""
        size, characters = length - len(self.prefix), 8 * length
        while True:
            start = rng.randrange(max(1, len(self.text) - characters))
            ids = self.tokenizer(self.text[start : start + characters], add_special_tokens=False, verbose=False)
            if len(ids["input_ids"]) >= size:
                return [*self.prefix, *ids["input_ids"][:size]]
            if characters >= len(self.text):
                raise ValueError(
                    f"a row of {length} tokens does not fit into the text to fit to, which has "
                    f"{len(ids['input_ids'])}: give more text, or a shorter target"
                )
            characters *= 2


@dataclass(eq=False)
class _Judging:
    """Held-out text and prompts, the same for all candidates."""

    model: nn.Module
    tokenizer: Any
    texts: Sequence[Any]
    lengths: Sequence[int]
    depths: Sequence[float]
    samples: int
    objective: Objective
    seed: int
    maker: PromptMaker
    progress: Callable[[str, int], None]

    def __call__(self, name: str, method: Method, kept: MutableMapping[str, Any] | None) -> Candidate:
        """Measure the table in place; the first process does, for all."""
        return _from_first(lambda: self._measure(name, method, kept))

    def _measure(self, name: str, method: Method, kept: MutableMapping[str, Any] | None) -> Candidate:
        def told(tokens: int) -> None:
            self.progress(f"{name}: judging", tokens)

        score = perplexity(
            self.model, self.texts, window=self.lengths[-1], buckets=[0, *self.lengths], resume=kept, progress=told
        )
        found = retrieval(
            self.model,
            self.tokenizer,
            self.objective.task,
            lengths=self.lengths,
            depths=self.depths,
            samples=self.samples,
            seed=SEED + self.seed,
            haystack=self.maker,
            resume=kept,
            progress=told,
        )
        answers = [-found.logprob(length) for length in self.lengths]
        edges = [0, *self.lengths]
        return Candidate(
            name,
            method,
            {length: tuple(sample.correct for sample in found.samples(length)) for length in self.lengths},
            math.fsum(answers) / len(answers),
            {high: math.log(score.between(low, high)) for low, high in itertools.pairwise(edges)},
        )

    def loss(self, candidate: Candidate) -> float:
        """Return the objective of held-out text and prompts."""
        text = math.fsum(candidate.nll.values()) / len(candidate.nll)
        return (1 - self.objective.retrieval) * text + self.objective.retrieval * candidate.answers


class _Run:
    """One start, fitted."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        rows: _Rows,
        judged: _Judging,
        objective: Objective,
        constraint: Constraint,
        options: Mapping[str, Any],
        kept: MutableMapping[str, Any] | None,
        about: Mapping[str, Any],
        progress: Callable[[str, int], None],
    ) -> None:
        self.model, self.method, self.rows, self.judged = model, method, rows, judged
        self.objective, self.options, self.kept, self.about, self.progress = objective, options, kept, about, progress
        self.site = find_rotary(model)
        module: Any = self.site.module
        kinds = [kind for kind in module.slots if kind in self.site.record.layer_types]  # type: ignore[union-attr]
        self.table = TrainableTable(module, kinds, constraint).to(device_of(model))
        self.losses: list[float] = []
        self.stopped = ""

    def __call__(
        self, steps: int, learning_rate: float, checks: int, patience: int, checkpointing: bool
    ) -> tuple[Candidate, ...]:
        """Return the start and what was found from it."""
        table, label = self.table, str(self.method)
        parameters = [p for p in table.parameters() if p.requires_grad]
        adam = torch.optim.Adam(parameters, lr=learning_rate)
        made = [self.judged("start", self.method, self.kept)]
        sums = [torch.zeros_like(p) for p in parameters]  # over the second half, for the average
        stops = sorted({round(steps * (i + 1) / checks) for i in range(checks)} - {0})
        best, waited, low = self.judged.loss(made[0]), 0, 0
        for stop in stops:
            if not self._restore(stop, adam, parameters, sums):
                with self._fitting(checkpointing):
                    for step in range(low, stop):
                        for group in adam.param_groups:
                            group["lr"] = learning_rate * min((step + 1) / math.ceil(WARM * steps), 1 - step / steps)
                        self.losses.append(self._step(step, label, adam, parameters))
                        if self._diverged():
                            break
                        if 2 * step >= steps:
                            for total, p in zip(sums, parameters, strict=True):
                                total += p.detach()
                if not self._diverged():
                    self._keep(stop, adam, parameters, sums)
            if self._diverged():
                self.stopped = f"diverged at step {len(self.losses)} (loss {self.losses[-1]:.3g})"
                break
            low = stop
            made.append(self._judge(f"step {stop}", table.method()))
            loss = self.judged.loss(made[-1])
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited >= patience and stop < steps:
                self.stopped = f"no better after step {stop}"
                break
        counted = sum(2 * step >= steps for step in range(low))
        if counted > 1:
            with torch.no_grad():
                for total, p in zip(sums, parameters, strict=True):
                    p.copy_(total / counted)
            made.append(self._judge("average", table.method()))
            with torch.no_grad():
                for p in parameters:
                    p.mul_(0.5)
            made.append(self._judge("halfway", table.method()))
        return tuple(made)

    def _step(self, step: int, label: str, adam: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> float:
        """Take a step; return its weighted mean loss [nats]."""
        rank, size = _processes()
        reader = Reader(self.model)
        adam.zero_grad()
        total = torch.zeros(2, dtype=torch.float64)  # loss, weight
        for ids, labels, weights in self.rows(step, rank, size):
            ids = ids.to(reader.device)
            hidden = reader.decoder(input_ids=ids, use_cache=False).last_hidden_state
            loss, weight = token_loss(reader, hidden, labels.to(ids.device), weights.to(ids.device))
            torch.autograd.backward(loss)
            total += torch.stack((loss.detach(), weight)).double().cpu()
            self.progress(f"{label}: fitting", ids.numel())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if size > 1:
            total = total.to(reader.device)
            for tensor in (*grads, total):
                torch.distributed.all_reduce(tensor)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        if not all(bool(grad.isfinite().all()) for grad in grads) or not bool(total.isfinite().all()):
            return math.inf
        adam.step()
        return float(total[0] / total[1])

    def _diverged(self) -> bool:
        if self.losses and not math.isfinite(self.losses[-1]):
            return True
        early, late = self.losses[:WATCHED], self.losses[-WATCHED:]
        return len(self.losses) > WATCHED and math.fsum(late) / WATCHED > math.fsum(early) / WATCHED + WORSE

    @contextlib.contextmanager
    def _fitting(self, checkpointing: bool) -> Iterator[None]:
        """Put the trainable table in, freeze the weights; all as it was at the end."""
        model: Any = self.model
        asked = [(p, p.requires_grad) for p in model.parameters()]
        with in_eval_mode(model), contextlib.ExitStack() as stack:
            for p, _ in asked:
                p.requires_grad_(False)
            stack.callback(lambda: [p.requires_grad_(wanted) for p, wanted in asked])
            if checkpointing:
                name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
                getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
                stack.callback(getattr(model, f"{name}_checkpointing_disable"))
                for module in model.modules():  # transformers checkpoints in training mode alone
                    module.training = not isinstance(module, nn.Dropout)
            self.site.put(self.table)
            stack.callback(self.site.put, self.site.module)
            yield

    def _judge(self, name: str, method: Method) -> Candidate:
        apply(self.model, method, replace=True, **self.options)
        try:
            return self.judged(name, method, self.kept)
        finally:
            apply(self.model, self.method, replace=True, **self.options)

    def _keep(self, step: int, adam: torch.optim.Optimizer, parameters: Sequence[Tensor], sums: list[Tensor]) -> None:
        if self.kept is not None:
            state = adam.state_dict()["state"]
            self.kept[key(step=step, **self.about)] = {
                "parameters": [p.tolist() for p in parameters],
                "sums": [total.tolist() for total in sums],
                "adam": [[state[i][name].tolist() for name in ("exp_avg", "exp_avg_sq")] for i in state],
                "losses": self.losses,
            }

    def _restore(
        self, step: int, adam: torch.optim.Optimizer, parameters: Sequence[Tensor], sums: list[Tensor]
    ) -> bool:
        """Go on from what was kept at a step, if anything was."""
        found = _from_first(lambda: None if self.kept is None else self.kept.get(key(step=step, **self.about)))
        if found is None:
            return False
        with torch.no_grad():
            for p, total, value, summed in zip(parameters, sums, found["parameters"], found["sums"], strict=True):
                p.copy_(torch.tensor(value, dtype=p.dtype))
                total.copy_(torch.tensor(summed, dtype=p.dtype))
        for p, (mean, square) in zip(parameters, found["adam"], strict=True):
            adam.state[p] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.tensor(mean, dtype=p.dtype, device=p.device),
                "exp_avg_sq": torch.tensor(square, dtype=p.dtype, device=p.device),
            }
        self.losses = list(found["losses"])
        return True


def _processes() -> tuple[int, int]:
    """Return the number of this process, and how many there are."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _from_first(make: Callable[[], T]) -> T:
    """Return what the first process makes; what it raises, all raise, so that none waits for it."""
    rank, size = _processes()
    if size == 1:
        return make()
    made: list[Any] = [None, None]
    if rank == 0:
        try:
            made[0] = make()
        except Exception as error:
            made[1] = error
    torch.distributed.broadcast_object_list(made)
    if made[1] is not None:
        raise made[1]
    return made[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _plain_weights(model: nn.Module) -> Iterator[None]:
    """Keep bitsandbytes from packing 4-bit weights for a CPU's own instructions, which no gradient passes through."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
    for module in modules:
        module.support_avx512bf16_for_cpu = False
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()  # unpacks them in place
    try:
        yield
    finally:
        for module in modules:
            module.support_avx512bf16_for_cpu = True


# --- small parts -----------------------------------------------------------------------------------------------------


def family(name: str) -> list[str]:
    """Return the members of a family that are worth judging: to be given as ``init``, with ``steps=0``.

    Raises:
        ValueError: an unknown family.

    Example:
        >>> family("p_rope")[:3]
        ['p_rope:p=1', 'p_rope:p=0.9', 'p_rope:p=0.75']
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}.{did_you_mean(name, FAMILIES)} Known: {', '.join(FAMILIES)}")
    return list(FAMILIES[name])


def _start(method: MethodLike, factor: float) -> Method:
    """Return a start; of a bare name whose factor is that of the context, with this factor."""
    if isinstance(method, str) and method in SCALED and method in METHODS:
        return create(method, factor=max(1.0, factor))
    return as_method(method)


def _doubling(low: int, high: int) -> list[int]:
    """Return the lengths that double from one to another.

    >>> _doubling(256, 1024), _doubling(256, 1000), _doubling(256, 256)
    ([256, 512, 1024], [256, 512, 1000], [256])
    """
    made = []
    while low < high:
        made.append(low)
        low *= 2
    return [*made, high]


def _split(data: Source | None) -> tuple[str, str]:
    """Return the text to fit to and the text held out."""
    source = builtin_text("train") if data is None else data
    if isinstance(source, Corpus):
        whole = source.text[:LIMIT]
    else:
        parts, size = [], 0
        for document in documents(source):
            parts.append(document.text[: LIMIT - size])
            size += len(parts[-1])
            if size >= LIMIT:
                break
        whole = "\n\n".join(parts)
    cut = round(len(whole) * (1 - VALIDATION))
    return whole[:cut], whole[cut:]


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best of those that are never worse than the first, their start."""
    return max((c for c in candidates if c.never_worse(candidates[0])), key=lambda c: c.rank)
