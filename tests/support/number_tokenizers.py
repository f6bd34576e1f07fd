"""Tokenizers that cut numbers, and the spaces before them, in different places."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from support.prompting import HAY


def trained(pre_tokenizer, decoder, alphabet=()):
    """A tokenizer of 600 tokens, trained on the haystack and on sentences with numbers."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    numbers = [f" The pass key is {n}. The magic number of apple is {n * 97}." for n in range(10000, 99999, 499)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([HAY.text, *numbers], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def tokenizer_of(kind):
    """A tokenizer that cuts numbers as that of SmolLM2, GPT-2 or Llama 2 (SentencePiece) does, by its kind in KINDS."""
    bytes_ = pre_tokenizers.ByteLevel
    digits = pre_tokenizers.Digits(individual_digits=True)
    match kind:
        case "byte-level, single digits":
            pieces = pre_tokenizers.Sequence([digits, bytes_(add_prefix_space=False)])
            return trained(pieces, decoders.ByteLevel(), bytes_.alphabet())
        case "byte-level":
            return trained(bytes_(add_prefix_space=False), decoders.ByteLevel(), bytes_.alphabet())
        case "SentencePiece":
            pieces = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), digits])
            return trained(pieces, decoders.Metaspace(), HAY.text + "0123456789▁")


KINDS = ["byte-level, single digits", "byte-level", "SentencePiece"]
