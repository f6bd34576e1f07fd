"""How lm-eval's Hugging Face model answers here: without ``[tokens, vocab]`` logits, and nothing is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import find_executable_batch_size
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from rope_patch.modeling.inputs import check_ids
from rope_patch.modeling.reader import Reader, scored_together


class AnsweringLM(HFLM):  # type: ignore[misc]
    """Answers lm-eval's requests with a loaded model, as ``hf`` does.

    Attributes:
        reader: the reader of the loaded model, which gives states and scores.
        chunk: the number of tokens per forward pass; None reads whole prompts [tokens].
        maker: the factory of caches that quantize keys and values; None where nothing is quantized.
    """

    reader: Reader
    chunk: int | None
    maker: Any = None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather a tensor over the processes, but no count of requests, by which lm-eval would make their shares equal.

        Where a process has fewer, lm-eval repeats one of its requests and keeps the answers to all copies. Here no
        process waits for the passes of another.
        """
        if tensor.ndim == 0:
            return tensor.repeat(self.world_size)
        gathered: Tensor = super().all_gather(tensor)
        return gathered

    # --- log-likelihood

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:  # before any of them is read
            if len(context) + len(continuation) - 1 > self.max_length:
                self._refuse_to_cut(f"a context of {len(context)} and a continuation of {len(continuation)} tokens")
        answers: dict[int, tuple[float, bool]] = {}
        rows = group_requests(requests)
        hidden = disable_tqdm or self.rank != 0
        # HFLM asks for the windows of rolling requests batch by batch, with a bar for each.
        leave = override_bs is None
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=hidden, leave=leave) as bar:
            for batch in self._batches(rows, override_bs or self.batch_size):
                for i, answer in self._score(batch):
                    answers[i] = answer
                    if (texts := requests[i][0]) is not None:  # of a rolling window, HFLM itself stores the whole
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                    bar.update()
        return [answers[i] for i in range(len(requests))]

    def _new_cache(self, tokens: int) -> Any:
        """Return a cache for rows of so many tokens; None if a pass reads whole rows, which needs no cache."""
        if self.chunk is None or self.chunk >= tokens:
            return None
        if self.maker is None:
            return self.reader.new_cache(tokens)
        return self.maker()

    @torch.no_grad()
    def _score(self, batch: Sequence[RequestRow]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Score rows side by side; padding on the right is never seen by what stands before it."""
        reader = self.reader
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.ids) for row in batch], batch_first=True)
        asked = [(row, request) for row, of_row in enumerate(batch) for request in of_row.asked]
        for tokens in (ids, *(continuation for _, (_, _, continuation) in asked)):
            check_ids(tokens, reader.vocabulary)
        scores: list[list[tuple[Tensor, ...]]] = [[] for _ in asked]
        past = self._new_cache(ids.shape[1])
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None):
            for start, hidden in reader.read(ids, past, self.chunk):
                parts = []
                for row, (_, context, continuation) in asked:
                    # The state at position p scores the token at p + 1; none of these may be among those just read.
                    first = context - 1 - start
                    states = hidden[row, max(first, 0) : max(first + len(continuation), 0)]
                    parts.append((states, continuation[max(-first, 0) :][: len(states)]))
                for of_request, part in zip(scores, scored_together(reader.score, parts), strict=True):
                    of_request.append(part)
        for (_, (number, context, continuation)), of_request in zip(asked, scores, strict=True):
            losses, tokens = map(torch.cat, zip(*of_request, strict=True))
            if bool(losses.isnan().any()):
                at_token = context + int(losses.isnan().nonzero()[0])
                total = context + len(continuation)
                raise ValueError(f"the model gives NaN for token {at_token} of a request of {total} tokens")
            yield number, (-float(losses.sum()), bool((tokens == continuation).all()))

    def _batches(self, rows: list[RequestRow], size: int | str) -> Iterator[list[RequestRow]]:
        """Cut rows, longest first, into batches; ``auto`` fits the first and gives the others as many tokens."""
        room = 0
        if rows and size == "auto":
            room = self._detect_batch_size(rows) * len(rows[0].ids)
        while rows:
            count = int(size) if size != "auto" else max(1, min(self.max_batch_size, room // len(rows[0].ids)))
            yield rows[:count]
            rows = rows[count:]

    def _detect_batch_size(self, rows: Sequence[RequestRow] = ()) -> int:
        """Return how many of the longest rows can be read side by side; nothing is made that scoring does not make."""
        length = len(rows[0].ids) if rows else self.max_length

        @torch.no_grad()
        def attempt(batch_size: int) -> int:
            # How much memory a pass needs does not depend on which tokens are read.
            ids = torch.ones((batch_size, length), dtype=torch.long)
            for _ in self.reader.read(ids, self._new_cache(length), self.chunk):
                pass
            return batch_size

        try:
            size = int(find_executable_batch_size(attempt, starting_batch_size=self.max_batch_size)())
        except RuntimeError as error:
            # As HFLM does, go on with single rows, which show the error of the memory itself.
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
        # HFLM is not told left_truncate_len: it would cut the prompts to it, with a warning.
        ids, mask = super().tok_batch_encode(strings, padding_side=padding_side, **kwargs)
        if left_truncate_len is not None and ids.shape[1] > left_truncate_len:
            answer = self.max_length - left_truncate_len
            self._refuse_to_cut(f"a prompt of {ids.shape[1]} tokens and {answer} to generate")
        return ids, mask

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        if self.chunk is not None:
            kwargs.setdefault("prefill_chunk_size", self.chunk)
        if self.maker is None:
            answer: Tensor = super()._model_generate(context, max_length, stop, **kwargs)
            return answer
        # Prompts are padded on the left, which quantized caches do not take: each is read alone, without its padding.
        answers = []
        for row, mask in zip(context, kwargs.pop("attention_mask"), strict=True):
            padding = row[mask == 0]
            prompt = row[mask != 0][None]
            kwargs[self.reader.cache_argument] = self.maker()
            room = max_length - len(padding)
            answer = super()._model_generate(prompt, room, stop, attention_mask=torch.ones_like(prompt), **kwargs)
            answers.append(torch.cat((padding, answer[0])))
        return torch.nn.utils.rnn.pad_sequence(answers, True, self.tokenizer.pad_token_id)

    def _refuse_to_cut(self, what: str) -> None:
        raise ValueError(
            f"{what} do not fit into the model's {self.max_length}, and nothing is cut: choose shorter texts, or say "
            "in --model_args what the model can read, target_length= with a method or max_length="
        )


# --- log-likelihood requests as rows of tokens


class RequestRow(NamedTuple):
    """Requests of which the same tokens are read, such as the answers of one token to a question.

    Attributes:
        ids: the tokens that are read: all but the last one of each request.
        asked: the number of each request, with the number of tokens of its context and the tokens of its continuation.
    """

    ids: tuple[int, ...]
    asked: list[tuple[int, int, Tensor]]


def group_requests(requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[RequestRow]:
    """Return requests in rows, the longest first.

    Args:
        requests: the requests: each one's texts or None, the tokens of its context, and those of its continuation.
    """
    rows: dict[tuple[int, ...], RequestRow] = {}
    for i, (_, context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise ValueError(f"request {i} has {len(context)} tokens of context and {len(continuation)} to score")
        ids = (*context, *continuation[:-1])
        rows.setdefault(ids, RequestRow(ids, [])).asked.append((i, len(context), torch.tensor(continuation)))
    return sorted(rows.values(), key=lambda row: -len(row.ids))
