"""Evaluations of short texts in memory, and comparisons and checks whose specs are given as keyword arguments."""

import itertools
import statistics

from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.perplexity.result import Bucket, DocumentScore, PerplexityResult
from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.measure import RetrievalCell, RetrievalResult, Sample
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.kv_evaluation.kv_check import kv_check
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits

RUN = {"layer_types", "freeze_at", "resume", "methods"}


def suite_of(tokenizer, *, text=None, haystack="builtin", **asked):
    """A suite of a spec with these options; a text or haystack in memory replaces that of the spec."""
    named = "builtin" if isinstance(haystack, Haystack) else haystack
    held = haystack if isinstance(haystack, Haystack) else None
    return EvalSuite(EvalSpec(haystack=named, **asked), tokenizer, text=text, haystack=held)


def compared(model, tokenizer, methods, **options):
    """A comparison; options that ``compare`` itself does not take make its suite."""
    own = {name: options.pop(name) for name in RUN & options.keys()}
    return compare(model, tokenizer, methods, suite_of(tokenizer, **options), **own)


def check_cache(model, tokenizer, formats, **options):
    """A check of caches; options that ``kv_check`` itself does not take make its limits and its suite."""
    own = {name: options.pop(name) for name in RUN & options.keys()}
    if options["lengths"]:
        options.setdefault("bucket", max(options["lengths"]))
    own["limits"] = Limits(options.pop("tolerance", 0.02))
    return kv_check(model, tokenizer, formats, suite_of(tokenizer, **options), **own)


def answered(expected, output, correct, logprob):
    """One answer to a prompt; if it is correct, its tokens are also the most probable ones."""
    return Sample(expected, output, correct, logprob)


def retrieval_of(hits, task="passkey"):
    """A retrieval result whose prompts of each (length, depth) are answered right or wrong as ``hits`` says."""
    cells = tuple(
        RetrievalCell(
            *place, tuple(answered("1", "1" if hit else "2", bool(hit), -0.5 if hit else -9.0) for hit in column)
        )
        for place, column in hits.items()
    )
    return RetrievalResult(task, cells, 0, "noise", "", ())


def perplexity_of(losses, edges):
    """A perplexity result of windows with given losses between the edges: (windows, buckets) [nats/token]."""
    sizes = tuple(stop - start for start, stop in itertools.pairwise(edges))  # as if position 0 were predicted, too
    sums = [tuple(n * loss for n, loss in zip(sizes, window, strict=True)) for window in losses]
    documents = tuple(DocumentScore(f"w{i}", sizes, each, sum(sizes), sum(each), None) for i, each in enumerate(sums))
    buckets = tuple(
        Bucket(start, stop, n * len(losses), statistics.fmean(column))
        for (start, stop), n, column in zip(itertools.pairwise(edges), sizes, zip(*losses, strict=True), strict=True)
    )
    tokens = sum(sizes) * len(losses)
    length = edges[-1]
    return PerplexityResult(
        nll=sum(map(sum, sums)) / tokens,
        tokens=tokens,
        bits_per_byte=None,
        windows=len(losses),
        window=length,
        stride=length,
        chunk=length,
        buckets=buckets,
        documents=documents,
    )


def result_of(perplexity, *retrieval, seed=0):
    """An evaluation result, as a suite returns it, from a perplexity and retrieval results that were made by hand."""
    lengths = sorted({cell.length for result in retrieval for cell in result.cells})
    depths = sorted({cell.depth for result in retrieval for cell in result.cells})
    samples = max(len(cell.samples) for result in retrieval for cell in result.cells)
    spec = EvalSpec(
        lengths,
        depths=depths,
        samples=samples,
        windows=perplexity.windows if perplexity else 0,
        tasks=[result.task for result in retrieval],
        seed=seed,
    )
    return EvalResult(spec, perplexity, {result.task: result for result in retrieval})
