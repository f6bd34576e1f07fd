"""From documents to rows on disk, from a checkpoint to what is trained: nothing lost, nothing learnt by accident."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import random
import re
import warnings

import datasets
import pytest
import torch
from support.recipe_runs import recipe
from support.scored import bold_model
from support.tiny import ARCHITECTURES, ids, logits, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, TrainingArguments

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.evaluation.documents import encode
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.options.finetune import DataOptions, ModelOptions
from rope_patch.patching.locate import PatchError, locate
from rope_patch.planning import shape_of
from rope_patch.training.collators import Collator
from rope_patch.training.data import conversation, mix
from rope_patch.training.evaluating import SEED
from rope_patch.training.models import load_model, long_lora_modules, pattern, prepare, target_names
from rope_patch.training.sources import PackedRows, make_rows, open_source, plan_stages
from rope_patch.training.trainer import LongTrainer

LLAMA = rope_patch.data_path("assets") / "llama"
SENTENCE = "The quick brown fox jumps over the lazy dog, and number {} sleeps. "


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA)


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


def packed(asked, tokenizer, folder, **more):
    folder.mkdir()
    return make_rows(asked, tokenizer, folder, quiet=True, **more)


def options(source, *words):
    given = ["model.name=llama", f"data.source={source}", "data.lengths=128", "train.steps=4", "train.accumulate=2"]
    return recipe(*given, "output=out", *words)


def rows_of(items):
    return [row for item in items for row in item]


def messages(*turns):
    return [{"role": role, "content": text} for role, text in turns]


# --- retrieval prompts among rows


class Stub:
    """Makes prompts that say what they were asked for."""

    def __init__(self):
        self.asked = []

    def prompts(self, task, length, depths, *, seed, sample):
        self.asked.append((task, length, tuple(depths), seed, sample))
        tokens = (1, *random.Random(seed).choices(range(100, 200), k=length - 1))
        return [Prompt("", "", tokens, 3, (), (), tuple(depths))]


def plain(count, size=8):
    return [{"ids": [i] * size, "index": i, "starts": [0], "weights": None} for i in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_no_row_is_lost_and_the_share_is_what_was_asked_for(share):
    mixed = list(mix(plain(300), Stub(), share, 8, first=7))
    assert [row["ids"][0] for row in mixed if row["weights"] is None] == list(range(300)), "all, in order"
    assert [row["index"] for row in mixed] == list(range(7, 7 + len(mixed))), "numbered anew, without a gap"
    prompts = sum(row["weights"] is not None for row in mixed)
    deviation = 4 * (share * (1 - share) / len(mixed)) ** 0.5
    assert prompts / len(mixed) == pytest.approx(share, abs=deviation)


def test_training_asks_nothing_that_an_evaluation_asks(tokenizer):
    """The same text, length and depth; keys are drawn from other seeds."""
    maker = PromptMaker(tokenizer, Haystack(story(0, 200)))
    trained = list(itertools.islice(mix(iter(()), maker, 1.0, 128), 40))
    evaluated = [maker.prompts("passkey", 128, [0.5], seed=SEED, sample=i)[0] for i in range(40)]
    assert not {tuple(row["ids"]) for row in trained} & {prompt.ids for prompt in evaluated}
    answers = {tuple(row["ids"][-5:]) for row in trained}
    assert len(answers) == 40 and not answers & {prompt.ids[-5:] for prompt in evaluated}


# --- conversations


TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if loop.last else m.content.split('|')[-1])")
RUNNING_ON = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('roles must take turns') }}"
TALK = messages(("system", "Be brief."), ("user", "hi 12"), ("assistant", "yo man"), ("user", "34"), ("assistant", "5"))


@pytest.fixture
def chatty(tokenizer):
    chatty_tokenizer = copy.deepcopy(tokenizer)
    chatty_tokenizer.chat_template = TEMPLATE
    return chatty_tokenizer


def learnt(tokenizer, document):
    """What counts, as stretches of text."""
    weights, tokens = document.weights.tolist(), document.ids.tolist()
    assert set(weights) <= {0.0, 1.0} and len(weights) == len(tokens)
    groups = itertools.groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for weight, group in groups if weight]


def test_only_the_assistants_words_are_learnt(chatty):
    document = conversation(chatty, TALK, "assistant")
    expected = (
        "<bos><system>\nBe brief.<eos>\n<user>\nhi 12<eos>\n<assistant>\nyo man<eos>\n"
        "<user>\n34<eos>\n<assistant>\n5<eos>\n"
    )
    assert document.ids.tolist() == chatty(expected, add_special_tokens=False)["input_ids"], "one beginning, not two"
    assert learnt(chatty, document) == ["yo man<eos>\n", "5<eos>\n"], "each with what ends it, and nothing of its head"
    assert document.ids.dtype == torch.long


@pytest.mark.parametrize("template", [FORGETFUL, RUNNING_ON])
def test_a_template_whose_turns_run_into_each_other_is_refused(chatty, template):
    """One drops what was thought in earlier turns; in the other 'th' and 'e' make one token across the seam."""
    chatty.chat_template = template
    talk = messages(("user", "th"), ("assistant", "e|x"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(ValueError, match=r"^this chat template renders earlier turns differently.*set data.learn=all$"):
        conversation(chatty, talk, "assistant")
    assert len(conversation(chatty, talk, "all").ids)


# --- sources


def texts(data, seed=0, epoch=0):
    return [row[data.column] for row in open_source(data, seed, epoch)]


def write(folder, kind):
    """Two documents, 'one\\n\\ntwo' and 'three', as files of a kind; the file, or the folder where it takes two."""
    folder.mkdir()
    both = ["one\n\ntwo", "three"]
    match kind:
        case "txt" | "md":
            for i, text in enumerate(both):
                (folder / f"{i}.{kind}").write_text(text)
            return folder
        case "jsonl":
            return jsonl(folder / "a.jsonl", both)
        case "json":
            (folder / "a.json").write_text(json.dumps([{"text": text} for text in both]))
        case "csv":
            (folder / "a.csv").write_text('text,other\n"one\n\ntwo",1\nthree,2\n')
        case "parquet":
            datasets.Dataset.from_dict({"text": both}).to_parquet(folder / "a.parquet")
    return folder / f"a.{kind}"


@pytest.mark.parametrize(
    ("kind", "streaming"),
    [("txt", False), ("txt", True), ("md", False), ("jsonl", True), ("json", False), ("csv", True), ("parquet", False)],
)
def test_files_and_folders_of_every_kind(tmp_path, kind, streaming):
    path = write(tmp_path / "data", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # datasets leaves CSV files that it streams open
        for source in {path, tmp_path / "data"}:
            data = DataOptions(source=str(source), lengths="128", streaming=streaming, shuffle=False)
            assert texts(data) == ["one\n\ntwo", "three"], "a text file is one document"
        gc.collect()


# --- rows on disk


def test_rows_are_those_of_the_documents(stories, tmp_path, tokenizer):
    asked = options(stories, "data.shuffle=false")
    items = packed(asked, tokenizer, tmp_path / "work")
    rows = rows_of(items)
    assert len(items) == 8 and [len(item) for item in items] == [1] * 8
    assert all(len(row["ids"]) == 128 for row in rows) and [row["index"] for row in rows] == list(range(8))
    stream = [token for document in encode(tokenizer, [story(0), story(1)]) for token in document.ids.tolist()]
    assert [token for row in rows for token in row["ids"]] == stream[: 8 * 128]
    assert all(row["weights"] is None for row in rows) and rows[0]["starts"] == [0]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["rows.arrow"]
    again = make_rows(options(stories), None, tmp_path / "work")
    assert rows_of(again) == rows, "a resumed run reads the rows that it began with, and packs none"


def test_a_schedule_groups_short_rows(stories, tmp_path, tokenizer):
    asked = options(stories, "data.lengths=32:0.25 64:0.25 128")
    assert plan_stages(asked) == [(32, 2, 4), (64, 2, 2), (128, 4, 1)]
    items = packed(asked, tokenizer, tmp_path / "work")
    assert [[len(row["ids"]) for row in item] for item in items] == [[32] * 4] * 2 + [[64] * 2] * 2 + [[128]] * 4
    assert [row["index"] for row in rows_of(items)] == list(range(2 * 4 + 2 * 2 + 4)), "no number twice"
    assert Collator()([items[0], items[1]])["input_ids"].shape == (8, 32), "lists of rows are rows"


def test_short_documents_are_refused_unless_allowed(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 3) for i in range(60)])
    asked = options(source, "train.steps=1", "data.shuffle=false")
    with pytest.raises(ValueError, match=r"the longest of \d+ read has \d+ tokens, a row has 128"):
        packed(asked, tokenizer, tmp_path / "work")
    assert not (tmp_path / "work" / "rows.arrow").exists()
    allowed = options(source, "train.steps=1", "data.shuffle=false", "data.allow_short=true")
    assert len(packed(allowed, tokenizer, tmp_path / "allowed")) == 2


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_retrieval_prompts_are_among_the_rows(stories, tmp_path, tokenizer, share):
    asked = options(stories, f"data.retrieval={share}", "data.lengths=64:0.5 128", "train.steps=40")
    rows = rows_of(packed(asked, tokenizer, tmp_path / "work"))
    prompts = [row for row in rows if row["weights"] is not None]
    assert len(prompts) / len(rows) == pytest.approx(share, abs=4 * (share * (1 - share) / len(rows)) ** 0.5)
    assert {len(row["ids"]) for row in prompts} == {64, 128} and {5.0, 1.0} == set(prompts[0]["weights"])
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert all("The pass key is" in tokenizer.decode(row["ids"]) for row in prompts)


def test_conversations_become_rows_with_weights(tmp_path, chatty):
    source = jsonl(tmp_path / "a.jsonl", [TALK] * 60, "messages")
    words = ["data.column=messages", "data.learn=assistant", "data.boundaries=apart", "data.allow_short=true"]
    items = packed(options(source, *words, "data.lengths=64"), chatty, tmp_path / "work")
    whole = conversation(chatty, TALK, "assistant")
    size = len(whole.ids)
    stream = [token for row in rows_of(items) for token in row["ids"]]
    weights = [weight for row in rows_of(items) for weight in row["weights"]]
    assert stream == (whole.ids.tolist() * 60)[: len(stream)]
    assert weights == (whole.weights.tolist() * 60)[: len(stream)]
    begins = {row["index"] * 64 + start for row in rows_of(items) for start in row["starts"]}
    assert begins == {*range(0, len(stream), size), *range(0, len(stream), 64)}


# --- what is trained


def arguments(folder, **changes):
    given = {"per_device_train_batch_size": 1, "max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    given |= {"learning_rate": 1e-2, "logging_steps": 1, "lr_scheduler_type": "constant"}
    return TrainingArguments(folder, **(given | changes))


def trained(model, folder, count=2):
    rows = [{"ids": ids(24, batch=1, seed=i)[0].tolist(), "index": i} for i in range(count)]
    trainer = LongTrainer(model, arguments(folder), PackedRows(rows, [1] * count), Collator())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def asked_for(*words):
    """YaRN on every family: Gemma 4's full layers are scaled already."""
    method = "yarn:factor=4:replace_scaling=true"
    plain = ["model.name=x", "model.dtype=float32", "data.lengths=64", "output=out", f"patch.method={method}"]
    return recipe(*plain, *words)


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def hit(model, names):
    """The modules that PEFT would give an adapter."""
    return {name for name, _ in model.named_modules() if re.fullmatch(pattern(model, names), name)}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_targets_are_read_from_the_model(family):
    model = bold_model(family)
    every, attention = target_names(model, ["all-linear"]), target_names(model, ["attention"])
    fused = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert set(every) == (fused if family == "phi3" else LINEAR)
    assert set(attention) == {name for name in every if name in {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}}
    planned = {x.name.rpartition(".")[2] for layer in shape_of(model).kinds for x in layer.linears}
    assert set(every) == planned, "what the plan counts"
    inside = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (".self_attn." in name or ".mlp." in name)
    }
    assert hit(model, every) == inside
    assert hit(model, attention) == {name for name in inside if ".self_attn." in name}
    assert target_names(model, ["o_proj"]) == ["o_proj"]


