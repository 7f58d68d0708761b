"""Small tokenizers: of bytes, where a character can take several tokens, and of words with a leading space."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(**special):
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def word_tokenizer(*words):
    """As of SentencePiece: the first word of a text loses its space."""
    backend = Tokenizer(models.WordLevel({f"▁{word}": i for i, word in enumerate(words)}))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
