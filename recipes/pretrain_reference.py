"""Train a reference checkpoint: a 2M-parameter model that reads 256 tokens and can copy and retrieve.

    python recipes/pretrain_reference.py llama -o out/llama          # about 15 minutes on one CPU core
    python recipes/pretrain_reference.py gemma3 -o out/gemma3 --device cuda
    python recipes/pretrain_reference.py llama --scaled llama3 -o out/llama3    # the bundled model, to 1024 tokens
    python recipes/pretrain_reference.py llama --patch p_rope:p=0.5 -o out/p    # from random weights, under p-RoPE

With so few training tokens, text alone does not teach a model of this size to retrieve; this curriculum does. Stages:
text; then short windows of repeated random strings and passkeys until copying appears, which is sudden; then longer
windows with more text. The text is `cpython_text("train")`: what ships with the Python that runs this script (and
`--text`). At the end the model is measured on `cpython_text("heldout")`, which it never read, and the folder gets the
weights in bfloat16, the tokenizer and a model card.

`--patch` trains random weights under a method from the first step on, as Barbero et al. (2024, table 2) compare p-RoPE
with other tables; `--scaled` trains the bundled weights on, as releases with a scaled table were made.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import inspect
import json
import os
import platform
import random
import shlex
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import rope_patch
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.tasks import TASKS
from rope_patch.runtime.packaged import data_path

VOCABULARY = 1024
LENGTH = 256
BOS, EOS, PAD = 0, 1, 2
# The answer is a few tokens of a passkey row, so each of them counts more in the loss than a token of text.
ANSWER_WEIGHT = 5.0
PASSKEY = TASKS["passkey"]

# Folders of the standard library that some distributions leave out, or that hold tables rather than text.
LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}

# IPython, notebooks and command lines replace these functions of sys; Python keeps the originals under other names.
HOOKS = {name: f"__{name}__" for name in ("breakpointhook", "displayhook", "excepthook", "unraisablehook")}


@dataclass(frozen=True)
class Stage:
    """A stage of the curriculum: row length, training tokens, and shares of text and repeats; the rest are passkeys."""

    name: str
    length: int
    tokens: int
    text: float
    repeat: float
    until_copying: bool = False
    decay: bool = False


# What releases do whose table is not plain: train on at a longer context, under the table that they state.
FACTOR = 4
SCALED = {
    "llama3": {
        "factor": float(FACTOR),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH,
    },
    "yarn": {"factor": float(FACTOR), "original_max_position_embeddings": LENGTH},
    "linear": {"factor": float(FACTOR)},
    # Gemma 4 rotates a quarter of the pairs of its full layers, and scales nothing.
    "proportional": {"partial_rotary_factor": 0.25},
}
SCALED_CURRICULUM = (
    Stage("longer", LENGTH * FACTOR // 2, 400_000, 0.5, 0.35),
    Stage("full", LENGTH * FACTOR, 1_600_000, 0.6, 0.3, decay=True),
)
CURRICULUM = (
    Stage("text", 128, 2_000_000, 1.0, 0.0),
    Stage("copying", 64, 2_500_000, 0.1, 0.7, until_copying=True),
    Stage("longer", 128, 700_000, 0.3, 0.5),
    Stage("full", LENGTH, 2_600_000, 0.6, 0.35, decay=True),
)


@functools.lru_cache(maxsize=2)
def cpython_text(split: str) -> tuple[str, ...]:
    """Return the documents of a split of what ships with this Python; those of 3.11.7 trained the bundled models.

    The hash of a document decides its split (80 % train, 10 % heldout, 10 % haystack), so that no text is in two.

    Raises:
        FileNotFoundError: this Python was installed without the source of its standard library.
    """
    return tuple(text for text in cpython_documents() if split_of(text) == split)


def digest_of(documents: tuple[str, ...]) -> str:
    """Return the digest of documents, in their order."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def split_of(text: str) -> str:
    """Return the split of a document."""
    # Its content alone decides, not its place in the list: other documents may come and go between versions of Python.
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10
    if share == 8:
        return "heldout"
    if share == 9:
        return "haystack"
    return "train"


def cpython_documents() -> Iterator[str]:
    """Yield what this Python ships: its language topics, the docstrings of its C modules, and its library."""
    yield from reference_documents()
    yield from source_documents()


def reference_documents() -> Iterator[str]:
    """Yield the topics of the language reference, and the docstrings of the modules that are written in C."""
    topics = importlib.import_module("pydoc_data.topics").topics
    yield from (text for _, text in sorted(topics.items()))
    for name in sorted(sys.builtin_module_names):
        yield docstrings(name)