def seeing():
    """Gemma 3 with a vision tower beside the decoder."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 93, "eoi_token_index": 94}
    config = Gemma3Config(text_config=tiny_config("gemma3").to_dict(), vision_config=vision, **tokens)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def adapted(model, **changes):
    """The model with adapters on all projections, and what is trained of it."""
    words = [f"lora.{name}={value}" for name, value in ({"rank": 2} | changes).items()]
    peft_model = prepare(model, asked_for(*words))
    return peft_model, {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}


def test_a_vision_tower_is_left_alone():
    model = seeing()
    towers = {name for name, _ in model.named_modules() if "vision" in name}
    assert any(name.endswith("q_proj") for name in towers), "there is something to hit"
    assert any(name.endswith("norm") for name in towers)
    _, names = adapted(model, long_lora="true")
    assert names and all(".language_model." in name for name in names), sorted(names)[:5]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_embeddings_and_norms_are_all_that_is_trained_beside_adapters(family):
    model = bold_model(family)
    decoder = {f"model.{name}": p for name, p in model.model.named_parameters()}
    expected = {name for name, p in decoder.items() if p.ndim == 1 and name.endswith("norm.weight")}
    expected |= {"model.embed_tokens.weight"}
    assert {f"{name}.weight" for name in long_lora_modules(model)} == expected
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    peft_model, names = adapted(model, long_lora="true")
    clean = {name.replace("base_model.model.", "").replace("modules_to_save.default.", "") for name in names}
    assert {name for name in clean if "lora_" not in name} == expected
    assert tied is (peft_model.get_input_embeddings().weight is peft_model.get_output_embeddings().weight)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma3", True)])
def test_long_lora_comes_back_whole(family, tied, tmp_path):
    """In a new process' model, and merged into a stock checkpoint: embeddings, norms, adapters, patch."""
    base = tmp_path / "base"
    bold_model(family, tie_word_embeddings=tied).save_pretrained(base)

    def fresh():
        return AutoModelForCausalLM.from_pretrained(base)

    stock, (model, names) = logits(fresh()), adapted(fresh(), long_lora="true")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(model, tmp_path / "run")
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == names, "what is trained, all of it and no more"
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr() or not tied
    expected = logits(model.eval())
    assert not torch.allclose(expected, stock, atol=1e-2)

    rope_patch.save(model, tmp_path / "adapter")
    assert torch.equal(logits(rope_patch.load(tmp_path / "adapter")), expected)

    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    rope_patch.save(merged, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(plain), logits(merged)), "plain transformers"
    assert tied is (plain.lm_head.weight is plain.model.embed_tokens.weight)


