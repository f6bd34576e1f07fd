"""What the tasks under ``eval_tasks`` share: documents made offline for the tokenizer at hand, and their scores."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from transformers import AutoTokenizer

from rope_patch.evaluation.retrieval.chat_template import frame_of
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.fields import COUNT
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import spread_windows

TASK_OPTIONS = ("max_seq_lengths", "samples", "depths", "seed", "haystack", "text", "windows")
"""What ``--metadata`` may set."""

Documents = list[dict[str, Any]]
"""Rows of the data set of a task, for one length."""


class OfflineTask(ConfigurableTask):  # type: ignore[misc]
    """A YAML task whose documents are made here, at the lengths that ``--metadata max_seq_lengths=`` asks for.

    As in lm-eval's RULER tasks, the score of a length is a metric named after it. A length that is not run has no
    score, where RULER's tasks have -1, so that lm-eval's own aggregation and its standard errors serve.

    lm-eval has one ``max_gen_toks`` per task; here as many tokens are generated as each answer has, or as RULER
    generates.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        # `class` is the key by which lm-eval finds this class, and no field of a task's config.
        settings = {key: value for key, value in config.items() if key != "class"}
        super().__init__(config=settings)

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        """Make the documents, where other tasks download them."""
        self._make_documents()

    def _make_documents(self, **options: Any) -> None:
        """Make the documents of every length.

        Args:
            **options: further arguments of the task's ``custom_dataset``, beside those of its YAML file and
                ``--metadata``.

        Raises:
            ValueError: the task has no metric for a length.
        """
        metadata = dict(self.config.metadata)
        lengths = metadata.pop("max_seq_lengths")
        if isinstance(lengths, int):
            lengths = [lengths]
        metrics = [metric["metric"] for metric in self.config.metric_list]
        rows = []
        for length in lengths:
            if str(length) not in metrics:
                known = ", ".join(metric for metric in metrics if metric.isdigit())
                raise ValueError(f"{self.config.task} has no length {length!r}: max_seq_lengths can be {known}")
            documents = self.config.custom_dataset(length=length, **metadata, **self.config.dataset_kwargs, **options)
            rows += [{**row, "length": length} for row in documents]
        self.dataset = {"test": Dataset.from_list(rows)}

    def fewshot_context(self, doc: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the prompt of a document. That of a chat has its template already, which its length counts."""
        return doc["prompt"]

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> Any:
        """Make the request of a document; ``--gen_kwargs max_gen_toks=`` goes before the answer's length."""
        request = super().construct_requests(doc, ctx, **kwargs)
        if self.OUTPUT_TYPE == "generate_until":
            request.arguments[1].setdefault("max_gen_toks", doc["answer_tokens"])
        return request

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> Any:
        """Return the scores of a document; none under ``--predict_only``, which takes our metrics away."""
        scores = super().process_results(doc, results)
        metrics = self.aggregation()
        return {metric: score for metric, score in scores.items() if metric in metrics}

    def build_all_requests(self, **kwargs: Any) -> None:
        """Make the requests, always anew: lm-eval's cache of them would give those of other ``--metadata``.

        Raises:
            ValueError: a system prompt or examples before prompts that have exactly the length that is asked for.
        """
        if kwargs.get("system_instruction") or self.config.num_fewshot:
            raise ValueError(
                f"the prompts of {self.config.task} have exactly the length that is asked for: leave "
                "--system_instruction and --num_fewshot out"
            )
        if kwargs.get("apply_chat_template"):
            self._make_documents(frame=frame_of(kwargs["chat_template"]))
        super().build_all_requests(**{**kwargs, "cache_requests": False})


# --- documents -------------------------------------------------------------------------------------------------------


def retrieval_documents(
    task: str,
    *,
    length: int,
    samples: int,
    depths: Sequence[float] | float,
    seed: int,
    haystack: str,
    frame: tuple[str, str] | None = None,
    **rest: Any,
) -> Documents:
    """Return the prompts of :func:`rope_patch.evaluation.retrieval.measure.retrieval`, sample by sample.

    Args:
        task: the name of the retrieval task.
        length: the length of prompt and answer together, special tokens included [tokens].
        samples: the number of haystacks.
        depths: the depths of the needles, as shares of the haystack.
        seed: the seed from which haystacks and needles are drawn.
        haystack: the text around the needles: ``noise``, ``builtin``, or the path of a file or folder.
        frame: the texts before and after the user's turn in a chat, as
            :class:`~rope_patch.evaluation.retrieval.prompts.PromptMaker` takes them; None without a chat.
        **rest: further metadata, among them the arguments of the model, which name the tokenizer.

    Raises:
        ValueError: there is no tokenizer, an option is bad, or a prompt does not fit.
    """
    refuse_misspelled(rest)
    COUNT.checked("samples", samples)
    maker = _prompt_maker(tokenizer_arguments(rest), haystack, frame)
    depths = [depths] if isinstance(depths, int | float) else list(depths)
    rows = []
    for sample in range(samples):
        for prompt in maker.prompts(task, length, depths, seed=seed, sample=sample):
            rows.append(
                {
                    "task": task,
                    "prompt": prompt.text,
                    "target": prompt.target,
                    "expected": list(prompt.parts),
                    "depths": list(prompt.depths),
                    "sample": sample,
                    "answer_tokens": prompt.answer + prompt.beyond,
                }
            )
    return rows


def perplexity_documents(*, length: int, windows: int | None, text: str | None, **rest: Any) -> Documents:
    """Return windows that are spread evenly over a text, each of which is scored as a whole.

    The prompt of each is empty: lm-eval then puts one special token in front of the window, and scores all others.

    Args:
        length: the length of a window, with the special token in front [tokens].
        windows: the number of windows; by default 16, or as many as the text has room for.
        text: the path of a file or folder; the built-in held-out text by default.
        **rest: further metadata, among them the arguments of the model, which name the tokenizer.

    Raises:
        ValueError: there is no tokenizer, an option is bad, or the text is too short.
    """
    refuse_misspelled(rest)
    if windows is not None:
        COUNT.checked("windows", windows)
    tokenizer, _ = load_tokenizer(tokenizer_arguments(rest))
    source: Any = builtin_text("heldout") if text is None else Path(text).expanduser()
    encode = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    rows = []
    for window in spread_windows(tokenizer, source, length, windows)[0]:
        part = tokenizer.decode(window.ids[len(window.prefix) :])
        # Some tokenizers put a space before a text, which may be one token more than the window had.
        part = tokenizer.decode(encode(part)["input_ids"][: length - 1])
        tokens = len(encode(part)["input_ids"])
        rows.append({"prompt": "", "target": part, "tokens": tokens, "bytes": len(part.encode())})
    return rows


def refuse_misspelled(rest: Mapping[str, Any]) -> None:
    """Refuse metadata that is nearly one of ours; options of other tasks and arguments of the model pass.

    Raises:
        ValueError: there is such a key.
    """
    for key in rest:
        # Strict, since max_length, which looks like one of ours, is an argument of the model.
        close = difflib.get_close_matches(key, TASK_OPTIONS, n=1, cutoff=0.85)
        if close and key not in TASK_OPTIONS:
            raise ValueError(f"unknown --metadata {key}=. Did you mean {close[0]!r}? Known: {', '.join(TASK_OPTIONS)}")


# --- the tokenizer ---------------------------------------------------------------------------------------------------


TokenizerArguments = tuple[tuple[str, Any], ...]


def tokenizer_arguments(metadata: Mapping[str, Any]) -> TokenizerArguments:
    """Return the arguments of the model that say which tokenizer it uses, and how."""
    name = next((metadata[key] for key in ("tokenizer", "pretrained", "model") if metadata.get(key)), None)
    if name is None:
        raise ValueError(
            "lengths are counted in tokens of the model: give --metadata tokenizer= (or pretrained= in --model_args)"
        )
    names = ("add_bos_token", "revision", "subfolder", "trust_remote_code")
    return (("name", name), *((key, metadata[key]) for key in names if metadata.get(key) is not None))


@functools.lru_cache(maxsize=4)
def load_tokenizer(arguments: TokenizerArguments) -> tuple[Any, tuple[int, ...]]:
    """Return the tokenizer, and the special tokens that lm-eval will put in front of a text.

    Raises:
        ValueError: the tokenizer puts special tokens behind a text, too.
    """
    options = dict(arguments)
    name = options.pop("name")
    bos = options.get("add_bos_token")
    tokenizer = name
    if isinstance(name, str):
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    special = {} if bos is None else {"add_special_tokens": bos}
    # What a word has in addition to its own tokens are the special ones that stand around it.
    whole = tokenizer("word", **special)["input_ids"]
    bare = tokenizer("word", add_special_tokens=False)["input_ids"]
    front = len(whole) - len(bare)
    if whole[front:] != bare:
        raise ValueError(f"the tokenizer {name} adds special tokens after a text: give add_bos_token=False")
    return tokenizer, tuple(whole[:front])


@functools.lru_cache(maxsize=2)
def _prompt_maker(arguments: TokenizerArguments, haystack: str, frame: tuple[str, str] | None) -> PromptMaker:
    tokenizer, prefix = load_tokenizer(arguments)
    if frame is not None and tokenizer.bos_token is not None and frame[0].startswith(tokenizer.bos_token):
        prefix = ()  # lm-eval adds no token where the text begins with it
    return PromptMaker(tokenizer, haystack, prefix=prefix, frame=frame)


# --- scores ----------------------------------------------------------------------------------------------------------


def recall(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the share of the values that the output holds, as the engine's own task finds them.

    Where one value is asked for, it is 1 for a right answer and 0 for another.
    """
    correct = TASKS[doc["task"]].correct
    right = [correct(value, results[0]) for value in doc["expected"]]
    return {str(doc["length"]): sum(right) / len(right)}


def perplexity(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Return the log-likelihood with its weight, in tokens and in bytes."""
    score = results[0][0]
    length = doc["length"]
    return {str(length): (score, doc["tokens"]), f"bits_per_byte_{length}": (score, doc["bytes"])}
