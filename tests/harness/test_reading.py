"""The bar of lm-eval's requests, and what an interrupted run keeps."""

import json

import pytest
from harness.instances import instance
from lm_eval.models.huggingface import HFLM
from support.prompting import TOKENIZER
from support.tiny import small
from tqdm import tqdm

import rope_patch
from rope_patch.harness.model import RopePatchLM

LLAMA = str(rope_patch.data_path("assets") / "llama")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_bar_counts_requests_in_the_first_process_alone(rank, monkeypatch):
    shown = []

    class Recorded(tqdm):
        def close(self):
            shown.append((self.n, self.total, self.disable))
            super().close()

    monkeypatch.setattr("rope_patch.harness.answering_model.tqdm", Recorded)
    model = RopePatchLM(pretrained=small(max_position_embeddings=256), tokenizer=TOKENIZER, device="cpu")
    model._rank = rank
    model._world_size = 2  # as HFLM numbers them
    # Two of them have one context, and the third reads more of it.
    asked = [("short", " text"), ("short text", " and"), ("short", " text and")]
    model.loglikelihood([instance("loglikelihood", {}, pair) for pair in asked])
    done = 0 if rank else 3  # tqdm does not count what it does not show
    assert shown[0] == (done, 3, bool(rank))


def test_with_use_cache_the_same_command_goes_on_where_it_was(shell, capsys, tmp_path, monkeypatch):
    command = ["rope-patch-eval", "--model_args", f"pretrained={LLAMA},dtype=float32,max_length=512", "--device", "cpu"]
    command += ["--tasks", "rope_passkey,rope_ppl", "--batch_size", "1"]
    command += ["--metadata", '{"max_seq_lengths": 512, "samples": 2, "windows": 4, "depths": [0.2, 0.8]}']
    generate = HFLM._model_generate
    prompts = []
    most = 4

    def counted(self, *args, **kwargs):
        if len(prompts) == most:
            raise KeyboardInterrupt
        prompts.append(args)
        return generate(self, *args, **kwargs)

    def scores(folder):
        (path,) = folder.rglob("results_*.json")
        return json.loads(path.read_text())["results"]

    monkeypatch.setattr(HFLM, "_model_generate", counted)
    shell([*command, "--output_path", str(tmp_path / "whole")])
    assert len(prompts) == 4
    prompts = []
    most = 1  # Ctrl-C comes with the second prompt
    with pytest.raises(SystemExit) as stop:
        shell([*command, "--use_cache", str(tmp_path / "answers")])
    assert stop.value.code == 130
    assert "--use_cache" in capsys.readouterr().err
    prompts = []
    most = 4
    shell([*command, "--use_cache", str(tmp_path / "answers"), "--output_path", str(tmp_path / "goes on")])
    assert len(prompts) == 3  # one of four was answered
    assert scores(tmp_path / "goes on") == scores(tmp_path / "whole")
