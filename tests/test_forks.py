"""Forked processes of the tests: torch works in their threads from the first call on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from support.forks import forked


def test_a_fork_of_a_process_that_has_computed_computes_in_four_threads_at_once():
    numbers = torch.randn(1000, 1000)
    numbers.sum()  # from here on there is a pool of threads, which a fork loses
    together = threading.Barrier(4)

    def convert(_):
        together.wait()
        return numbers.to(torch.bfloat16)

    def work():
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(convert, range(4)))

    assert [forked(work) for _ in range(10)] == [0] * 10
