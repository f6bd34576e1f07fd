"""The command line: output for people and machines, errors in one line, nothing half written."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from support.commands import fail, fail_without_a_trace, invoke, run
from support.patches import lora
from support.tiny import logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.cli import app
from rope_patch.methods.method import METHODS
from rope_patch.runtime.command import SPINS, guarded


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_methods():
    printed = run("methods")
    assert all(name in printed for name in METHODS)
    listed = json.loads(run("methods", "--json"))
    assert [entry["method"] for entry in listed] == list(METHODS)
    assert {"method": "pi", "factor": None} in [entry["defaults"] for entry in listed]


def test_doctor_says_what_holds(checkpoint):
    printed = run("doctor", checkpoint).splitlines()
    assert printed[0] == f"{checkpoint}: not patched"
    # turns 64 * 10000 ** (-i / 8) / 2 pi: 10.2, 3.2, 1.02, 0.3 …
    assert printed[2] == "    context 64; 5 pairs make no full turn within it"
    assert printed[3].startswith("OK: ")


def test_doctor_says_what_differs_by_its_exit_status(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"")
    differs = invoke("doctor", tmp_path / "cut")
    assert differs.exit_code == 1
    assert differs.stdout.splitlines()[3].startswith("NOT OK: 1 of ") and "differs  weights files: " in differs.stdout
    patched = tmp_path / "p"
    run("apply", checkpoint, "p_rope:p=0.5", "-o", patched)
    assert "What other programs compute" in run("doctor", patched, "--for", "vllm")
    counted = invoke("doctor", patched, "--for", "vllm", "--for", "llama.cpp")
    assert counted.exit_code == 1 and "differs  llama.cpp" in counted.stdout.partition("What other programs")[0]


def test_apply_doctor_restore(checkpoint, tmp_path):
    out = tmp_path / "deep" / "out"
    run("apply", checkpoint, "abf", "rope_theta=500000", "-o", out, "--target-length", "256")
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    plain = AutoModelForCausalLM.from_pretrained(out).eval()
    reference = tiny_model()
    rope_patch.apply(reference, "abf", rope_theta=500000)
    assert torch.equal(logits(plain), logits(reference))
    assert plain.config.max_position_embeddings == 256
    assert run("doctor", out).startswith(f"{out}: patched with abf:rope_theta=500000\n")
    run("restore", out, "-o", tmp_path / "again")
    again, first = ((folder / "config.json").read_text() for folder in (tmp_path / "again", checkpoint))
    # transformers 4 reads its base there, and the patched folder said another.
    assert json.loads(again) == json.loads(first) | {"rope_theta": 10000.0}
    chained = json.loads(run("apply", checkpoint, "p_rope:p=0.25+pi:factor=8", "-o", tmp_path / "chain", "--json"))
    assert chained["record"]["method"]["steps"][1]["factor"] == 8.0


def test_apply_on_mixed_models(tmp_path):
    tiny_model("gemma3").save_pretrained(tmp_path / "base")
    run("apply", tmp_path / "base", "pi:factor=4", "-o", tmp_path / "out", "--layer-type", "sliding_attention")
    assert rope_patch.load(tmp_path / "out").config.rope_parameters["sliding_attention"]["rope_type"] == "linear"


def test_doctor_of_an_adapter(checkpoint, tmp_path):
    rope_patch.save(lora(rope_patch.load(checkpoint, "yarn:factor=4")), tmp_path / "adapter")
    printed = run("doctor", tmp_path / "adapter")
    assert "patched with yarn:factor=4" in printed and "adapter: trained under yarn:factor=4" in printed
    assert "goes with a whole model" in fail("doctor", tmp_path / "adapter", "--for", "vllm")
    (tmp_path / "adapter" / "rope_patch.json").unlink()
    assert "no record says under which tables it was trained" in run("doctor", tmp_path / "adapter")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("apply", "{base}", "linear", "-o", "{out}"), "rope_type 'linear' is written by the method 'pi'"),
        (("apply", "{base}", "p_rope", "-o", "{base}"), "is the checkpoint itself"),
        (("apply", "{base}", "p_rope", "-o", "{full}"), "is not empty: give a new folder"),
        (("apply", "{base}", "p_rope", "-o", "/proc/nowhere/out"), "'/proc/nowhere': no such file or directory"),
        (("apply", "{base}", "p_rope", "-o", "{base}/config.json"), "is a file: give a folder to save into"),
        (("doctor", "./nothing"), "no folder ./nothing"),
        (("doctor", "{base}/.."), "/base?"),
        (("doctor", "meta-llama/Llama-9"), "cannot load meta-llama/Llama-9 from the hub"),
        (("apply", "{base}", "yarn:factor=4,truncate=false", "-o", "{out}"), "parameters are separated by ':'"),
    ],
)
def test_errors_are_one_line_and_write_nothing(checkpoint, arguments, message):
    fail_without_a_trace(checkpoint, arguments, message)


@pytest.mark.parametrize(
    ("users", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": ""}, None)]
)
def test_threads_that_wait_soon_sleep_unless_the_user_decides(monkeypatch, users, spins):
    monkeypatch.setattr("os.environ", users)
    assert guarded(lambda: 3) == 3 and users.get("GOMP_SPINCOUNT") == spins


def test_what_a_library_raises_is_one_line_too(capsys):
    assert guarded(lambda: {}["unheard_of"]) == 1
    assert capsys.readouterr().err == "error: KeyError: 'unheard_of' (ROPE_PATCH_DEBUG=1 shows where)\n"


@pytest.mark.parametrize("end", [None, ValueError("wrong"), KeyboardInterrupt(signal.SIGTERM), "raised"])
def test_a_command_within_a_process_gives_its_signals_back(monkeypatch, end):
    def command(words):
        during.append(signal.getsignal(signal.SIGTERM))
        if end == "raised":
            monkeypatch.setenv("ROPE_PATCH_DEBUG", "1")
            raise ZeroDivisionError
        if end is not None:
            raise end

    during = []
    monkeypatch.setattr(app, "dispatch", command)
    monkeypatch.setattr("os._exit", sys.exit)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises((SystemExit, ZeroDivisionError)):
            app.main()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert callable(during[0])


def test_an_interrupted_command_ends_although_a_library_holds_a_lock(tmp_path):
    """tensorboardX joins its thread at the end of the process, which waits for the lock that Ctrl-C left taken."""
    code = """if True:
        import sys
        from rope_patch.cli import app
        from tensorboardX import SummaryWriter
        def interrupted(words):
            writer = SummaryWriter(words[0])
            writer.file_writer.event_writer._event_queue._notempty.acquire()
            raise KeyboardInterrupt
        app.dispatch = interrupted
        app.main()
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 130