def test_without_a_method_a_model_keeps_its_own_table_and_says_so():
    with pytest.warns(UserWarning, match=r"^there is no patch\.method: the model keeps its original rotary table"):
        model = prepare(bold_model(), asked_for("patch.method=null", "lora.rank=2"))
    record = locate(model).record
    assert str(record.to_method()) == "default" and record.target_length == 64
    patched = bold_model()
    rope_patch.apply(patched, "yarn", factor=2)
    prepared = prepare(patched, asked_for("patch.method=null", "lora.rank=2"))
    assert str(locate(prepared).record.to_method()) == "yarn:factor=2"
    again = bold_model()
    rope_patch.apply(again, "yarn", factor=2)
    with pytest.raises(PatchError):
        prepare(again, asked_for("lora.rank=2"))
    replaced = prepare(again, asked_for("lora.rank=2", "patch.replace=true"))
    assert str(locate(replaced).record.to_method()) == "yarn:factor=4:replace_scaling=true"


def test_data_that_ends_is_read_again(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 6) for i in range(4)])  # about 560 tokens
    with pytest.warns(UserWarning, match="the data ends before the run does"):
        rows = rows_of(packed(options(source, "train.steps=16"), tokenizer, tmp_path / "work"))
    assert len(rows) == 32 and all(len(row["ids"]) == 128 for row in rows)


