"""From documents to rows on disk, from a checkpoint to what is trained: nothing lost, nothing learnt by accident."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re

import datasets
import pytest
import torch
from support.prompting import TOKENIZER
from support.recipe_runs import recipe
from support.scored import bold_model
from support.tiny import ARCHITECTURES, ids, tiny_config
from transformers import AutoModelForCausalLM, Gemma3Config

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.modeling.positions import skipped_positions
from rope_patch.modeling.training_loss import IGNORED_LABEL
from rope_patch.options.finetune import DataOptions, ModelOptions
from rope_patch.patching.locate import PatchError, locate
from rope_patch.planning.shapes import shape_of
from rope_patch.texts.documents import encode
from rope_patch.training.models import load_for_training, prepare_model, target_pattern
from rope_patch.training.pack_rows import conversation, held_out, make_rows, open_source, packed_rows

SENTENCE = "The quick brown fox jumps over the lazy dog, and number {} sleeps. "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What ``datasets`` keeps of the files it reads stays out of the user's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def story(number, sentences=40):
    return "".join(SENTENCE.format(f"{number}.{i}") for i in range(sentences))


def jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def stories(tmp_path):
    """Twelve documents of some 1000 tokens each."""
    return jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(12)])


def packed(asked, folder, tokenizer=TOKENIZER):
    folder.mkdir()
    return make_rows(asked, tokenizer, folder)


def options(source, *words):
    given = ["model.name=llama", f"data.source={source}", "data.length=128", "train.steps=4", "train.accumulate=2"]
    return recipe(*given, "output=out", *words)


def flat(rows, column="input_ids"):
    return torch.stack(list(rows[column])).flatten().tolist()


def messages(*turns):
    return [{"role": role, "content": text} for role, text in turns]


# --- conversations


TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if loop.last else m.content.split('|')[-1])")
RUNNING_ON = "{% for m in messages %}{{ m.content }}{% endfor %}"
TALK = messages(("system", "Be brief."), ("user", "hi 12"), ("assistant", "yo man"), ("user", "34"), ("assistant", "5"))


@pytest.fixture
def chatty():
    chatty_tokenizer = copy.deepcopy(TOKENIZER)
    chatty_tokenizer.chat_template = TEMPLATE
    return chatty_tokenizer


def learnt(tokenizer, tokens, labels):
    """What counts, as stretches of text."""
    assert all(label in (token, IGNORED_LABEL) for token, label in zip(tokens, labels, strict=True))
    groups = itertools.groupby(labels, key=lambda label: label != IGNORED_LABEL)
    return [tokenizer.decode(list(group)) for counts, group in groups if counts]


def test_only_the_assistants_words_are_learnt(chatty):
    tokens, labels = conversation(chatty, TALK, "assistant")
    expected = (
        "<bos><system>\nBe brief.<eos>\n<user>\nhi 12<eos>\n<assistant>\nyo man<eos>\n"
        "<user>\n34<eos>\n<assistant>\n5<eos>\n"
    )
    assert tokens == chatty(expected, add_special_tokens=False)["input_ids"], "one beginning, not two"
    assert learnt(chatty, tokens, labels) == ["yo man<eos>\n", "5<eos>\n"], "each with what ends it"


@pytest.mark.parametrize("template", [FORGETFUL, RUNNING_ON])
def test_a_template_whose_turns_run_into_each_other_is_refused(chatty, template):
    """One drops what was thought in earlier turns; in the other 'th' and 'e' make one token across the seam."""
    chatty.chat_template = template
    talk = messages(("user", "th"), ("assistant", "e|x"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(ValueError, match=r"set data\.learn=all"):
        conversation(chatty, talk, "assistant")
    assert conversation(chatty, talk, "all")[0]


# --- sources


def texts(data):
    return [row[data.column] for row in open_source(data, 0)]


def write(folder, kind):
    """Two documents, 'one\\n\\ntwo' and 'three', as files of a kind; the file, or the folder where it takes two."""
    folder.mkdir()
    both = ["one\n\ntwo", "three"]
    table = datasets.Dataset.from_dict({"text": both})
    path = folder / f"a.{kind}"
    match kind:
        case "txt" | "md":
            for i, text in enumerate(both):
                (folder / f"{i}.{kind}").write_text(text)
            return folder
        case "jsonl" | "json":
            table.to_json(path)
        case "csv":
            table.to_csv(path)
        case "parquet":
            table.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["txt", "md", "jsonl", "json", "csv", "parquet"])
def test_files_and_folders_of_every_kind(tmp_path, kind):
    path = write(tmp_path / "data", kind)
    for source in {path, tmp_path / "data"}:
        data = DataOptions(source=str(source), length=128, shuffle=False)
        assert texts(data) == ["one\n\ntwo", "three"], "a text file is one document"


# --- rows on disk


def test_rows_are_those_of_the_documents(stories, tmp_path):
    rows = packed(options(stories, "data.shuffle=false"), tmp_path / "work")
    assert len(rows) == 8 and set(rows.column_names) == {"input_ids", "labels", "position_ids", "attention_mask"}
    stream = [token for document in encode(TOKENIZER, [story(0), story(1)]) for token in document.ids.tolist()]
    assert flat(rows) == stream[: 8 * 128]
    row = rows[3]
    assert row["position_ids"].tolist() == list(range(128)) and row["attention_mask"].tolist() == [1] * 128
    assert row["labels"][0] == IGNORED_LABEL and torch.equal(row["labels"][1:], row["input_ids"][1:])
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["held_out.json", "rows.arrow"]
    again = make_rows(options(stories), None, tmp_path / "work")
    assert flat(again) == flat(rows), "a resumed run reads the rows that it began with, and packs none"


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_rows_of_a_file_that_was_cut_are_not_trained_on(stories, tmp_path, share):
    packed(options(stories), tmp_path / "work")
    file = tmp_path / "work" / "rows.arrow"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(OSError, match=r"rows\.arrow is damaged: delete it"):
        make_rows(options(stories), TOKENIZER, tmp_path / "work")


def test_positions_of_pose_come_from_the_seed_and_the_row(stories, tmp_path):
    asked = options(stories, "data.positions=pose", "data.chunks=3", "patch.target_length=777", "train.seed=3")
    rows = packed(asked, tmp_path / "work")
    for index in range(8):
        expected = skipped_positions(random.Random(f"3/{index}"), 128, 777, 3)
        assert torch.equal(rows[index]["position_ids"], expected)


def test_short_documents_are_refused_unless_allowed(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 3) for i in range(60)])
    asked = options(source, "train.steps=1", "data.shuffle=false")
    with pytest.raises(ValueError, match=r"the longest of \d+ read has \d+ tokens, a row has 128"):
        packed(asked, tmp_path / "work")
    assert not (tmp_path / "work" / "rows.arrow").exists()
    allowed = options(source, "train.steps=1", "data.shuffle=false", "data.allow_short=true")
    assert len(packed(allowed, tmp_path / "allowed")) == 2


def test_conversations_become_rows(tmp_path, chatty):
    source = jsonl(tmp_path / "a.jsonl", [TALK] * 60, "messages")
    words = ["data.column=messages", "data.learn=assistant", "data.boundaries=apart", "data.allow_short=true"]
    rows = packed(options(source, *words, "data.length=64"), tmp_path / "work", chatty)
    tokens, labels = conversation(chatty, TALK, "assistant")
    stream = flat(rows)
    assert stream == (tokens * 60)[: len(stream)] and "attention_mask" not in rows.column_names
    expected = (labels * 60)[: len(stream)]
    positions = flat(rows, "position_ids")
    begins = {*range(0, len(stream), len(tokens)), *range(0, len(stream), 64)}
    assert {i for i, at in enumerate(positions) if at == 0} == begins
    assert flat(rows, "labels") == [IGNORED_LABEL if i in begins else label for i, label in enumerate(expected)]


# --- what is trained


def asked_for(*words):
    """YaRN on every family: Gemma 4's full layers are scaled already."""
    method = "yarn:factor=4"
    plain = ["model.name=x", "model.dtype=float32", "data.length=64", "output=out", f"patch.method={method}"]
    return recipe(*plain, *words)


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def hit(model, *targets):
    """The modules that PEFT would give an adapter."""
    pattern = target_pattern(model, targets)
    return {name for name, _ in model.named_modules() if re.fullmatch(pattern, name)}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_targets_are_read_from_the_model(family):
    model = bold_model(family)
    every = {name.rpartition(".")[2] for name in hit(model, "all-linear")}
    fused = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert every == (fused if family == "phi3" else LINEAR)
    assert every == {x.name for layer in shape_of(model).kinds for x in layer.linears}
    inside = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (".self_attn." in name or ".mlp." in name)
    }
    assert hit(model, "all-linear") == inside
    assert hit(model, "attention") == {name for name in inside if ".self_attn." in name}
    with pytest.raises(ValueError, match="'o_prj' matches no projection"):
        target_pattern(model, ["o_prj"])


