"""LongPPL through lm-eval: windows of text whose key tokens are chosen before any method is measured.

Each key token is a log-likelihood request of its own: the text before it, and its own text. lm-eval hands over text and
not tokens, so only a key token whose text stands apart from its neighbours' can be asked for; the others are counted.
"""

from __future__ import annotations

import bisect
import gc
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from lm_eval.api.instance import Instance
from tqdm import tqdm
from transformers import PreTrainedModel

from rope_patch.checkpoints.save_load import load
from rope_patch.evaluation.documents import TokenDocument, spread_starts
from rope_patch.evaluation.key_tokens import (
    KeyTokens,
    as_trained,
    check_short_context,
    choose_key_tokens,
    default_short_context,
    tokens_to_choose,
)
from rope_patch.evaluation.spec import WINDOWS
from rope_patch.evaluation.suite import evaluator_name
from rope_patch.harness.tasks import (
    SPARE,
    Documents,
    OfflineTask,
    TokenizerArguments,
    load_tokenizer,
    refuse_misspelled,
    tokenizer_arguments,
    words_of,
)
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.verify import trained_length
from rope_patch.runtime import progress
from rope_patch.runtime.finished import open_cache
from rope_patch.runtime.parallel import processes

ENCODED = 1 << 22
"""Characters that are encoded side by side to find out whether a text encodes to the same tokens alone."""


class KeyTokenTask(OfflineTask):
    """A YAML task that asks for the log-likelihood of every key token of a document."""

    def build_all_requests(self, **kwargs: Any) -> None:
        """Make the requests.

        Raises:
            ValueError: a system prompt or a chat template, where the text stands for itself.
        """
        if kwargs.get("system_instruction") or kwargs.get("apply_chat_template"):
            raise ValueError(
                f"{self.config.task} reads plain text: leave --apply_chat_template and --system_instruction out, or "
                "give them in a run of the other tasks"
            )
        super().build_all_requests(**kwargs)

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Make the requests of a document, in the order of its key tokens."""
        pairs = [pair for _, pair in _pairs(doc)]
        return [Instance(self.OUTPUT_TYPE, doc, pair, i, metadata=kwargs["metadata"]) for i, pair in enumerate(pairs)]


def long_perplexity(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Return the log-likelihood of the key tokens with their number, and what is known of all documents."""
    score = math.fsum(sign * one for (sign, _), (one, _) in zip(_pairs(doc), results, strict=True))
    shares = {f"{name}_{doc['length']}": doc[name] for name in ("key_token_share", "left_out_share")}
    return {str(doc["length"]): (score, len(doc["spans"]))} | shares


def of_all(values: Sequence[float]) -> float:
    """Return what every document says of all of its length."""
    return values[0]


