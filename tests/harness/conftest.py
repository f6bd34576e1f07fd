"""What tests of the lm-eval plug-in share: its command line in this process."""

import shlex
import sys

import pytest
from lm_eval.tasks._index import TaskIndex
from support.task_index import read_once

from rope_patch.harness import command


@pytest.fixture(autouse=True)
def no_survey(monkeypatch):
    """lm-eval writes into each result what pip, lscpu and others say of the machine: half a second each time."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


@pytest.fixture
def shell(monkeypatch, tmp_path):
    """Run command lines of lm-eval in this process and a folder of their own; of its own tasks it knows RULER's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TaskIndex, "build", staticmethod(read_once))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    # Its handler would outlive the stream that pytest gives a test.
    monkeypatch.setattr("lm_eval.utils.setup_logging", lambda *_, **__: None)

    def run(line):
        monkeypatch.setattr(sys, "argv", line if isinstance(line, list) else shlex.split(line))
        command.main()

    return run
