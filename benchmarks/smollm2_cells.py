"""The cells of the study of SmolLM2-135M: what each one measures, on which table, and what it costs.

``study_smollm2.py`` runs them and reports; the model was trained at 8192 tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from public_checkpoint import SMOLLM2
from rope_patch.files import write_atomically

METHODS = {
    "default": "default",
    "pi": "pi:factor={factor}",
    "ntk": "ntk:factor={factor}",
    "abf": "abf:factor=4",
    "yarn": "yarn:factor={factor}",
    "yarn-1.00": "yarn:factor={factor}:attention_factor=1.0",
    "yarn-1.03": "yarn:factor={factor}:attention_factor=1.03",
    "mrrope": "mrrope:factor={factor}",
    "p_rope-0.9": "p_rope:p=0.9",
    "p_rope-0.75": "p_rope:p=0.75",
    "p_rope-0.5": "p_rope:p=0.5",
    "truncated": "truncated:context={context}",
    "cope": "abf:factor=4+cope",
}
FITTED = {"fitted": "novels", "fitted-wikitext": "wikitext", "fitted-scaling": "novels"}
"""Tables that are fitted from YaRN's, and to what."""
SCALED = ("fitted-scaling",)
"""Tables whose attention scaling is fitted, too."""
LATER = ("yarn-1.00", "yarn-1.03", *SCALED)
"""Tables that the results of the others asked for."""
DRAWN = ("default", "yarn", "yarn-1.03", "ntk", "abf", "mrrope", "p_rope-0.75")
"""Tables in the figure: those that extend something, and the adapted ones."""
FIRST = ("default", "yarn", "p_rope-0.75")
"""Tables that are measured first, and adapted."""
HELD_OUT = ("moby_dick.txt", "pride_and_prejudice.txt", "sherlock_holmes.txt")
EDGES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Where perplexity is divided by position, as shares of the window."""
SCHEMES = ("fp8", "int4-token", "kivi-2", "nf4")
P_VALUES = (0.9, 0.75, 0.625, 0.5, 0.25)
RATIOS = (3.0, 5.0, 8.0)
"""Times the median radius that make an outlier."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        context: that the model was trained at [tokens].
        windows: of text at the target length.
        short: length of the windows that show what a patch costs within the context [tokens].
        short_windows: how many of them.
        prompts: lengths of the prompts [tokens].
        depths: of the passkeys.
        samples: haystacks per length.
        rows: that an adapter is trained on.
        row: their length [tokens].
        accumulate: rows per step.
        fit_steps: of a fitted table.
        fit_windows: of held-out text, which decide whether the fitted table is taken.
        fit_depths: of the held-out passkeys.
        cache: length at which quantized caches are measured, and of the rows that heads are analysed on [tokens].
        cache_windows: of text for the caches.
        asked: lengths of the prompts for llama.cpp [tokens].
    """

    context: int = 8192
    windows: int = 6
    short: int = 1024
    short_windows: int = 24
    prompts: Sequence[int] = (1024, 4096, 8192, 16384)
    depths: Sequence[float] = (0.0, 1 / 3, 2 / 3, 1.0)
    samples: int = 2
    rows: int = 200
    row: int = 2048
    accumulate: int = 4
    fit_steps: int = 40
    fit_windows: int = 4
    fit_depths: Sequence[float] = (0.0, 0.5)
    cache: int = 4096
    cache_windows: int = 4
    asked: Sequence[int] = (1024, 4096, 16384)


QUICK = Sizes(
    context=256,
    windows=2,
    short=128,
    short_windows=2,
    prompts=(128, 512),
    depths=(0.0, 1.0),
    samples=1,
    rows=4,
    row=128,
    accumulate=2,
    fit_steps=2,
    fit_windows=2,
    fit_depths=(0.5,),
    cache=128,
    cache_windows=2,
    asked=(128,),
)
"""Sizes for a small model, to try the study out."""


class Cell(NamedTuple):
    """One measurement.

    Attributes:
        kind: a key of :data:`MEASURES`.
        table: a key of ``METHODS`` or ``FITTED``; ``-`` where a cell is about the checkpoint as it is.
        state: ``zero``; after LoRA ``pose`` (short rows at skipped positions) or ``full`` (rows of the target length).
        length: what it is measured at or trained for [tokens].
        factor: the target length divided by the context.
        seed: of training, or of the fit.
    """

    kind: str
    table: str
    state: str
    length: int
    factor: int = 2
    seed: int = 0

    @property
    def name(self) -> str:
        """Stem of the file of its result."""
        ends = [f"x{self.factor}"] * (self.factor != 2) + [f"seed{self.seed}"] * (self.seed > 0)
        return "-".join([self.kind, self.table, self.state, str(self.length), *ends])


def core(sizes: Sizes) -> list[Cell]:
    """Return the cells of the study, the most telling ones first."""
    target = 2 * sizes.context
    tables = [*FIRST, *(name for name in METHODS if name not in (*FIRST, *LATER))]
    heads = [Cell("heads", "-", "zero", sizes.cache)]
    adapted = []
    for table in ("p_rope-0.75", "yarn", "default"):
        adapted.append(Cell("train", table, "pose", sizes.row))
        adapted += _measured(table, "pose", sizes)
    fits = []
    for table in FITTED:
        if table not in LATER:
            fits += [Cell("fit", table, "zero", target), *_measured(table, "zero", sizes)]
    zero = [cell for table in tables for cell in _measured(table, "zero", sizes)]
    engine = [Cell("engine", table, "zero", length) for table in FIRST for length in sizes.asked]
    caches = [Cell("kv", table, state, sizes.cache) for state in ("zero", "pose") for table in FIRST]
    first = [Cell("text", table, "zero", target) for table in FIRST]
    return list(dict.fromkeys(heads + first + adapted + engine + zero + fits + caches))


def later(sizes: Sizes) -> list[Cell]:
    """Return the cells that came after the core: why fits find little, and what the attention scaling is worth."""
    cells = [Cell("slopes", "yarn", "zero", sizes.row)]
    for table in LATER:
        cells += [Cell("fit", table, "zero", 2 * sizes.context)] * (table in FITTED) + _measured(table, "zero", sizes)
    return cells


def _measured(table: str, state: str, sizes: Sizes, factor: int = 2, seed: int = 0) -> list[Cell]:
    """What is measured of every table."""
    target = factor * sizes.context
    lengths = sorted({*sizes.prompts, target})
    return [
        Cell("text", table, state, target, factor, seed),
        Cell("short", table, state, sizes.short, factor, seed),
        *(Cell("passkey", table, state, length, factor, seed) for length in lengths),
    ]


def more(sizes: Sizes) -> list[Cell]:
    """Return what a GPU has time for: three seeds, full rows, four times the context, and long windows of WikiText."""
    tables = [table for table in METHODS if table not in LATER]
    cells = [Cell("wiki", table, "zero", 2 * sizes.context) for table in tables]
    for factor in (2, 4):
        cells += [Cell("text", table, "zero", factor * sizes.context, factor) for table in tables]
        for state in ("pose", "full"):
            row = sizes.row if state == "pose" else factor * sizes.context
            for seed in range(3):
                for table in FIRST:
                    cells.append(Cell("train", table, state, row, factor, seed))
                    cells += _measured(table, state, sizes, factor, seed)
    return [cell for cell in dict.fromkeys(cells) if cell not in core(sizes)]


# --- cost


def passes(cell: Cell, sizes: Sizes) -> list[tuple[float, int]]:
    """Return the forward passes of a cell: how many, of how many tokens. A backward pass counts as two forward ones."""
    prompts = sizes.samples * len(sizes.depths)
    shared = sizes.samples * (sum(1 - depth for depth in sizes.depths) + 1)  # what comes before a needle is read once
    match cell.kind:
        case "text" | "wiki":
            return [(sizes.windows, cell.length)]
        case "short":
            return [(sizes.short_windows, cell.length)]
        case "passkey":
            return [(shared, cell.length)]
        case "engine":
            return [(prompts, cell.length)]
        case "train":
            return [(3.0 * sizes.rows * sizes.row / cell.length, cell.length)]
        case "fit":
            return [
                (3.0 * sizes.fit_steps * 2, sizes.row),
                (2 * (sizes.fit_windows + len(sizes.fit_depths)), cell.length),
            ]
        case "slopes":
            return [(3.0 * 2 * sizes.fit_steps, cell.length)]
        case "heads":
            return [(6, cell.length), (1 + len(P_VALUES), 2 * cell.length)]
        case "kv":
            tables = 1 + len(SCHEMES)
            return [(sizes.cache_windows * (tables + 1), cell.length), (shared / sizes.samples * tables, cell.length)]
    raise ValueError(f"unknown kind {cell.kind!r}")


def operations(cell: Cell, sizes: Sizes) -> float:
    """Return what a cell costs in operations of a matrix product, of SmolLM2-135M.

    Those of attention count five times: on a CPU they are that much slower.
    """
    weights, layers, width = 106e6, 30, 576
    return sum(count * (2 * weights * n + 5 * 2 * layers * width * n * n) for count, n in passes(cell, sizes))


def speed_of(done: Sequence[dict[str, Any]]) -> float:
    """Return the speed of the finished cells [operations/s], together with ten minutes of two quiet cores."""
    seconds, guess = 600.0, 5e11
    return (sum(result["operations"] for result in done) + guess * seconds) / (
        sum(result["seconds"] for result in done) + seconds
    )


# --- measuring


@dataclass(frozen=True)
class Study:
    """Where everything is.

    Attributes:
        folder: the checkpoint.
        novels: text files.
        wikitext: a text file.
        root: of the results.
        sizes: of everything.
        device: that is measured on.
        on_progress: called with the number of tokens just read.
    """

    folder: Path
    novels: Path
    wikitext: Path
    root: Path
    sizes: Sizes = Sizes()
    device: str = "cpu"
    on_progress: Callable[[int], None] = lambda tokens: None

    def path(self, cell: Cell) -> Path:
        """Return the file of a cell's result."""
        return self.root / f"{cell.name}.json"

    def parts(self, cell: Cell) -> Path:
        """Return the file of the finished parts of a cell."""
        folder = self.root / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{cell.name}.jsonl"

    def tokenizer(self) -> Any:
        """Return the tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def text(self, name: str, held_out: bool) -> str:
        """Return the text that is trained on, or the one that is held out, of a domain."""
        if name == "wikitext":
            whole = self.wikitext.read_text(encoding="utf-8")
            middle = whole.find("\n = ", len(whole) // 2)  # where a section begins
            if middle < 0:
                raise ValueError(f"{self.wikitext} is no text of WikiText: no section begins in its second half")
            return whole[middle:] if held_out else whole[:middle]
        files = sorted(self.novels.glob("*.txt"))
        missing = set(HELD_OUT) - {file.name for file in files}
        if missing:
            raise FileNotFoundError(f"{self.novels} lacks {', '.join(sorted(missing))}, which are held out")
        return "\n\n".join(f.read_text(encoding="utf-8") for f in files if (f.name in HELD_OUT) == held_out)

    def training_text(self, name: str) -> Path:
        """Return a folder of the text of a domain that is trained on, in pieces, which the recipe shuffles."""
        folder, size = self.root / f"{name}-train", 200_000
        whole = self.text(name, held_out=False)
        for start in range(0, len(whole), size):
            path = folder / f"{start // size:03d}.txt"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, whole[start : start + size])
        return folder

    def fit_text(self, name: str) -> tuple[str, Path | None]:
        """Return the text that a table of a domain is fitted to, and a file of the one that decides.

        The file is None where the last tenth of the first has room for the windows: `fit` holds it out. WikiText-2 is
        so short that its first half is divided in the middle.
        """
        whole = self.text(name, held_out=False)
        if name != "wikitext":
            return whole, None
        article = re.compile("\n = [^=]").search(whole, len(whole) // 2)
        if article is None:
            raise ValueError(f"{self.wikitext} is no text of WikiText: no article begins in its second quarter")
        middle, path = article.start(), self.root / "wikitext-fit.txt"
        write_atomically(path, whole[middle:])
        return whole[:middle], path

    def method(self, cell: Cell) -> str:
        """Return the method string of a cell's table."""
        if cell.table in FITTED and cell.kind != "fit":
            fitted = self.needs(cell)
            assert fitted is not None
            return str(json.loads(self.path(fitted).read_text())["method"])
        named = self.named(cell)
        assert named is not None
        return named

    def named(self, cell: Cell) -> str | None:
        """Return the method string of a table of ``METHODS``; None for other tables."""
        return (
            METHODS[cell.table].format(factor=cell.factor, context=self.sizes.context)
            if cell.table in METHODS
            else None
        )

    def target(self, cell: Cell) -> int:
        """Return the length that a cell's table is for [tokens]."""
        return cell.factor * self.sizes.context

    def needs(self, cell: Cell) -> Cell | None:
        """Return the cell that trains or fits what a cell takes; None for a checkpoint as it is."""
        if cell.state != "zero" and cell.kind != "train":
            row = self.sizes.row if cell.state == "pose" else self.target(cell)
            return Cell("train", cell.table, cell.state, row, cell.factor, cell.seed)
        if cell.table in FITTED and cell.kind != "fit":
            return Cell("fit", cell.table, "zero", self.target(cell), cell.factor)
        return None

    def repeats(self, cell: Cell, fits: Mapping[str, Any]) -> bool:
        """Whether a cell would measure a table of ``METHODS`` again, since its fit found no better one.

        Args:
            cell: any.
            fits: results of finished fits, by the names of their cells, with others or without.
        """
        fit = self.needs(cell)
        if fit is None or fit.kind != "fit" or fit.name not in fits:
            return False
        named = {self.named(cell._replace(table=table)) for table in METHODS}
        return fits[fit.name]["method"] in named

    def adapter(self, cell: Cell) -> Path:
        """Return the folder of the adapter that a cell trains or needs."""
        return self.root / "adapters" / (cell if cell.kind == "train" else self.needs(cell) or cell).name

    def model(self, cell: Cell, patch: bool = True) -> Any:
        """Return the model that a cell measures, in bfloat16."""
        import torch

        import rope_patch

        if cell.state != "zero":
            return rope_patch.load(self.adapter(cell), dtype=torch.bfloat16).merge_and_unload().to(self.device).eval()
        model = rope_patch.load(self.folder, dtype=torch.bfloat16).to(self.device).eval()
        if patch:
            rope_patch.apply(model, self.method(cell), target_length=self.target(cell))
        return model


