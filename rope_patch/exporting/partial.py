"""p-RoPE as partial rotary: the rotating pairs are moved to the front of each head, the others left unrotated.

With ``r`` turning pairs of ``n``, p-RoPE with base ``theta`` is partial rotary over ``2 r`` features with base
``theta ** (r / n)``, once the rows of each head's queries and keys (weights, biases, norms) stand in the order
``[0, r), [n, n + r), [r, n), [n + r, 2 n)``, features beyond the rotary ones last. Attention adds over the features of
a head, so their order means nothing there. Engines that know no p-RoPE then run it, and rotate fewer features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rope_patch import frequencies
from rope_patch.patching.record import CONFIG_KEYS
from rope_patch.tables import RotaryTable

_NORM = re.compile(r"\.[qk]_(layer)?norm(\.norms\.\d+)?\.(weight|bias)$")


@dataclass(frozen=True)
class Layout:
    """Where the features of heads stand in a model's tensors, and in which order they shall.

    Attributes:
        heads: of queries.
        key_heads: of keys and values.
        head_dim: features of a head.
        order: (head_dim,) the old place of each feature.
    """

    heads: int
    key_heads: int
    head_dim: int
    order: tuple[int, ...]

    def rows(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return the old place of each row of a tensor, None for one that holds neither queries nor keys."""
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        head, same = torch.tensor(self.order), torch.arange(self.head_dim)
        if part in ("q_proj", "k_proj") or _NORM.search(name):
            heads = [head] * (shape[0] // self.head_dim)
        elif part == "query_key_value":  # of each head its query, key and value: GPT-NeoX
            heads = [head, head, same] * self.heads
        elif part == "qkv_proj":  # all queries, all keys, all values: Phi-3
            heads = [head] * (self.heads + self.key_heads) + [same] * self.key_heads
        else:
            return None
        if len(heads) * self.head_dim != shape[0]:
            raise ValueError(f"{name} has {shape[0]} rows, expected {len(heads)} heads of {self.head_dim}")
        return torch.cat([self.head_dim * i + rows for i, rows in enumerate(heads)])


def as_partial(model: PreTrainedModel, tables: Sequence[RotaryTable]) -> tuple[PreTrainedModel, Layout, int]:
    """Return the skeleton of a p-RoPE checkpoint as a partial-rotary one.

    Whether the family obeys ``partial_rotary_factor``, and holds its queries and keys as :class:`Layout` says, is
    tested on two small random copies of it, one layer each: transformers must give the same logits with both configs.

    Args:
        model: skeleton of the checkpoint.
        tables: its tables.

    Returns:
        The skeleton, the layout for :func:`permute_file`, and how many tensors of each layer it touches.

    Raises:
        ValueError: the table is not p-RoPE, or the family cannot say it so.
    """
    config, name = model.config, type(model).__name__
    if len(tables) != 1 or tables[0].layer_type is not None:
        raise ValueError(f"{name} has a table for each layer type: --form partial is for models with one")
    if getattr(config, "quantization_config", None):
        raise ValueError("--form partial moves rows of weights, and these are quantized: export the full weights")
    (table,) = tables
    turning = _turning_pairs(table)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    n, r = table.pairs, turning
    order = (*range(r), *range(n, n + r), *range(r, n), *range(n + r, head_dim))
    layout = Layout(heads, int(getattr(config, "num_key_value_heads", None) or heads), head_dim, order)
    encoded = {
        "rope_type": "default",
        "rope_theta": table.rope_theta ** (r / n),
        "partial_rotary_factor": 2 * r / head_dim,
    }
    if int(head_dim * encoded["partial_rotary_factor"]) != 2 * r:
        raise ValueError(f"no partial_rotary_factor of {head_dim} features gives {2 * r} in float arithmetic")
    touched = _measure(config, layout, encoded, name)
    with torch.device("meta"):
        changed: PreTrainedModel = AutoModelForCausalLM.from_config(_config(config, {"rope_parameters": encoded}))
    return changed, layout, touched


def _turning_pairs(table: RotaryTable) -> int:
    """How many pairs turn in a p-RoPE table.

    Raises:
        ValueError: another table.
    """
    zeroed = frequencies.unrotated(table.inv_freq)
    turning = int((~zeroed).sum())
    geometric = frequencies.geometric(table.rope_theta, table.rotary_dim)[:turning]
    plain = torch.allclose(table.inv_freq[:turning], geometric, rtol=1e-6, atol=0.0)
    if bool(zeroed[:turning].any()) or not plain or table.attention_scaling != 1.0:
        raise ValueError(f"--form partial is for p-RoPE alone (p_rope, or abf and then p_rope), not for {table}")
    if not 0 < turning < table.pairs:
        raise ValueError(f"--form partial needs rotating and unrotated pairs, not {table}")
    return turning


def _config(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """The config, changed and without a patch record."""
    data = json.loads(config.to_json_string())
    data = {key: value for key, value in data.items() if key not in ("rope_patch", *(set(CONFIG_KEYS) & set(changes)))}
    changed: PreTrainedConfig = type(config).from_dict(data | changes)
    changed.architectures = config.architectures
    return changed


def _measure(config: PreTrainedConfig, layout: Layout, encoded: dict[str, Any], name: str) -> int:
    """Compare the two forms on small random copies; return how many tensors of a layer hold queries or keys."""
    grouped = layout.key_heads < layout.heads
    small = Layout(4, 2 if grouped else 4, layout.head_dim, layout.order)
    sizes = {
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "hidden_size": 4 * layout.head_dim,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": small.key_heads,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    known: dict[str, Any] = {key: value for key, value in sizes.items() if hasattr(config, key)}
    if getattr(config, "layer_types", None):
        known["layer_types"] = config.layer_types[:1]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            plain = AutoModelForCausalLM.from_config(_config(config, known), dtype=torch.float32).eval()
            for parameter in plain.parameters():
                parameter.normal_(float(parameter.dim() == 1), 0.3)  # norms near 1, so that logits feel all weights
            state = plain.state_dict()
            rows = {key: small.rows(key, value.shape) for key, value in state.items()}
            got = AutoModelForCausalLM.from_config(
                _config(config, known | {"rope_parameters": encoded}), dtype=torch.float32
            ).eval()
            got.load_state_dict(state)
            tokens = torch.randint(3, 64, (1, 24))
            one, unmoved = (m.double()(tokens, use_cache=False).logits for m in (plain, got))
            got.load_state_dict({k: v if rows[k] is None else v[rows[k]] for k, v in state.items()})
            other = got(tokens, use_cache=False).logits
        except Exception as error:
            raise ValueError(f"--form partial could not be tried on {name}: {type(error).__name__}: {error}") from error
    apart, blind = (float((one - logits).abs().max() / one.abs().max()) for logits in (other, unmoved))
    touched = sum(index is not None for index in rows.values())
    if not apart < 1e-5 or not blind > 1e-3:  # unmoved rows must change the logits, or the test proves nothing
        raise ValueError(
            f"{name} does not run p-RoPE as partial rotary: a small copy of it gave other logits (up to {apart:.2g} of "
            "the largest). Families that obey partial_rotary_factor do (Phi, StableLM, GPT-NeoX); for this one use "
            "--form table"
        )
    return touched


def permute_file(path: Path, layout: Layout) -> int:
    """Put the rows of a safetensors file's queries and keys in order, in place, one tensor at a time.

    Returns:
        How many tensors were changed.
    """
    changed = 0
    with path.open("r+b") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            rows = None if name == "__metadata__" else layout.rows(name, entry["shape"])
            if rows is None:
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            file.seek(begin)
            data = torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.uint8).view(len(rows), -1)
            file.seek(begin)
            file.write(data[rows].numpy().tobytes())
            changed += 1
    return changed


def permute_folder(folder: Path, layout: Layout, expected: int) -> None:
    """Put the rows of all weights of a folder in order.

    Raises:
        ValueError: not as many tensors of queries and keys as the model has.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("--form partial reads safetensors; this checkpoint has other files: save it again first")
    changed = sum(permute_file(path, layout) for path in files)
    for other in folder.glob("pytorch_model*.bin*"):  # a second copy, whose rows stayed where they were
        other.unlink()
    if changed != expected:
        raise ValueError(f"found {changed} tensors of queries and keys, expected {expected}: --form table works")
