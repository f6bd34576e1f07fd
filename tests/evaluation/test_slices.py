"""Long texts are encoded in slices: the tokens are those of one call of the tokenizer."""

from __future__ import annotations

import pytest
import torch
from support.prompting import TOKENIZER
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rope_patch.evaluation.documents import encode
from rope_patch.evaluation.domains import builtin_domains
from rope_patch.evaluation.slices import SLICE
from rope_patch.evaluation.text import builtin_text

PROSE = "".join(builtin_domains().values())  # Chinese and Italian too: characters of one to three bytes
CODE = builtin_text("heldout").text[: SLICE - len(PROSE) // 2]
LONG = CODE + PROSE + CODE[:9999] + "  Straße\u0301 🙂 \n"
"""The slices meet in the prose."""


class Spy:
    """A tokenizer that notes how long the texts are that it is given."""

    is_fast = True

    def __init__(self, tokenizer):
        self.tokenizer, self.bos_token_id, self.sizes = tokenizer, None, []

    def __call__(self, text, **options):
        self.sizes.append(len(text))
        return self.tokenizer(text, **options)


def trained(model, trainer, normalizer=None, splitter=None, post=None):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([CODE[:20000], PROSE[:20000]], trainer(vocab_size=900, show_progress=False))
    tokenizer.normalizer = normalizer or normalizers.Sequence([])
    if splitter is None:  # as in Llama 2: the whole text is one word, with a space in front
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    if post is not None:
        tokenizer.post_processor = post
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bundled():
    return TOKENIZER


def one_word():
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), bpe)


def bpe(**options):
    return trainers.BpeTrainer(special_tokens=["<unk>"], **options)


def unigram():
    def trainer(**options):
        return trainers.UnigramTrainer(unk_token="<unk>", special_tokens=["<unk>"], **options)

    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")])
    return trained(models.Unigram(), trainer, normalizer, pre_tokenizers.Metaspace())


def word_piece():
    def trainer(**options):
        return trainers.WordPieceTrainer(special_tokens=["[UNK]"], **options)

    pieces = models.WordPiece(unk_token="[UNK]")
    return trained(pieces, trainer, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())


def trimmed():
    post = processors.ByteLevel(trim_offsets=True)  # as RoBERTa's: a token's characters leave out its space
    return trained(models.BPE(), bpe, normalizers.Lowercase(), pre_tokenizers.ByteLevel(), post)


@pytest.mark.parametrize("make", [bundled, one_word, unigram, word_piece, trimmed])
def test_slices_give_the_tokens_of_one_call(make):
    spy = Spy(make())
    (document,) = encode(spy, LONG)
    coded = spy.tokenizer(LONG, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    assert document.ids.tolist() == coded["input_ids"]
    upto = torch.tensor([0, *(len(c.encode()) for c in LONG)]).cumsum(0)
    stops = torch.tensor([stop for _, stop in coded["offset_mapping"]])
    assert torch.equal(document.ends, upto[stops].cummax(0).values)
    assert len(spy.sizes) == 2 and max(spy.sizes) == SLICE, "no call saw more than a slice"


def test_a_text_whose_slices_cannot_be_joined_is_encoded_in_one_call():
    """One word of digits is one unknown token for WordPiece wherever it is cut, so that no two slices agree."""
    spy, text = Spy(word_piece()), "The number is " + "7" * (2 * SLICE) + " or so."
    (document,) = encode(spy, text)
    assert document.ids.tolist() == spy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert spy.sizes[-1] == len(text)


def test_no_more_is_encoded_than_max_tokens_need():
    spy = Spy(bundled())
    (document,) = encode(spy, LONG, max_tokens=1000)
    assert document.ids.tolist() == spy.tokenizer(LONG[:20000], add_special_tokens=False)["input_ids"][:1000]
    assert len(spy.sizes) <= 2