def source_documents() -> Iterator[str]:
    """Yield the files of the standard library, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, inside, files in os.walk(root):
        inside[:] = set(inside) - LEFT_OUT  # what is left out is most of the files, and is not even listed
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    # Sorted by the text of the path with slashes, so that the order is the same on every system.
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise FileNotFoundError("this Python carries no source of its standard library")
    for path in paths:
        # The two prefixes are of files that describe how this Python was built: they differ between machines.
        if not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata")):
            text = path.read_text(encoding="utf-8", errors="ignore").strip()
            # Stubs, such as an empty __init__.py, are left out.
            if len(text) > 200:
                yield text


def docstrings(module_name: str) -> str:
    """Return the docstrings of a module that is written in C, whose source is not among the Python files.

    What a running program has put into the module is left out, so that every process reads the same corpus: functions
    written in Python and the last error. A hook that may have been replaced is read as ``__hook__``, the name under
    which Python keeps the original.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of the modules are deprecated
        module = importlib.import_module(module_name)
    names = [name for name in sorted(vars(module)) if not name.startswith(("_", "last_"))]
    members = [getattr(module, HOOKS.get(name, name)) for name in names]
    own = [member for member in members if callable(member) and not inspect.isfunction(member)]
    texts = [inspect.getdoc(module), *map(inspect.getdoc, own)]
    return f"{module_name}\n\n" + "\n\n".join(dict.fromkeys(text for text in texts if text))


def build_model(shape: str) -> PreTrainedModel:
    """Return a fresh model: `llama`, or `gemma3` with alternating sliding and full layers."""
    common = {
        "vocab_size": VOCABULARY,
        "head_dim": 32,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if shape == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                **common,
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=6,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            )
        )
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **common,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            query_pre_attn_scalar=32,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 3,
            rope_parameters={"sliding_attention": dict(plain), "full_attention": dict(plain)},
        )
    )


def scaled_model(shape: str, kind: str) -> PreTrainedModel:
    """Return the bundled model of a shape with a scaled table and 1024 tokens of stated context, to be trained on."""
    folder = data_path("assets") / shape
    config = AutoConfig.from_pretrained(folder)
    scaling = {"rope_type": kind, "rope_theta": 10000.0, **SCALED[kind]}
    if shape == "gemma3":
        config.rope_parameters["full_attention"] = scaling
    else:
        config.rope_parameters = scaling
    config.max_position_embeddings = LENGTH * FACTOR
    # Training steps are too small for weights in bfloat16.
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)


def train_tokenizer(documents: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 1024 tokens in which every digit is a token of its own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=LENGTH
    )


