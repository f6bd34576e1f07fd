"""lm-eval's Hugging Face model with a patch on it: no ``[tokens, vocab]`` logits, no prompt cut from the left."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import find_executable_batch_size
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import adapter_base, is_adapter, read_record
from rope_patch.evaluation.calibration import calibration
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.plans import key_means
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.methods import METHODS, MethodLike, as_method
from rope_patch.modeling.scoring import SLICE, Reader, fingerprint
from rope_patch.patching.apply import apply, reapply
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.record import key_of
from rope_patch.patching.two_tables import switch_of
from rope_patch.patching.verify import inspect_model, verify_model
from rope_patch.words import did_you_mean

NAME = "rope_patch"
"""What ``--model`` calls it."""

PARAMETERS = {f.name for method in METHODS.values() for f in fields(method)}
"""Every parameter of every method; none of them is an argument of lm-eval's."""

LOADING = set(inspect.signature(PreTrainedModel.from_pretrained).parameters) | {
    "attn_implementation",
    "device_map",
    "device_mesh",
    "experts_implementation",
    "kernel_config",
    "key_mapping",
    "max_memory",
    "offload_buffers",
    "use_kernels",
    "variant",
}
"""What ``from_pretrained`` takes; it names half of them only inside."""

IDENTITY = "rope_patch: whose answers these are"


