"""The spec of an evaluation, which can be written to JSON, compared and hashed, and the options of ``compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, contained, number, tokens, whole, word
from rope_patch.options.shared import CommandOptions, Machine, Patching

DEFAULT_HAYSTACK = "noise"
"""The text that retrieval prompts hide their answers in by default. SmolLM2-135M-Instruct finds 6 of 6 passkeys in 1024
tokens of it, and 3 of 6 in ``"builtin"``, mostly code (``benchmarks/results/answers_smollm2.json``)."""


@dataclass(frozen=True)
class EvalSpec(OptionSet):
    """The spec of a measurement: perplexity by position, and retrieval at every length and depth.

    ``compare``, ``extend``, ``kv_check`` and the fine-tuning recipe take a spec, so that the same numbers mean
    the same measurement everywhere. Lengths and depths are put in order. The names of tasks are checked only when they
    are asked, since a module of the user's own may add tasks.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> EvalSpec(lengths=[512, 256]).lengths
        (256, 512)
    """

    lengths: Sequence[int] = tokens(
        'The prompt lengths of the retrieval task, for example "4k 16k 32k". Perplexity is measured on text as long '
        "as the longest length.",
        several=True,
        least=2,
    )
    depths: Sequence[float] = number(
        "Where in the prompt the answer is hidden, separated by spaces: 0 is the start, 1 the end.",
        (0.0, 0.25, 0.5, 0.75, 1.0),
        metavar="DEPTHS",
        several=True,
        least=0,
        most=1,
    )
    samples: int = whole("The number of haystacks for each task and length.", 4, least=1)
    windows: int | None = whole(
        "The number of pieces of text that perplexity is measured on, each as long as the longest length. 0 leaves "
        "perplexity out (not in kv-check). By default 8, or fewer if the text is short.",
        None,
        least=0,
    )
    tasks: Sequence[str] = word(
        "The retrieval tasks, separated by spaces: passkey (one number), niah (a number for a word), RULER's "
        "niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, cwe and fwe, or ruler for "
        "all of them, json_kv, tool_call (a tool call to be repeated), sums (of two numbers), or a .json file of "
        "SQuAD or HotpotQA. Low-bit caches break tool_call and sums first. "
        '"" asks no task: only perplexity is measured. extend takes passkey and niah, and '
        "asks the first of its tasks that the unpatched model answers within its context.",
        ("passkey",),
        metavar="TASKS",
        several=True,
        empty=True,
    )
    text: str | None = word(
        "The text for perplexity: a file, or a folder of .txt files. By default text that ships with "
        "rope_patch, mostly Python source; for finetune documents of data.source that are kept from training.",
        None,
        metavar="PATH",
        kind=PathLike,
    )
    short_context: int | None = tokens(
        "Also measure the perplexity of key tokens (LongPPL), with a short context of this length, for example 1k. "
        "Key tokens are those that the unpatched model predicts at least 2 nats better from all text before them "
        "than from the short context alone.",
        None,
        least=4,
    )
    haystack: str | None = word(
        "The text that the retrieval task hides its answers in: noise (a few sentences repeated), builtin (Pride "
        "and Prejudice), a file or folder of yours, or null for the text of perplexity itself.",
        DEFAULT_HAYSTACK,
        metavar="NAME|PATH",
        kind=PathLike,
        optional=True,
    )
    chat_template: str = word(
        "Whether retrieval prompts go through the chat template of the tokenizer. auto: if it has one.",
        "auto",
        metavar="auto|on|off",
        choices=("auto", "on", "off"),
    )
    bucket: int | None = tokens(
        "The width of the position ranges that perplexity is averaged over. By default a sixteenth of the longest "
        "length.",
        None,
    )
    chunk: int | None = shared.chunk()
    batch_tokens: int = tokens("The largest number of tokens that are read as one batch.", 16384)
    seed: int = whole("The random seed, for what is drawn at random, such as prompts.", 0, metavar="NUMBER")

    def __post_init__(self) -> None:
        """Check the values, and put lengths and depths in order."""
        super().__post_init__()
        for name in ("lengths", "depths", "tasks"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ from each other, got {list(values)}")
        if not self.tasks and self.windows == 0:
            raise ValueError("nothing is left to measure without tasks and windows: give a task, or windows >= 1")
        if self.short_context is not None and self.windows == 0:
            raise ValueError("key tokens are tokens of text: give windows >= 1, or leave short_context out")
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))
        object.__setattr__(self, "depths", tuple(sorted(self.depths)))

    @property
    def longest(self) -> int:
        """The longest prompt length, which is also the length of a window of text [tokens]."""
        return self.lengths[-1]

    @property
    def edges(self) -> list[int]:
        """The edges of the position buckets of perplexity; every length is among them [tokens]."""
        # Without an edge at 1: the first token is not predicted, so a bucket from 0 to 1 would be empty.
        width = self.bucket or max(2, self.longest // 16)
        return sorted({*range(0, self.longest, width), *self.lengths, 0} - {1})

    @property
    def window_batch(self) -> int:
        """The number of windows of text that are read as one batch."""
        if self.chunk is not None:
            return 1
        return max(1, self.batch_tokens // self.longest)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        # Through JSON, so that tuples are lists and the spec equals one that was read from a file.
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


@dataclass(frozen=True)
class CompareOptions(CommandOptions, command="compare"):
    """Compare methods on one model: perplexity by position in the text, and retrieval by prompt length.

    Every method reads the same texts and prompts. The command writes ``comparison.json`` and ``report.html``. If it is
    interrupted, run it again to continue: finished work is saved in the output folder.

    Example: ``rope-patch compare ./llama --methods "default yarn:factor=4" --lengths "4k 16k" -o ./compared``
    """

    model: str = shared.model()
    methods: tuple[str, ...] = shared.methods()
    evaluation: EvalSpec = contained(EvalSpec)
    output: Path = shared.output("rope-patch-compare")
    patching: Patching = contained(Patching, without=("target_length",))
    machine: Machine = contained(Machine)
    report: bool = shared.report()
