"""The wire format: K and V of a few tokens as bytes that any cache of the same model can read.

A wire block holds the K and V of `block_tokens` successive tokens, of all layers and of one KV head. A cache cuts a
sequence into wire blocks from its first token on, whatever its own block size, so caches may differ in block size, in
layout, in array module, and in how many ranks share the KV heads.

Where layers have windows or several shapes, the layers of each window and shape have wire blocks of their own, as if
they were a model: a window passes tokens that the other layers still need. The first block of what a sequence holds
behind its window may lack tokens, which are zeros in it, and is named by how many it lacks.

A block is a header and the payload, in the byte order of x86 and Arm (little-endian). The header has 128 bytes:

* the magic, ``b"pagedkv\\n"``, 8 bytes;
* the version of this format, 1, and the `wire_word` of the cache's KvFormat, 2 bytes each;
* num_layers, head_dim, block_tokens and the KV head, 4 bytes each;
* the bytes of the payload, 8 bytes;
* the digest of the model, the chained digest, the key and the checksum, 16 bytes each;
* zeros.

The payload is (num_layers, 2, block_tokens, head_dim): of each layer K and then V, token by token, as a cache
stores them. Where rows have scales of their own, (num_layers, 2, block_tokens) float32 follow, with a zero behind each
odd number of tokens.

The **chained digest** of a block names all tokens up to its last one, its salt and what it is made of. It is the
BLAKE2b-128 of the digest before it and of the block's token ids (int32). The first one follows a root: BLAKE2b-128 of
the version, the kind, the sizes, the salt's digest and the model's name. The last tokens of a text, if they do not fill
a block, make a block of their own kind in the same way: its digest is of fewer ids, and zeros follow in its payload.
Where a block has some of the layers, their numbers (int32) follow the model's name. A block that lacks its first tokens
goes by the BLAKE2b-128 of its chained digest and of how many it lacks.

The **key** of a block is the BLAKE2b-128 of its chained digest, of the number of its KV head in the model, and of the
scales of that head in all layers (float64). So a key never names keys of another model, element type, salt or scale,
and a rank with some of the heads finds what a process with all of them stored.

The **checksum** is the BLAKE2b-128 of the header before it and of sums of the payload's 64-bit words: with the words in
2 * num_layers rows, the sum of each column and of each row. It is fast, and finds damage; it does not protect against
somebody who writes wrong blocks on purpose. Give a store only to those whom you trust with the text itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..layouts import FLOAT32, KvFormat, Part
from ..memory.arguments import as_int
from ..memory.prefix.digests import NUM_BYTES, blake2b_128, hash_chain
from .store import Buffer

MAGIC, VERSION = b"pagedkv\n", 1
BLOCK_TOKENS = 64
HEADER_BYTES = 128
_FIELDS = Struct("<8sHHIIIIQ16s16s16s")
_ROOT = Struct("<HHIII16s")
_HEAD = Struct("<16sI")


class Name(NamedTuple):
    """What a wire block is called: its key, the chained digest of its tokens, and its KV head in the model."""

    key: bytes
    digest: bytes
    head: int


class Wire:
    """Names wire blocks of one model, seals them, and checks them.

    Parameters
    ----------
    model : str
        What the K and V depend on besides the tokens: a name and a revision of the weights, for example.
    num_layers, head_dim : int
    kv_format : KvFormat
    block_tokens : int
        Tokens of a wire block.
    layers : sequence of int
        The numbers of the layers, if others of the model have wire blocks of their own.

    Attributes
    ----------
    parts : list of Part
        What a payload has of a block, one after the other: (num_layers, 2, block_tokens, head_dim) elements, and the
        scales of their rows, if they have any.
    block_bytes : int
        Bytes of a block, with its header.
    """

    def __init__(
        self,
        model: str,
        num_layers: int,
        head_dim: int,
        kv_format: KvFormat,
        *,
        block_tokens: int = BLOCK_TOKENS,
        layers: Sequence[int] = (),
    ) -> None:
        if not isinstance(model, str) or not model:
            raise TypeError(f"model must be a str that names the model and its weights, got {model!r}")
        self.block_tokens = as_int("block_tokens", block_tokens, minimum=1, maximum=2**16)
        rows = num_layers, 2, self.block_tokens
        self.parts = [Part((*rows, head_dim), kv_format.stored)]
        if kv_format.scale == "row":
            self.parts.append(Part((*rows[:2], -(-self.block_tokens // 2) * 2), FLOAT32))  # of whole 64-bit words
        self._payload_bytes = sum(part.nbytes for part in self.parts)
        self.block_bytes = HEADER_BYTES + self._payload_bytes
        sizes = kv_format.wire_word, num_layers, head_dim, self.block_tokens
        self._model = blake2b_128(model.encode() + np.array(layers, "<i4").tobytes())
        self._head_of_header = MAGIC, VERSION, *sizes
        self._sizes_of_root = partial(_ROOT.pack, VERSION, *sizes)

    def digests(self, tokens: npt.NDArray[np.int32], salt: bytes) -> list[bytes]:
        """The chained digests of the wire blocks of a text, the last one for what is left.

        Parameters
        ----------
        tokens : (num_tokens,) int32
        salt : bytes
            The root digest of the salt.
        """
        ids, size = tokens.astype("<i4", copy=False), self.block_tokens
        parts = (ids[i : i + size].tobytes() for i in range(0, len(ids), size))
        return hash_chain(blake2b_128, self.root(salt), parts)

    def digest_at(self, num_tokens: int, tokens: npt.NDArray[np.int32], salt: bytes, digests: Sequence[bytes]) -> bytes:
        """The last digest of the first tokens of a text, whose full wire blocks have `digests`."""
        num_full, rest = divmod(num_tokens, self.block_tokens)
        above = digests[num_full - 1] if num_full else self.root(salt)
        part = tokens[num_tokens - rest : num_tokens].astype("<i4", copy=False).tobytes()
        return hash_chain(blake2b_128, above, [part])[0] if rest else above

    def root(self, salt: bytes) -> bytes:
        """The digest of the model and of a salt's root digest, which the first block of a text follows."""
        return blake2b_128(self._sizes_of_root(salt) + self._model)

    @staticmethod
    def without_first(digest: bytes, num_tokens: int) -> bytes:
        """The digest of a block that lacks its first num_tokens tokens, from its chained digest."""
        # Of another length than a digest with tokens behind it: a text could go on with this number as a token.
        return blake2b_128(b"without" + digest + num_tokens.to_bytes(4, "little")) if num_tokens else digest

    @staticmethod
    def name(digest: bytes, head: int, scales: bytes = b"") -> Name:
        """The name of one KV head's block; `scales` are the bytes of that head's scales, if it has any."""
        return Name(blake2b_128(_HEAD.pack(digest, head) + scales), digest, head)

    def empty(self, num_blocks: int) -> npt.NDArray[np.uint8]:
        """Room for blocks, (num_blocks, block_bytes) uint8."""
        blocks = np.empty((num_blocks, self.block_bytes), np.uint8)
        blocks[:, HEADER_BYTES + self.parts[0].nbytes :] = 0  # what follows scales of an odd number of tokens
        return blocks

    def payloads(self, blocks: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.generic]]:
        """The parts of the payloads of blocks as views, (num_blocks, num_layers, 2, block_tokens, ...) each."""
        views, start = [], HEADER_BYTES
        for shape, dtype in self.parts:
            nbytes = math.prod(shape) * dtype.itemsize
            view = blocks[:, start : start + nbytes].view(dtype).reshape(len(blocks), *shape)
            views.append(view[:, :, :, : self.block_tokens])
            start += nbytes
        return views

    def seal(self, blocks: npt.NDArray[np.uint8], names: Sequence[Name]) -> None:
        """Write the headers of blocks whose payloads are there."""
        blocks[:, :HEADER_BYTES] = 0
        for block, name in zip(blocks, names, strict=True):
            header = self._header(name)
            sealed = header + self._checksum(header, block)
            block[: len(sealed)] = np.frombuffer(sealed, np.uint8)

    def opened(self, block: Buffer | None, name: Name) -> npt.NDArray[np.uint8] | None:
        """The bytes of a block from a store, (block_bytes,) uint8, or None unless it is exactly what `name` says."""
        try:
            view = memoryview(block).cast("B") if block is not None else memoryview(b"")
        except (TypeError, ValueError, BufferError):  # a store that returns something else than bytes
            return None
        header = self._header(name)
        if len(view) != self.block_bytes or view[: len(header)] != header:
            return None
        found = np.frombuffer(view, np.uint8)
        checksum = view[len(header) : len(header) + NUM_BYTES]
        return found if checksum == self._checksum(header, found) else None

    def _header(self, name: Name) -> bytes:
        magic, version, *sizes = self._head_of_header
        return _FIELDS.pack(magic, version, *sizes, name.head, self._payload_bytes, self._model, name.digest, name.key)

    def _checksum(self, header: bytes, block: npt.NDArray[np.uint8]) -> bytes:
        words = block[HEADER_BYTES:].view("<u8").reshape(2 * self.parts[0].shape[0], -1)
        return blake2b_128(header + words.sum(axis=0).tobytes() + words.sum(axis=1).tobytes())