def _pairs(doc: Mapping[str, Any]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Contexts and continuations, with the sign of their log-likelihood in that of the key tokens.

    A context must not end in a space, which lm-eval would move to the continuation. Where other tokens stand between
    the last word and a key token, its log-likelihood is that of both together less that of the others.
    """
    text = doc["prompt"]
    for context, start, stop in doc["spans"]:
        yield 1, (text[:context], text[context:stop])
        if start > context:
            yield -1, (text[:context], text[context:start])


# --- documents -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """A text, its tokens without the special ones in front, and the character at which each ends."""

    text: str
    ids: list[int]
    ends: list[int]


def key_token_documents(
    *,
    length: int,
    windows: int | None,
    text: str | None,
    evaluator: str | None,
    short_context: int | None,
    resume: str | None,
    **rest: Any,
) -> Documents:
    """Cut a text into windows, and choose their key tokens.

    Windows are spread evenly over the text and begin with a word. The evaluator is loaded, reads them without a patch
    and without an adapter, and is freed again; what it chose stays in a file, where the next method's run finds it.

    Args:
        length: of a window, special tokens included [tokens].
        windows: how many; by default as many as have 128k tokens, at most 16 and what the text has room for.
        text: path of a file or folder; the built-in held-out text by default.
        evaluator: folder or hub id of the model that chooses, of the same vocabulary; by default the one measured.
        short_context: that its context is compared with; by default 4096, scaled down for short models [tokens].
        resume: file in which the chosen tokens stay; by default one in the cache folder of Hugging Face.
        **rest: the arguments of the model, and other metadata.

    Raises:
        ValueError: no tokenizer, a bad option, a text that is too short, or no key token.
    """
    refuse_misspelled(rest)
    arguments = tokenizer_arguments(rest)
    tokenizer, prefix = load_tokenizer(arguments)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} does not tell where its tokens end: LongPPL needs a fast one")
    texts = _windows(arguments, text, length, windows)
    rows = [
        TokenDocument(f"window {i}", torch.tensor([*prefix, *window.ids]), None, prefix)
        for i, window in enumerate(texts)
    ]
    model = _load_evaluator(evaluator, tokenizer, rest)
    try:
        marked, keys = _choose(model, rows, short_context, resume)
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # it lay beside the model to be measured
    if not keys.tokens:
        raise ValueError(f"{keys}: give --metadata windows= (more), or text= whose parts refer to each other from afar")
    found = []
    for window, row in zip(texts, marked, strict=True):
        assert row.key_tokens is not None
        chosen = [int(i) - len(prefix) for i in row.key_tokens.nonzero().flatten()]
        found.append(_Spans(tokenizer, window).of(chosen))
    asked = sum(map(len, found))
    summary = f"{length} tokens in {len(rows)} windows: {keys}"
    if asked < keys.tokens:
        summary += f"; {keys.tokens - asked} of them are left out, whose text cannot be separated from its neighbours'"
    if processes()[0] == 0:
        tqdm.write(f"LongPPL, {summary}", file=sys.stderr)
    if not asked:
        raise ValueError(f"{summary}: nothing is left to measure with this tokenizer")
    shares = {"key_token_share": keys.share, "left_out_share": 1 - asked / keys.tokens}
    return [
        {"prompt": window.text, "spans": spans, **shares}
        for window, spans in zip(texts, found, strict=True)
        if spans  # lm-eval knows no document without a request
    ]


def _windows(arguments: TokenizerArguments, path: str | None, length: int, windows: int | None) -> list[_Window]:
    """Windows of exactly so many tokens with the special ones in front, each from the beginning of a word on."""
    tokenizer, prefix = load_tokenizer(arguments)
    words, upto = words_of(arguments, path)
    size, total = length - len(prefix), upto[-1] - SPARE
    windows = max(1, min(WINDOWS, 131072 // length, total // size)) if windows is None else windows
    if not isinstance(windows, int) or windows < 1:
        raise ValueError(f"windows must be a whole number >= 1, got {windows!r}: give --metadata windows=")
    too_short = ValueError(
        f"{windows} windows of {length} tokens need about {windows * size + SPARE} tokens, the text holds {upto[-1]}: "
        "give --metadata windows= (fewer) or text= (a longer one)"
    )
    if windows * size > total:
        raise too_short
    found = []
    for start in spread_starts(total, size, windows):
        begin = bisect.bisect_left(upto, start)
        room = size + SPARE  # an estimate, since neighbouring words may merge
        while True:
            end = min(bisect.bisect_left(upto, upto[begin] + room), len(words))
            part = "".join(words[begin:end]).lstrip()
            coded = tokenizer(part, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
            if len(coded["input_ids"]) >= size:
                break
            if end == len(words):
                raise too_short
            room *= 2
        ends = [stop for _, stop in coded["offset_mapping"][:size]]
        found.append(_Window(part[: max(ends)], coded["input_ids"][:size], ends))
    return found


@dataclass
class _Spans:
    """Finds the key tokens of a window that can be asked for by their text.

    Attributes:
        tokenizer: of the model.
        window: of text.
        exact: counts of tokens at the beginning of the window whose text encodes to these tokens alone, or not.
    """

    tokenizer: Any
    window: _Window
    exact: dict[int, bool] = field(default_factory=dict)

    def of(self, positions: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return where the context of each key token ends, and where the token begins and ends [characters].

        Args:
            positions: of the key tokens; those that cannot be asked for are left out.
        """
        ends = [0, *self.window.ends]
        asked = {position: self._context(position) for position in positions}
        self._encode(sorted({count for at, context in asked.items() for count in (context, at, at + 1) if count}))
        return [
            (ends[context], ends[at], ends[at + 1])
            for at, context in asked.items()
            if context and all(self.exact[count] for count in (context, at, at + 1))
        ]

    def _context(self, position: int) -> int:
        """Return how many tokens stand before a token, up to the last that does not end in a space."""
        text, ends = self.window.text, self.window.ends
        while position and (not ends[position - 1] or text[ends[position - 1] - 1].isspace()):
            position -= 1
        return position

    def _encode(self, counts: Sequence[int]) -> None:
        """Encode the beginnings of the window, many side by side."""
        ends, ids = self.window.ends, self.window.ids
        while counts:
            many = max(1, ENCODED // max(1, ends[counts[-1] - 1]))
            group, counts = counts[:many], counts[many:]
            texts = [self.window.text[: ends[count - 1]] for count in group]
            coded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            self.exact |= {count: row == ids[:count] for count, row in zip(group, coded, strict=True)}


# --- the evaluator ---------------------------------------------------------------------------------------------------


def _load_evaluator(name: str | None, tokenizer: Any, metadata: Mapping[str, Any]) -> Any:
    """Load the model that chooses, on the device of this process."""
    source = name or metadata.get("pretrained")
    if not isinstance(source, str):
        raise ValueError(
            "key tokens are chosen by the unpatched model: give --metadata evaluator= its folder or hub id (or "
            "pretrained= in --model_args)"
        )
    own = ("trust_remote_code", "dtype") if name else ("trust_remote_code", "dtype", "revision", "subfolder")
    options: dict[str, Any] = {"dtype": "auto"} | {key: metadata[key] for key in own if metadata.get(key) is not None}
    if name:
        other, _ = load_tokenizer((("name", name),))
        if other.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"evaluator={name} has another vocabulary than the model: choose one of the same")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = metadata.get("device") or (None if accelerator is None else f"{accelerator}:{_device_index()}")
    if metadata.get("parallelize") or metadata.get("device_map"):
        device = metadata.get("device_map") or "auto"
    if device not in (None, "cpu"):
        options["device_map"] = device
    return load(source, **options).eval()


def _device_index() -> int:
    return int(torch.accelerator.current_device_index())


def _choose(
    model: PreTrainedModel, rows: Sequence[TokenDocument], short_context: int | None, resume: str | None
) -> tuple[list[TokenDocument], KeyTokens]:
    """Mark the key tokens of the windows."""
    context, length = trained_length(model), len(rows[0].ids)
    short_context = default_short_context(context) if short_context is None else short_context
    check_short_context(context, short_context)
    if short_context >= length:
        raise ValueError(
            f"no token of a window of {length} tokens stands behind more than the short context, {short_context} of "
            f"the evaluator's {context}: choose longer max_seq_lengths, or give --metadata short_context= (at least an "
            "eighth)"
        )
    path = resume or Path(HF_HOME) / "rope_patch" / "key_tokens.jsonl"
    tokens = len(rows) * tokens_to_choose(length, context, short_context)
    with as_trained(model), progress.bar(tokens, "key tokens", hidden=processes()[0] != 0):
        return choose_key_tokens(
            model,
            rows,
            context=context,
            short_context=short_context,
            batch_tokens=EvalSpec.batch_tokens,
            evaluator=evaluator_name(model),
            result_cache=open_cache(path),
        )