def text(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure the loss of windows between doubling positions [nats/token]."""
    from rope_patch.evaluation.documents import spread_windows
    from rope_patch.evaluation.perplexity import perplexity

    domain = "novels" if cell.kind == "text" else "wikitext"
    sizes = study.sizes
    edges = [0, cell.length] if cell.kind == "short" else [0, *(round(share * cell.length) for share in EDGES)]
    count = sizes.short_windows if cell.kind == "short" else sizes.windows
    windows, digest = spread_windows(study.tokenizer(), study.text(domain, held_out=True), cell.length, count)
    score = perplexity(
        study.model(cell),
        windows,
        window=cell.length,
        buckets=edges,
        resume=study.parts(cell),
        on_progress=study.on_progress,
    )
    spans = itertools.pairwise(edges)
    return {
        "text": domain,
        "sha256": digest,
        "nll": {f"{low}-{high}": [d.nll[i] / d.tokens[i] for d in score.documents for i in score.inside(low, high)]
                for low, high in spans},
    }  # fmt: skip


def passkey(study: Study, cell: Cell) -> dict[str, Any]:
    """Ask for passkeys hidden in noise, as plain text."""
    from rope_patch.evaluation.retrieval import retrieval

    asked = retrieval(
        study.model(cell),
        study.tokenizer(),
        lengths=[cell.length],
        depths=study.sizes.depths,
        samples=study.sizes.samples,
        haystack="noise",
        chat_template="off",
        batch_tokens=1,
        resume=study.parts(cell),
        on_progress=study.on_progress,
    )
    return {
        "correct": [sample.correct for sample in asked.samples(cell.length)],
        "first_choice": [sample.first_choice for sample in asked.samples(cell.length)],
        "logprob": [sample.logprob for sample in asked.samples(cell.length)],
        "answers": [sample.output for sample in asked.samples(cell.length)],
        "asked for": [sample.expected for sample in asked.samples(cell.length)],
    }


def train(study: Study, cell: Cell) -> dict[str, Any]:
    """Train a LoRA adapter on novels, and keep it."""
    from rope_patch.training.finetune import finetune
    from rope_patch.training.reading import read

    warnings.filterwarnings("ignore", category=FutureWarning)
    sizes = study.sizes
    steps = math.ceil(sizes.rows * sizes.row / cell.length / sizes.accumulate)
    folder = study.adapter(cell)
    options = {
        "model": {"name": str(study.folder), "dtype": "bfloat16"},
        "patch": {"method": study.method(cell), "target_length": study.target(cell)},
        "lora": {"rank": 16},
        "data": {
            "source": str(study.training_text("novels")),
            "lengths": cell.length,
            "positions": "pose" if cell.state == "pose" else "full",
        },
        "train": {
            "steps": steps,
            "batch": 1,
            "accumulate": sizes.accumulate,
            "learning_rate": 4e-4,
            "scheduler": "cosine",
            "warmup": 0.1,
            "checkpointing": study.device == "cuda",
            "seed": cell.seed,
            "save_every": min(10, steps),
            "keep": 1,
        },
        # evaluated by other cells
        "evaluation": {"before": False, "lengths": str(sizes.short), "depths": [0.5], "samples": 1, "windows": 0},
        "output": str(folder),
    }
    finetune(read(base=options), command="python benchmarks/study_smollm2.py")
    result = json.loads((folder / "results.json").read_text())
    return {
        "rows": steps * sizes.accumulate,
        "row_tokens": cell.length,
        "tokens": result["tokens"],
        "patch": result["patch"],
    }


def fit(study: Study, cell: Cell) -> dict[str, Any]:
    """Fit a table from YaRN's on rows at skipped positions."""
    from rope_patch import fitting
    from rope_patch.evaluation.spec import EvalSpec

    model, tokenizer = study.model(cell, patch=False), study.tokenizer()
    data, decides = study.fit_text(FITTED[cell.table])
    patch = fitting.fit(
        model,
        tokenizer,
        data,
        target_length=study.target(cell),
        second=False,  # one kind of text, chosen on it alone
        objective=_objective(study.sizes),
        constraint=fitting.Constraint(scaling=cell.table in SCALED),
        schedule=fitting.Schedule(steps=study.sizes.fit_steps, checks=1, seed=cell.seed),
        spec=EvalSpec(
            [study.target(cell)],
            depths=study.sizes.fit_depths,
            samples=1,
            windows=study.sizes.fit_windows,
            bucket=study.target(cell),
            text=None if decides is None else str(decides),
            haystack=None,
            chat_template="off",
            seed=fitting.SEED + cell.seed,
        ),
        resume=study.parts(cell),
        on_progress=lambda _, tokens: study.on_progress(tokens),
    )
    (tried,) = patch.candidates.values()
    return {
        "text": FITTED[cell.table],
        "method": str(patch.method),
        "chosen": patch.chosen,
        "tried": [candidate.to_dict() for candidate in tried],
        "stopped": dict(patch.stopped),
    }


def slopes(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure how the loss of text and of answers changes with every frequency and with the attention scaling.

    As gradients of the loss by logarithms [nats/token], each with its standard error over rows like those of a fit.
    """
    import torch

    from rope_patch.evaluation.result_cache import ResultCache, key
    from rope_patch.fitting.rows import Rows
    from rope_patch.fitting.texts import fit_texts
    from rope_patch.modeling.loss import token_loss
    from rope_patch.modeling.scoring import Reader
    from rope_patch.modeling.trainable_table import Constraint, TrainableTable
    from rope_patch.patching.locate import find_rotary

    model = study.model(cell).requires_grad_(False)
    site: Any = find_rotary(model)
    table = TrainableTable(site.module, [None], Constraint(scaling=True)).to(study.device)
    site.put(table)
    parts = fit_texts(study.fit_text("novels")[0], 0.0).parts
    sizes, lengths = study.sizes, (study.sizes.context, study.target(cell))
    tokens = 2 * sizes.row  # a row of text and one with a passkey in each step
    rows = Rows(study.tokenizer(), parts, _objective(sizes), *lengths, tokens, cell.seed)
    reader, finished = Reader(model), ResultCache(study.parts(cell))

    def row(step: int, goal: int) -> list[float]:
        """Return the loss of a row, and its gradients by every parameter."""
        ((ids, labels, weights, positions),) = rows(step, goal)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
        on_device = {name: tensor.to(study.device) for name, tensor in inputs.items() if tensor is not None}
        table.zero_grad()
        hidden = reader.decoder(**on_device, use_cache=False).last_hidden_state
        loss, _ = token_loss(reader, hidden, labels.to(study.device), weights.to(study.device))
        torch.autograd.backward(loss)
        gradients = [parameter.grad.flatten().tolist() for parameter in (table.log_factors[0], table.log_scaling[0])]
        return [float(loss.detach()), *itertools.chain(*gradients)]

    inv_freq = site.module.tables[None].inv_freq.to(torch.float64)
    turns = inv_freq * sizes.context / (2 * math.pi)
    units = torch.cat([torch.ones(1), 1 + turns, torch.ones(1)])  # a parameter is a logarithm times 1 + turns
    found = {}
    for goal, name in enumerate(("text", "answers")):
        every = []
        for step in range(sizes.fit_steps):
            at = key(cell=cell.name, step=step, goal=goal)
            if at not in finished:
                finished[at] = row(step, goal)
            every.append(finished[at])
            study.on_progress(sizes.row)
        measured = torch.tensor(every, dtype=torch.float64) * units
        means, errors = measured.mean(0).tolist(), (measured.std(0) / math.sqrt(len(every))).tolist()
        found[name] = {
            "rows": len(every),
            "loss": means[0],
            "by pair": means[1:-1],
            "error by pair": errors[1:-1],
            "by scaling": means[-1],
            "error by scaling": errors[-1],
        }
    return found


def _objective(sizes: Sizes) -> Any:
    """Return what fits minimise: rows at skipped positions, of one kind of text."""
    from rope_patch.fitting import Objective

    return Objective(positions="pose", row_length=sizes.row, mix=0.0)


def heads(study: Study, cell: Cell) -> dict[str, Any]:
    """Analyse how the heads use the table: shares of every pair, outliers and their bounds, and p-RoPE at several p."""
    import rope_patch
    from rope_patch.analysis.outliers import outlier_pairs, scatter

    result = rope_patch.analyze(
        study.model(cell, patch=False),
        study.tokenizer(),
        {"novels": study.text("novels", held_out=True)},
        tokens=2 * cell.length,
        window=cell.length,
        p_values=P_VALUES,
        resume=study.parts(cell).with_suffix(""),
        on_progress=lambda _, tokens: study.on_progress(tokens),
    )
    points = scatter(result.capture)
    layers = result.capture.layers
    usage = {}
    for states in ("query", "key"):
        norms = [getattr(layer, states).mean_norm for layer in layers]
        shares = [norm / norm.sum(-1, keepdim=True) for norm in norms]
        usage[states] = (sum(share.mean(0) for share in shares) / len(shares)).tolist()
    outliers = {}
    for states in ("key", "query"):
        for ratio in RATIOS:
            pairs = outlier_pairs(result.capture, states, ratio=ratio)
            outliers[f"{states}, {ratio:g} times the median"] = {
                "outliers": len(pairs),
                "below the frequency bound": sum(pair.turns < 1 for pair in pairs),
                "beyond the angle bound too": sum(pair.kind == "offset feature" for pair in pairs),
                "by pair": [sum(pair.pair == i for pair in pairs) for i in range(layers[0].query.pairs)],
            }
    whole = json.loads(result.to_json())
    return {
        "tokens": result.capture.tokens,
        "entries": len(points.pair),
        "pairs without a turn": [
            i for i, f in enumerate(layers[0].inv_freq.tolist()) if f * study.sizes.context < 2 * math.pi
        ],
        "usage": usage,
        "outliers": outliers,
        "recall": whole["recall"],
        "findings": whole["findings"],
        "p_sweep": whole["p_sweep"],
        "p_sweep_positions": whole["p_sweep_positions"],
        "advice": whole["advice"],
    }


def kv(study: Study, cell: Cell) -> dict[str, Any]:
    """Measure quantized caches."""
    from rope_patch.evaluation.spec import EvalSpec
    from rope_patch.evaluation.suite import EvalSuite
    from rope_patch.kv_evaluation.run import kv_check

    spec = EvalSpec(
        [cell.length],
        depths=study.sizes.depths,
        samples=1,
        windows=study.sizes.cache_windows,
        bucket=cell.length,
        haystack="noise",
        chat_template="off",
    )
    tokenizer = study.tokenizer()
    checked = kv_check(
        study.model(cell),
        tokenizer,
        list(SCHEMES),
        EvalSuite(spec, tokenizer, text=study.text("novels", held_out=True)),
        attributed=0,  # each of 30 layers alone takes ten times as long as the rest
        resume=study.parts(cell),
        on_progress=lambda _, tokens: study.on_progress(tokens),
    )
    rows = {}
    for row in checked.rows:
        score, asked = row.scores.perplexity, row.scores.retrieval["passkey"]
        rows[row.scheme] = {
            "bits": [row.key_bits, row.value_bits],
            "nll": [sum(document.nll) / sum(document.tokens) for document in score.documents],
            "correct": [sample.correct for sample in asked.samples(cell.length)],
            "logit_error": [float(error.logit.mean()) for error in row.errors],
        }
    return {"rows": rows}


def engine(study: Study, cell: Cell) -> dict[str, Any]:
    """Ask llama.cpp for the same passkeys, by the GGUF file with the table put into it."""
    import llama_cpp
    import torch

    from rope_patch.checkpoints.gguf_patch import patch_gguf
    from rope_patch.evaluation.prompts import PromptMaker
    from rope_patch.evaluation.result_cache import ResultCache, key

    source = study.folder.parent / SMOLLM2.gguf
    if not source.exists():
        raise FileNotFoundError(f"no {SMOLLM2.gguf} beside {study.folder}: `make smollm2` puts it there")
    path = study.root / f"{cell.table}-x{cell.factor}.gguf"
    if not path.exists():
        patch_gguf(source, study.method(cell), path, target_length=study.target(cell))
    maker, finished = PromptMaker(study.tokenizer(), "noise"), ResultCache(study.parts(cell))
    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(str(path), n_ctx=cell.length, n_threads=threads, n_threads_batch=threads, verbose=False)
    answers, expected = [], []
    for sample in range(study.sizes.samples):
        for prompt in maker.prompts("passkey", cell.length, study.sizes.depths, seed=0, sample=sample):
            at = key(patch=study.method(cell), prompt=list(prompt.ids))
            if at not in finished:
                llama.reset()
                asked = llama.generate(list(prompt.ids)[: -prompt.answer], temp=0.0, top_k=1, reset=True)
                finished[at] = maker.tokenizer.decode(list(itertools.islice(asked, prompt.answer)))
            answers.append(finished[at])
            expected.append(prompt.target)
            study.on_progress(cell.length)
    llama.close()
    correct = [answer.strip() == value.strip() for answer, value in zip(answers, expected, strict=True)]
    return {"correct": correct, "answers": answers, "asked for": expected, "llama_cpp": llama_cpp.__version__}


MEASURES: dict[str, Callable[[Study, Cell], dict[str, Any]]] = {
    "text": text,
    "wiki": text,
    "short": text,
    "passkey": passkey,
    "train": train,
    "fit": fit,
    "slopes": slopes,
    "heads": heads,
    "kv": kv,
    "engine": engine,
}
