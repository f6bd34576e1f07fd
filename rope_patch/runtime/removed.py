"""What earlier versions had: each name that went has one line that says why, and what serves instead."""

from __future__ import annotations

REMOVED = {
    "two_tables": "nothing but this package could choose between two tables; apply the long one, or use "
    "rope_patch.patched(model, METHOD) for long texts alone",
    "theory": "import rope_patch.theory and rope_patch.frequencies, whose functions are its formulas",
    "longppl": "no result rested on it; perplexity by position and retrieval stay",
    "longppl_evaluator": "it chose the tokens of LongPPL, which was removed too",
    "tolerance": "analyze had it for the perplexity of p-RoPE, which rope-patch compare measures",
    "cwe": "lm-eval's own task ruler_cwe runs offline, too",
    "fwe": "lm-eval's own task ruler_fwe runs offline, too",
    "resonance": "the method table takes its frequencies",
    "cope": "the method table takes its frequencies",
    "memory": "divide the memory that the weights leave by token_bytes in kv-check.json",
    "first_choice": "exact match is nearly the same share, and the log-probability of right answers tells more",
    "fit": "a table fitted by gradient descent read like text 1 to 2 % better than YaRN's, and other text worse; the "
    "method table takes factors that were found elsewhere",
}
REMOVED |= {"TwoTables": REMOVED["two_tables"], "FittedPatch": REMOVED["fit"]}
REMOVED |= {"CoPE": REMOVED["cope"], "Resonance": REMOVED["resonance"]}
"""Commands, options, tasks, methods and public names that were removed, by name."""

NEEDLE_IN_TEXT = "extend lays its needle into the text that it reads; rope-patch compare asks in other ways"
OF_COMMANDS = {
    "extend": dict.fromkeys(("depths", "haystack", "chat_template", "batch_tokens"), NEEDLE_IN_TEXT),
    "analyze": {
        "layers": "analyze reads all layers; rope_patch.modeling.capture.capture takes some",
        "pattern": "analyze reads the .txt files of a folder; give --text more than once for others",
    },
}
"""Options that were removed from one command, and whose names may mean something elsewhere."""


def removed(name: str, *, command: str = "") -> str:
    """Return a sentence on something that was removed, by its name; empty for any other name.

    Args:
        name: the name of a command, option, task, method or public name.
        command: the command that was given the name and does not know it.
    """
    name = name.partition("=")[0].removeprefix("--").removeprefix("no-").rpartition(".")[2].replace("-", "_")
    reason = OF_COMMANDS.get(command, {}).get(name) or REMOVED.get(name)
    return f" It was removed: {reason}." if reason else ""