def seeing():
    """Gemma 3 with a vision tower beside the decoder."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 93, "eoi_token_index": 94}
    config = Gemma3Config(text_config=tiny_config("gemma3").to_dict(), vision_config=vision, **tokens)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_a_vision_tower_is_left_alone():
    model = seeing()
    towers = {name for name, _ in model.named_modules() if "vision" in name}
    assert any(name.endswith("q_proj") for name in towers), "there is something to hit"
    names = hit(model, "all-linear")
    assert names and all("language_model." in name for name in names), sorted(names)[:5]


def test_without_a_method_a_model_keeps_its_own_table_and_says_so():
    with pytest.warns(UserWarning, match=r"no patch\.method"):
        model = prepare_model(bold_model(), asked_for("patch.method=null", "lora.rank=2"))
    record = locate(model).record
    assert str(record.to_method()) == "default" and record.target_length == 64
    patched = bold_model()
    rope_patch.apply(patched, "yarn", factor=2)
    prepared = prepare_model(patched, asked_for("patch.method=null", "lora.rank=2"))
    assert str(locate(prepared).record.to_method()) == "yarn:factor=2"
    again = bold_model()
    rope_patch.apply(again, "yarn", factor=2)
    with pytest.raises(PatchError):
        prepare_model(again, asked_for("lora.rank=2"))
    replaced = prepare_model(again, asked_for("lora.rank=2", "patch.replace=true"))
    assert str(locate(replaced).record.to_method()) == "yarn:factor=4"


def test_data_that_ends_is_read_again(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 6) for i in range(4)])  # about 560 tokens
    with pytest.warns(UserWarning, match="the data ends before the run does"):
        rows = packed(options(source, "train.steps=16"), tmp_path / "work")
    assert len(flat(rows)) == 32 * 128


def test_a_checkpoint_is_loaded_as_asked():
    model, tokenizer = load_for_training(ModelOptions("llama", dtype="float32", attention="eager"))
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager" and len(tokenizer) == 1024
    model, _ = load_for_training(ModelOptions("llama"))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="nothing-here"):
        load_for_training(ModelOptions("./nothing-here"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")  # of Linear8bitLt, at every call
@pytest.mark.parametrize("quantization", ["nf4", "8bit"])
def test_quantized_weights_are_packed_and_adapters_on_them_learn(quantization, tmp_path):
    import bitsandbytes

    model, _ = load_for_training(ModelOptions("llama", dtype="float32", quantization=quantization))
    kind = {"nf4": bitsandbytes.nn.Linear4bit, "8bit": bitsandbytes.nn.Linear8bitLt}[quantization]
    packed = {name for name, module in model.named_modules() if isinstance(module, kind)}
    assert packed == hit(model, "all-linear"), "every projection, and nothing else"
    if quantization == "nf4":
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.quant_state.quant_type == "nf4" and weight.quant_state.nested
        assert weight.dtype == torch.float32, "stored as the others are, for FSDP"
    model = prepare_model(model, asked_for("lora.rank=2"))
    loss = model(input_ids=ids(24), labels=ids(24)).loss
    loss.backward()
    assert 0 < loss < 20
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned and all("lora_" in name for name in learned), "frozen weights stay"
    rope_patch.save(model, tmp_path / "adapter")
    assert read_record(tmp_path / "adapter") is not None


def test_what_is_quantized_already_is_not_quantized_again(tmp_path):
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    message = f"{tmp_path} is quantized already: set model.quantization=none"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_for_training(ModelOptions(str(tmp_path), quantization="nf4"))


@pytest.mark.filterwarnings("ignore:the data ends")
def test_documents_that_are_held_out_are_in_no_row(tmp_path):
    source = jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(20)])
    asked = options(source, "data.length=256", "evaluation.windows=2", "evaluation.lengths=512")
    texts = held_out(asked, TOKENIZER, None)
    assert 1 <= len(texts) <= 2
    rows = itertools.islice(packed_rows(asked, TOKENIZER, texts), 120)  # the documents once, and again in part
    trained = TOKENIZER.decode([token for row in rows for token in row["input_ids"]])
    for number in range(20):
        assert (f"number {number}.0 sleeps" in trained) == (story(number) not in texts)


def test_too_few_documents_to_hold_some_out_are_trained_on_and_it_is_said(tmp_path):
    source = jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(9)])
    with pytest.warns(UserWarning, match="text that ships with rope_patch"):
        assert held_out(options(source), TOKENIZER, None) == []