def test_a_checkpoint_is_loaded_as_asked():
    model, tokenizer = load_model(ModelOptions("llama", dtype="float32", attention="eager"))
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager" and len(tokenizer) == 1024
    model, _ = load_model(ModelOptions("llama"))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"^no folder ./nothing-here: give a folder with config.json"):
        load_model(ModelOptions("./nothing-here"))


def as_bytes(tensor):
    """A copy; packed weights seen as floats may be no numbers, which equal nothing."""
    return tensor.detach().clone().contiguous().view(torch.uint8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")  # of Linear8bitLt, at every call
@pytest.mark.parametrize("quantization", ["nf4", "8bit"])
def test_quantized_weights_are_packed_and_adapters_on_them_learn(quantization, tmp_path):
    import bitsandbytes

    model, _ = load_model(ModelOptions("llama", dtype="float32", quantization=quantization))
    kind = {"nf4": bitsandbytes.nn.Linear4bit, "8bit": bitsandbytes.nn.Linear8bitLt}[quantization]
    packed = {name for name, module in model.named_modules() if isinstance(module, kind)}
    assert packed == hit(model, target_names(model, ["all-linear"])), "every projection, and nothing else"
    if quantization == "nf4":
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.quant_state.quant_type == "nf4" and weight.quant_state.nested
        assert weight.dtype == torch.float32, "stored as the others are, for FSDP"
    model = prepare(model, asked_for("lora.rank=2"))
    before = {name: as_bytes(p) for name, p in model.named_parameters()}
    (loss, _) = trained(model, tmp_path / "run")
    assert 0 < loss < 20
    moved = {name for name, p in model.named_parameters() if not torch.equal(as_bytes(p), before[name])}
    assert moved and all("lora_" in name for name in moved), "frozen weights stay"
    rope_patch.save(model, tmp_path / "adapter")
    assert read_record(tmp_path / "adapter") is not None


def test_what_is_quantized_already_is_not_quantized_again(tmp_path):
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    message = f"{tmp_path} is quantized already: set model.quantization=none"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_model(ModelOptions(str(tmp_path), quantization="nf4"))
