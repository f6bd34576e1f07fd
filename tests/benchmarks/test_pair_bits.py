"""Bits by rotary pair: equal to Block-GTQ's own code, within every budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.tiny import small

from rope_patch.patching.cache_argument import cache_argument

pair_bits = pytest.importorskip("pair_bits", reason="not in the source distribution")
GOLDEN = json.loads((Path(__file__).parent / "golden_pair_bits.json").read_text())
"""What ``BlockGTQPipeline`` of JIA-Lab-research/blockgtq (3fe14e7) returned on a CPU for 6 keys at 3 bits, in
hexadecimal, after it was calibrated with these keys and 12 queries."""


def test_bits_and_keys_are_those_of_block_gtq():
    def states(name, dtype):
        return torch.frombuffer(bytearray.fromhex(GOLDEN[name]), dtype=dtype).view(-1, 32).float()

    queries, keys = states("queries", torch.float16), states("keys", torch.float16)
    of_pair = torch.stack([torch.arange(16), torch.arange(16, 32)], -1)
    energy = sum(x[:, of_pair].square().sum(-1).mean(0) for x in (queries, keys))
    (bits,) = pair_bits.greedy_bits(energy[None], 3)
    assert bits.tolist() == GOLDEN["bits"]
    read = pair_bits.round_head(keys, bits, of_pair)
    torch.testing.assert_close(read, states("read", torch.float32), atol=1e-5, rtol=0)


def test_every_rule_shares_out_the_budget_of_each_head():
    model, ids = small("gemma3"), torch.randint(0, 64, (2, 32))
    allocator = pair_bits.Allocator(model, ids)
    full = model(input_ids=ids).logits
    for rule in pair_bits.RULES:
        bits = allocator.bits(rule, 3)
        assert all((heads.sum(1) == 3 * heads.shape[1]).all() and heads.min() >= 1 for heads in bits.values())
        with pair_bits.keys_by_pair(model, bits) as maker:
            lost = (model(input_ids=ids, **{cache_argument(model): maker()}).logits - full).norm() / full.norm()
        assert 0 < lost < 0.5