class Sampler:
    """Draws rows of token ids, each with a weight that says how much its prediction counts in the loss."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stream: list[int], rng: random.Random) -> None:
        self.tokenizer, self.stream, self.rng = tokenizer, stream, rng
        self.digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]

    def row(self, stage: Stage) -> tuple[list[int], list[float]]:
        """Return one row of the stage's mixture: ids (length,) and weights (length,)."""
        kind = self.rng.random()
        if kind < stage.text:
            first = self.rng.randrange(len(self.stream) - stage.length)
            return [BOS, *self.stream[first : first + stage.length - 1]], [1.0] * stage.length
        if kind < stage.text + stage.repeat:
            return self.repeated(stage.length, self.rng.randint(4, (stage.length - 1) // 2))
        return self.passkey(stage.length, self.rng.random())

    def passkey(self, length: int, depth: float) -> tuple[list[int], list[float]]:
        """Return a passkey prompt with its answer; the text is cut between any two tokens, even within a word."""
        key = "".join(self.rng.choice("0123456789") for _ in range(PASSKEY.digits))
        needle, question, ending = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (PASSKEY.needle.format(value=key), PASSKEY.question, f"{PASSKEY.question} {key}")
        )
        room = length - 1 - len(needle) - len(ending)
        first = self.rng.randrange(len(self.stream) - room + 1)
        before = round(depth * room)
        hay = self.stream[first : first + room]
        ids = [BOS, *hay[:before], *needle, *hay[before:], *ending]
        answer = len(ending) - len(question)
        return ids, [1.0] * (length - answer) + [ANSWER_WEIGHT] * answer

    def repeated(self, length: int, size: int) -> tuple[list[int], list[float]]:
        """Return a random string that is repeated to the end of the row; the first copy does not count in the loss."""
        # Half of the strings are digits, because a passkey is copied digit by digit.
        letters = self.digits if self.rng.random() < 0.5 else range(PAD + 1, VOCABULARY)
        string = [self.rng.choice(letters) for _ in range(size)]
        ids = [BOS, *(string * (length // size + 1))][:length]
        # Nothing predicts a random string the first time.
        return ids, [0.0 if i < 1 + size else 1.0 for i in range(length)]

    def batch(self, stage: Stage, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids (rows, length) and weights (rows, length)."""
        ids, weights = zip(*(self.row(stage) for _ in range(rows)), strict=True)
        return torch.tensor(ids, device=device), torch.tensor(weights, device=device)


def steps(stage: Stage, tokens_per_step: int) -> int:
    """Return the number of optimizer steps of a stage."""
    return max(1, stage.tokens // tokens_per_step)


def train(
    model: PreTrainedModel, sampler: Sampler, options: argparse.Namespace, curriculum: tuple[Stage, ...] = CURRICULUM
) -> list[dict[str, float | str]]:
    """Train through a curriculum, and return the log."""
    # Only matrices decay: the vectors are scales of norms, which have no reason to be near zero.
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(0.9, 0.95),
    )
    log: list[dict[str, float | str]] = []
    seen = 0
    model.train()
    for stage in curriculum:
        rows = options.tokens_per_step // stage.length
        total = max(1, int(steps(stage, options.tokens_per_step) * options.scale))
        copying = 0.0
        bar = tqdm(range(total), desc=f"{stage.name:8s}", mininterval=2)
        for step in bar:
            # The learning rate rises linearly over the first 50 steps of the run, not of each stage.
            warm = min(1.0, (seen / options.tokens_per_step + 1) / 50)
            rate = options.lr * warm * (max(0.02, 1 - step / total) if stage.decay else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate
            ids, weights = sampler.batch(stage, rows, options.device)
            with torch.autocast(options.device, torch.bfloat16):
                # Training never reads a KV cache.
                logits = model(ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            )
            counts = weights[:, 1:].flatten()
            mean = (loss * counts).sum() / counts.sum()
            mean.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen += ids.numel()
            if step % 25 == 24 or step == total - 1:
                if stage.repeat:
                    copying = copy_accuracy(model, sampler, stage.length, 16, options.device)
                bar.set_postfix(loss=f"{mean.item():.2f}", copying=f"{copying:.2f}", tokens=f"{seen / 1e6:.1f}M")
                log.append(
                    {"stage": stage.name, "tokens": seen, "loss": round(mean.item(), 4), "copying": round(copying, 4)}
                )
                # Copying appears suddenly, so the stage ends when it is there; its tokens are only a limit.
                if stage.until_copying and copying > 0.95:
                    break
    return log


@torch.no_grad()
def copy_accuracy(model: PreTrainedModel, sampler: Sampler, length: int, rows: int, device: str) -> float:
    """Return the share of right predictions in the second copy of a random string that stands in a row twice."""
    size = (length - 1) // 2
    ids = torch.tensor([sampler.repeated(length, size)[0] for _ in range(rows)], device=device)
    training = model.training
    model.eval()
    with torch.autocast(device, torch.bfloat16):
        predicted = model(ids, use_cache=False).logits[:, :-1].argmax(-1)
    model.train(training)
    right = predicted == ids[:, 1:]
    return float(right[:, size + 1 :].float().mean())  # a model cannot know where the second copy begins


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> dict[str, object]:
    """Measure the finished model on the splits that it was not trained on."""
    model.eval()
    context = model.config.max_position_embeddings
    lengths = (context, 2 * context, 4 * context)
    stream = tokenizer("\n\n".join(cpython_text("heldout")), add_special_tokens=False, verbose=False)["input_ids"]
    own = lengths[-1] - 1  # tokens of a row without its <bos>
    rows = torch.tensor(
        [[BOS, *stream[i : i + own]] for i in range(0, len(stream) - own, own)][: 40 * LENGTH // context]
    )
    text = perplexity(model, rows, buckets=(0, *lengths))
    found = retrieval(
        model,
        tokenizer,
        lengths=lengths,
        depths=[i / 9 for i in range(10)],
        samples=options.prompts // 10,
        # Another seed than that of training, so that the passkeys are new.
        seed=options.seed + 1000,
    )
    fresh = Sampler(tokenizer, stream, random.Random(options.seed + 1000))
    return {
        f"copy_accuracy_{context}": round(copy_accuracy(model, fresh, context, 64, options.device), 4),
        "passkey": {str(n): round(found.accuracy(n), 4) for n in lengths},
        "passkey_prompts_per_length": options.prompts // 10 * 10,
        "heldout_perplexity": {f"{b.start}-{b.stop}": round(b.perplexity, 3) for b in text.buckets},
        "heldout_tokens": text.tokens,
    }


def card(
    name: str,
    context: int,
    command: str,
    figures: dict[str, object],
    parameters: int,
    seconds: float,
    tokens: int,
    seed: int,
) -> str:
    """Return the model card."""
    return f"""---
license: apache-2.0
library_name: transformers
---
# Reference checkpoint: {name}

A {parameters / 1e6:.2f}M-parameter model, small enough to try context extension on a laptop. It was trained to copy
and to retrieve within {context} tokens; the figures below say how far it does. It knows nothing else: do not use it for
text.

- **Data**: `cpython_text("train")` of the recipe, English and Python source that ship with CPython
  {platform.python_version()} (PSF License; SHA-256 of the documents `{digest_of(cpython_text("train"))}`),
  random strings, and passkey prompts over that text. The other splits of this Python were never trained on; a file
  that another Python ships changed may fall into another split there.
- **Licence** of the weights: Apache-2.0.
- **Command**: `{command}`, seed {seed}
- **Cost**: {tokens / 1e6:.1f}M tokens, {seconds / 60:.0f} minutes, torch {torch.__version__.split("+")[0]},
  Python {platform.python_version()}.

Measured from the bfloat16 weights as stored, in float32 arithmetic, on the other splits:

```json
{json.dumps(figures, indent=1)}
```
"""


def numbered(folder: Path) -> Iterator[str]:
    """Yield the texts of a folder, in order."""
    for path in sorted(folder.rglob("*.txt")):
        yield path.read_text(encoding="utf-8", errors="ignore")


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=("llama", "gemma3"))
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument(
        "--scaled",
        choices=SCALED,
        help=f"train the bundled model on to {LENGTH * FACTOR} tokens under a table of this type",
    )
    tables.add_argument(
        "--patch",
        metavar="METHOD",
        help="train random weights under a method of rope_patch, such as p_rope:p=0.5; in place of --scaled, which "
        "trains on what was trained under plain RoPE",
    )
    parser.add_argument("--text", type=Path, help="folder of .txt files to add to the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, help="default 3e-3, and 1e-3 with --scaled")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the curriculum's tokens")
    parser.add_argument("--prompts", type=int, default=200, help="passkey prompts per length at the end")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything, in seconds")
    options = parser.parse_args()
    if options.smoke:
        options.scale, options.prompts = 0.003, 10
    options.lr = options.lr or (1e-3 if options.scaled else 3e-3)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began = time.time()
    documents = cpython_text("train")
    if options.text is not None:
        documents += tuple(numbered(options.text))
    if options.scaled:
        model = scaled_model(options.shape, options.scaled)
        tokenizer = AutoTokenizer.from_pretrained(data_path("assets") / options.shape, model_max_length=LENGTH * FACTOR)
    else:
        model, tokenizer = build_model(options.shape), train_tokenizer(documents)
    if options.patch:
        rope_patch.apply(model, options.patch)
    model.to(options.device)
    stream = [
        token
        for text in documents
        for token in [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], EOS]
    ]
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{options.shape}: {parameters / 1e6:.2f}M parameters, {len(stream) / 1e6:.2f}M tokens of text", file=sys.stderr
    )
    curriculum = SCALED_CURRICULUM if options.scaled else CURRICULUM
    log = train(model, Sampler(tokenizer, stream, random.Random(options.seed)), options, curriculum)
    options.output.mkdir(parents=True, exist_ok=True)
    # Casting rounds the original rotary table, so the model is measured as a loader builds it from the folder.
    model.to(torch.bfloat16)
    if options.patch:
        rope_patch.save(model, options.output, tokenizer=tokenizer)
    else:
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
    stored = rope_patch.load(options.output, dtype=torch.float32).to(options.device)
    figures = measure(stored, tokenizer, options)
    command = "python recipes/pretrain_reference.py " + shlex.join(sys.argv[1:])
    tokens = int(log[-1]["tokens"]) if log else 0
    name = options.shape
    if options.scaled or options.patch:
        name += f" under {options.scaled or options.patch}"
    (options.output / "README.md").write_text(
        card(
            name,
            stored.config.max_position_embeddings,
            command,
            figures,
            parameters,
            time.time() - began,
            tokens,
            options.seed,
        )
    )
    (options.output / "training_log.json").write_text(json.dumps(log) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
