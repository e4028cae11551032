"""Small tokenizers of every kind, trained in a moment on a few sentences, saved as folders of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SENTENCES = [
    "Q: yes no Paris is in France. When Mary and John went to the store, John gave a book to Mary",
    "Q: yes no maybe (Paris) Maryland yesterday",
    "the cat is yes or no",
    "Q:yes Q:no",
] * 5
START = "<s>"
END = "</s>"
UNKNOWN = "<unk>"
_SPECIAL = [START, END, UNKNOWN]


def _metaspace(scheme: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=130, special_tokens=_SPECIAL, unk_token=UNKNOWN, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=_SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _prepended() -> Any:
    """As Llama's: a normalizer puts ▁ before the text and for each space, and nothing splits it."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [word for sentence in SENTENCES for word in sentence.split()]
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*_SPECIAL, "Q:", "yes", "no", "Paris", "is", "in"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _pieces() -> Any:
    """As BERT's: lower case, words and punctuation, ## within a word."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


KINDS = {
    "byte level": _byte_level,
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "metaspace never": lambda: _metaspace("never"),
    "prepended": _prepended,
    "words": _words,
    "pieces": _pieces,
}


def tokenizer_folder(folder: Path, kind: str, around: str = "$A") -> tuple[str, Any]:
    """The folder of a tokenizer of this kind, and the tokenizer of the package tokenizers itself.

    around: what it puts around a text: ``<s> $A </s>``
    """
    import transformers
    from tokenizers.processors import TemplateProcessing

    tokenizer = KINDS[kind]()
    if around != "$A":
        ids = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
        tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    kind_of_folder: Any = transformers.PreTrainedTokenizerFast
    made = kind_of_folder(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, unk_token=UNKNOWN, pad_token=END
    )
    made.save_pretrained(folder)
    return str(folder), tokenizer
