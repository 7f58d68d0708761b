"""A byte-level BPE tokenizer in plain Python.

The first 256 tokens are the bytes themselves, so every byte string can be encoded and decoded again. Each further
token is the concatenation of two earlier ones (a "merge"), learnt by joining the most frequent neighbours
(Sennrich et al., 2016). Text is first cut into pieces - a word, a run of digits or symbols, a line break with the
indentation after it - and merges never cross pieces, so a piece's tokens can be remembered.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

END = 0
"""The token that separates files: the zero byte, which Python source never contains."""

PIECES = re.compile(rb"\n+ *| ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^\sA-Za-z_0-9]+|\s+")


class Tokenizer:
    """Turns bytes into token ids and back.

    Parameters
    ----------
    merges : array_like of int, shape (num_merges, 2)
        Row i says which two tokens make up token 256 + i.
    """

    def __init__(self, merges: np.ndarray | Sequence[tuple[int, int]]) -> None:
        self.pairs = [(int(left), int(right)) for left, right in merges]
        self.ranks = {pair: 256 + i for i, pair in enumerate(self.pairs)}
        self.vocab = [bytes([i]) for i in range(256)]
        for left, right in self.pairs:
            self.vocab.append(self.vocab[left] + self.vocab[right])
        self._encode_piece = lru_cache(maxsize=1 << 16)(self._merge)

    def __len__(self) -> int:
        return len(self.vocab)

    def encode(self, text: str | bytes) -> list[int]:
        """Return the token ids of `text`; a str is encoded as UTF-8 first."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        # Long pieces are rarely seen again, and caching them takes memory.
        return [
            token
            for piece in PIECES.findall(data)
            for token in (self._encode_piece(piece) if len(piece) <= 64 else self._merge(piece))
        ]

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that `tokens` stand for; they may end inside a UTF-8 character."""
        return b"".join(self.vocab[token] for token in tokens)

    def _merge(self, piece: bytes) -> tuple[int, ...]:
        tokens = list(piece)
        last = len(self.vocab)
        # Merges apply in the order in which they were learnt, each from left to right, to the results of earlier ones.
        while (token := min((self.ranks.get(pair, last) for pair in pairwise(tokens)), default=last)) < last:
            tokens = _joined(tokens, self.pairs[token - 256], token)
        return tuple(tokens)


def _joined(tokens: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """Replace each occurrence of a pair by `token`, from left to right."""
    joined: list[int] = []
    for symbol in tokens:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] = token
        else:
            joined.append(symbol)
    return joined


def learn_merges(texts: Iterable[bytes], num_tokens: int) -> list[tuple[int, int]]:
    """Learn the merges of a vocabulary of `num_tokens` tokens, the 256 bytes included, from `texts`."""
    counts = Counter(piece for text in texts for piece in PIECES.findall(text))
    words = [list(piece) for piece in counts]
    weights = list(counts.values())
    pairs: Counter[tuple[int, int]] = Counter()
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += weights[i]
            where[pair].add(i)
    merges: list[tuple[int, int]] = []
    for token in range(256, num_tokens):
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for i in where.pop(best):
            word = words[i]
            for pair in pairwise(word):
                pairs[pair] -= weights[i]
            words[i] = joined = _joined(word, best, token)
            for pair in pairwise(joined):
                pairs[pair] += weights[i]
                where[pair].add(i)
        del pairs[best]
    return merges