@dataclass(frozen=True, eq=False)
class _Row:
    """Requests that begin one another: the longest is read, and with it all of them.

    Attributes:
        ids: what is read, all but the last token of the longest request (tokens,) int64.
        asked: of each request its number, the tokens of its context, and its continuation.
    """

    ids: Tensor
    asked: list[tuple[int, int, Sequence[int]]]

    def targets(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return which state scores which token, each pair once and in order, and of each request its pairs."""
        pairs = [
            torch.stack([torch.arange(context - 1, context - 1 + len(rest)), torch.tensor(rest)], 1)
            for _, context, rest in self.asked
        ]
        unique, where = torch.unique(torch.cat(pairs), dim=0, return_inverse=True)
        return unique[:, 0].contiguous(), unique[:, 1], where.split([len(rest) for _, _, rest in self.asked])


def _base_and_adapter(adapter: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the base of an adapter that was given as the model, which ``hf`` would load onto its base's own tables."""
    base = adapter_base(adapter)
    if base == adapter:
        raise ValueError(f"{adapter} holds a model and an adapter: give their folders apart, pretrained= and peft=")
    own = {"tokenizer": adapter} if (Path(adapter) / "tokenizer_config.json").is_file() else {}
    return base, own | arguments | {"peft": adapter}


class RopePatchLM(HFLM):  # type: ignore[misc]
    """A causal language model under a patch, for lm-eval.

    Log-likelihoods are those of lm-eval's ``hf``, computed in float32 a slice at a time. What does not fit raises;
    ``hf`` would cut it from the left, and the needle with it.

    Args:
        pretrained: folder, hub id, or a model in memory; it is patched in place. An adapter's folder stands for its
            base with ``peft=``.
        method: a name with its parameters as further arguments (``method=p_rope,p=0.75``), a method string
            (``method=abf:rope_theta=500000+p_rope:p=0.5``), or in JSON a list or :meth:`~rope_patch.Method.to_dict`.
            By default the model stays as its folder, or its adapter's record, says.
        target_length: the context to state [tokens]; what fits follows from it.
        layer_types: tables to patch, joined by ``/``, on models with one per layer type.
        freeze_at: length at which to freeze a dynamic table [tokens].
        replace: replace the patch a folder carries.
        chunk: tokens per forward pass; whole prompts by default.
        kv_cache: a scheme by which keys and values are read as if quantized, ``kivi-2`` or the text of
            :mod:`rope_patch.kv_cache.schemes`, exactly as decoding would read them.
        **kwargs: arguments of lm-eval's ``hf``, the method's parameters, and what ``from_pretrained`` takes.

    Raises:
        ValueError: an unknown argument, a bad method, an encoder-decoder, or an option that would cut prompts.
    """

    def __init__(
        self,
        pretrained: Any,
        method: MethodLike | None = None,
        *,
        target_length: int | None = None,
        layer_types: str | Sequence[str] | None = None,
        freeze_at: int | None = None,
        replace: bool = False,
        chunk: int | None = None,
        kv_cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        scheme = Scheme() if kv_cache is None else Scheme.parse(str(kv_cache))
        params = {key: kwargs.pop(key) for key in list(kwargs) if key in PARAMETERS}
        options = {"target_length": target_length, "layer_types": layer_types, "freeze_at": freeze_at}
        given = [*params, *(key for key, value in options.items() if value is not None)]
        if method is None and given:
            raise ValueError(f"{given[0]} says how to patch: give method= too (method=default leaves the table)")
        requested = None if method is None else as_method(method, **params)
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f"chunk must be a whole number of tokens >= 1, got {chunk!r}")
        if kwargs.get("truncation"):
            raise ValueError("truncation=True would cut prompts: leave it out, and choose tasks that fit")
        if not str(kwargs.get("softmax_dtype") or "float32").endswith("float32"):
            raise ValueError(f"log-probabilities are float32 here, got softmax_dtype={kwargs['softmax_dtype']}")
        self.chunk = chunk
        if isinstance(pretrained, str) and is_adapter(pretrained) and "peft" not in kwargs:
            pretrained, kwargs = _base_and_adapter(pretrained, kwargs)
        if not isinstance(pretrained, str):
            self._refuse_unknown(kwargs, set(inspect.signature(HFLM.__init__).parameters))
        self._split_over_processes(pretrained, kwargs)
        record = read_record(self.peft) if self.peft else None
        if requested is not None and record is not None:
            raise ValueError(f"the adapter {self.peft} was trained under {record.to_method()}: leave method= out")
        if requested is not None:
            if isinstance(layer_types, str):
                options["layer_types"] = layer_types.split("/")
            apply(self.model, requested, replace=replace, **options)  # type: ignore[arg-type]
        elif record is not None:
            reapply(self.model, record)
        elif getattr(self.model.config.get_text_config(), "rope_patch", None):
            verify_model(self.model)  # what the original loader built, before ours takes its place
            reapply(self.model, find_rotary(self.model).record)  # type: ignore[arg-type]
        self.reader = Reader(self.model)
        self.scheme = scheme
        if scheme != Scheme():
            means = key_means(self.model, calibration(self.tokenizer, self.model)) if scheme.key.centre else None
            self._stack = contextlib.ExitStack()  # for as long as this object lives
            self.maker = self._stack.enter_context(quantized(self.model, scheme, means=means))

    def _split_over_processes(self, pretrained: Any, arguments: dict[str, Any]) -> None:
        """Load the model as HFLM does, one in each process of ``torchrun`` or ``accelerate launch``.

        HFLM splits the requests where a machine has two GPUs or more, and numbers the processes of each machine alone;
        here they are split wherever there are several processes, which are numbered over all machines.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # accelerate joins processes on CPUs only when told
        super().__init__(pretrained, **arguments)
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > 1:
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    # --- loading: what HFLM would pass on, take or report in its own way

    def _get_backend(self, config: Any, backend: str = "default", trust_remote_code: bool | None = False) -> None:
        super()._get_backend(config, backend=backend, trust_remote_code=trust_remote_code)
        if self.backend != "causal":
            raise ValueError(
                f"{getattr(config, 'model_type', 'this model')} is an encoder-decoder, and {NAME} reads causal "
                "language models: use --model hf"
            )

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        known = {*inspect.signature(HFLM._create_model).parameters, *LOADING}
        self._refuse_unknown({key: v for key, v in kwargs.items() if not hasattr(self.config, key)}, known)
        super()._create_model(pretrained, **kwargs)

    def _refuse_unknown(self, given: dict[str, Any], known: set[str]) -> None:
        ours = {*inspect.signature(RopePatchLM.__init__).parameters} - {"self", "kwargs"}
        everything = {*known, *ours, *PARAMETERS, *inspect.signature(HFLM.__init__).parameters} - {"self", "kwargs"}
        for key in given:
            if key not in known:
                raise ValueError(
                    f"unknown argument {key!r}.{did_you_mean(key, everything)} {NAME} takes {', '.join(sorted(ours))}, "
                    "the parameters of its method, and what lm-eval's hf and from_pretrained take"
                )

    def get_model_info(self) -> dict[str, Any]:
        """Return what results say of the model: lm-eval's entries, the method, and the hash of every table in use."""
        info: dict[str, Any] = super().get_model_info()
        with contextlib.suppress(ValueError):  # a model without rotary tables, unpatched
            seen = inspect_model(self.model)
            info["rope_patch"] = {
                "method": str(seen.record.to_method()) if seen.record else None,
                "tables": {key_of(slot.layer_type): slot.fingerprint for slot in seen.tables},
                "max_length": self.max_length,
                "chunk": self.chunk,
                "kv_cache": str(self.scheme),
            }
        return info

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's file of answers (``--use_cache``), which does not know whose answers they are.

        Raises:
            ValueError: the file holds answers of another model, or of this one under another patch.
        """
        answers = cache_hook.dbdict
        if answers is not None:
            identity = f"{fingerprint(self.model)}/{self.max_length}/{self.scheme}"
            if len(answers) and answers.get(IDENTITY) != identity:
                raise ValueError("the file of --use_cache holds answers of another model or patch: give another path")
            answers[IDENTITY] = identity
        super().set_cache_hook(cache_hook)

    # --- log-likelihood

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:  # before any has run
            if len(context) + len(continuation) - 1 > self.max_length:
                self._refuse_to_cut(f"a context of {len(context)} and a continuation of {len(continuation)} tokens")
        answers: list[tuple[float, bool] | None] = [None] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="loglikelihood") as bar:
            for batch in self._batches(_grouped(requests, self._table_of), override_bs or self.batch_size):
                for i, answer in self._score(batch):
                    answers[i] = answer
                    if (texts := requests[i][0]) is not None:  # HFLM keeps the whole of a rolling window
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update()
        return [answer for answer in answers if answer is not None]

    def _table_of(self, length: int) -> int:
        """Return a number that stands for the table under which a text of so many tokens is read."""
        if self.reader.dynamic:
            return length
        switch = switch_of(self.model)
        return int(switch is not None and length > switch)

    def _new_cache(self, capacity: int) -> Any:
        return self.reader.new_cache(capacity) if self.scheme == Scheme() else self.maker()

    @torch.no_grad()
    def _score(self, batch: Sequence[_Row]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Score rows side by side; padding on the right is never seen by what stands before it."""
        reader = self.reader
        ids = torch.nn.utils.rnn.pad_sequence([row.ids for row in batch], batch_first=True)
        asked = [row.targets() for row in batch]
        for tokens in (ids, *(targets for _, targets, _ in asked)):
            reader.check(tokens)
        nll = [torch.full((len(states),), math.nan, dtype=torch.float64) for states, _, _ in asked]
        right = [torch.zeros(len(states), dtype=torch.bool) for states, _, _ in asked]
        past = self._new_cache(ids.shape[1]) if self.chunk is not None and self.chunk < ids.shape[1] else None
        mixed = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            reach = [len(row.ids) + 1 for row in batch]  # with the last token of each request
            for start, hidden in reader.read(ids, past, self.chunk, reach=reach):
                for i, (states, targets, _) in enumerate(asked):
                    low, high = torch.searchsorted(states, torch.tensor([start, start + hidden.shape[1]])).tolist()
                    for first in range(low, high, SLICE):  # no copy of all states
                        at = slice(first, min(first + SLICE, high))
                        nll[i][at], best = reader.score(hidden[i, states[at] - start], targets[at])
                        right[i][at] = best == targets[at]
        for row, (states, _, parts), losses, hits in zip(batch, asked, nll, right, strict=True):
            if bool(losses.isnan().any()):
                at_token = 1 + int(states[losses.isnan()][0])
                raise ValueError(f"the model gives NaN for token {at_token} of a request of {len(row.ids) + 1} tokens")
            for (number, _, _), own in zip(row.asked, parts, strict=True):
                yield number, (-float(losses[own].sum()), bool(hits[own].all()))

    def _batches(self, rows: list[_Row], size: int | str) -> Iterator[list[_Row]]:
        """Cut rows, longest first, into batches; ``auto`` fits the first and gives the others as many tokens."""
        longest = len(rows[0].ids) if rows else 1
        room = self._detect_batch_size(rows) * longest if rows and size == "auto" else 0
        while rows:
            count = int(size) if size != "auto" else max(1, min(self.max_batch_size, room // len(rows[0].ids)))
            yield rows[:count]
            rows = rows[count:]

    def _detect_batch_size(self, requests: Sequence[_Row] | None = None, pos: int = 0) -> int:
        """Return how many of the longest rows can be read side by side; nothing is made that scoring does not make."""
        length = len(requests[pos].ids) if requests else self.max_length

        @torch.no_grad()
        def attempt(batch_size: int) -> int:
            rows = torch.ones((batch_size, length), dtype=torch.long)
            past = self._new_cache(length) if self.chunk is not None and self.chunk < length else None
            for _ in self.reader.read(rows, past, self.chunk):
                pass
            return batch_size

        try:
            size = int(find_executable_batch_size(attempt, starting_batch_size=self.max_batch_size)())
        except RuntimeError as error:
            if "No executable batch size" not in str(error):
                raise
            size = 1
        if self.world_size > 1:
            size = int(self.all_gather(torch.tensor([size], device=self.device)).min())
        self.batch_sizes = {0: size}
        return size

    # --- generation

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Encode prompts for ``generate_until``.

        Raises:
            ValueError: the longest does not fit; it is not cut.
        """
        ids, mask = super().tok_batch_encode(strings, padding_side=padding_side, **kwargs)
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            answer = self.max_length - left_truncate_len
            self._refuse_to_cut(f"a prompt of {ids.shape[1]} tokens and {answer} to generate")
        return ids, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        if self.chunk is not None:
            kwargs.setdefault("prefill_chunk_size", self.chunk)
        if self.scheme != Scheme():
            mask = kwargs.get("attention_mask")
            kwargs["past_key_values"] = self.maker(None if mask is None else (mask == 0).sum(1))
        answer: Tensor = super()._model_generate(context, max_length, stop, **kwargs)
        return answer

    def _refuse_to_cut(self, what: str) -> None:
        raise ValueError(
            f"{what} do not fit into the model's {self.max_length}, and nothing is cut: choose a shorter task, or say "
            "in --model_args what the model can read, target_length= with a method or max_length="
        )


def _grouped(requests: Sequence[tuple[Any, list[int], list[int]]], table_of: Callable[[int], int]) -> list[_Row]:
    """Requests in rows, the longest first.

    Args:
        requests: each with its context and its continuation.
        table_of: a number that stands for the table under which a model reads a text of so many tokens; only requests
            that are read under the same one share a row.
    """
    texts = []
    for i, (_, context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise ValueError(f"request {i} has {len(context)} tokens of context and {len(continuation)} to score")
        ids = numpy.array([*context, *continuation[:-1]], dtype=">i4").tobytes()  # in the order of the numbers
        texts.append((table_of(len(context) + len(continuation)), ids, i))
    rows: list[tuple[int, bytes, list[int]]] = []
    for table, ids, i in sorted(texts, reverse=True):  # what begins with a text comes right before it
        if not rows or rows[-1][0] != table or not rows[-1][1].startswith(ids):
            rows.append((table, ids, []))
        rows[-1][2].append(i)
    rows.sort(key=lambda row: (-len(row[1]), row[1]))
    return [
        _Row(
            torch.from_numpy(numpy.frombuffer(ids, dtype=">i4").astype(numpy.int64)),
            [(i, len(requests[i][1]), requests[i][2]) for i in sorted(numbers)],
        )
        for _, ids, numbers in rows
    ]


if NAME not in model_registry:  # an entry point, or rope-patch-eval, may have named this class already
    model_registry.register(NAME, target=RopePatchLM)
