"""Prefill attention on tensor cores (mma.sync), after FlashAttention-2: 16-bit and fp8 caches in NHD and HND.

    q, out             (num_tokens, num_heads, head_dim)
    K cache, V cache   (num_blocks, block_size, num_kv_heads, head_dim) or (num_blocks, num_kv_heads, block_size,
                       head_dim), by their strides

Grid. x is tile * num_kv_heads + kv_head: neighbours read neighbouring heads of the same tokens. A tile is up to
`TileShape.rows` query rows of a sequence and KV head (../items.py): row r of a sequence is token r // group_size and
head r % group_size, so that any number of query heads shares the K and V that a tile reads. parts/kernel.py takes
sequences with up to `few_rows` rows and more than PART keys.

Who owns what. Each of four or eight warps has 16 or 32 of the rows, with O in registers. It goes through all tiles of
keys that a row of the thread block sees, in ascending order, from a multiple of the tile's size on. A tile of keys that
a row does not see leaves that row as it is, so neither chunks of a prompt nor windows nor neighbours change its bits.

Shared memory, dynamic: Q, a ring of one or two tiles of K, one of V, codes of fp8 in flight, and the item (copies.py
has the order of a row, tile.py the places). With two stages, the next tile is copied while this one is used, at one
barrier a tile. With one, the copy of the next K starts once S is computed, and that of V when the tile begins, at two
barriers. fp8 takes one stage: codes of the next tile are copied while this one is used.
"""

from __future__ import annotations

from typing import Any

from ...device.cache_rows import Cache, scales_of_keys, scales_of_values
from ...device.intrinsics.thread import address, bits_float, divmod_32, shared_address
from ...device.intrinsics.warp import shuffle, thread_number
from ...device.language import cuda, float32, int64, uint32
from ...device.source import KernelSource
from ..arguments import TileLogitOptions, TilePages, TileQuery, signature
from ..config import TensorConfig
from ..items import is_split, make_find_item, make_item_store
from ..output import make_store_nothing
from .loop import make_attend_tiles
from .prologue import make_prologue
from .registers import make_registers, make_start, make_store_rows, make_store_words
from .tile import SWIZZLED, TileShape


def make_prefill(config: TensorConfig) -> KernelSource:
    """The kernel of all rows of all sequences, which attend to the keys that they see."""
    shape = TileShape(config)
    return kernel_of(config, shape, make_attend_tiles(config, shape), SWIZZLED, min_blocks=shape.min_blocks)


def kernel_of(config: TensorConfig, shape: TileShape, attend_tiles: Any, alignment: int, **facts: Any) -> KernelSource:
    """The kernel around an inner loop; shared memory is aligned to `alignment`, and `facts` go to KernelSource."""
    ALIGNMENT = alignment
    ROWS, GROUP_SIZE, prologue = shape.rows, config.group_size, make_prologue(config, shape)
    MODIFIED, (store_item, load_item) = config.modified, make_item_store(shape.item_start)
    find_item, registers_of = make_find_item(ROWS), make_registers(shape)
    start, store_words = make_start(config, shape), make_store_words(config, shape)
    store_rows = make_store_rows(config, shape, store_words)
    store_nothing = make_store_nothing(ROWS, config.head_dim // 2, shape.num_threads)

    def prefill(
        out, lse, q, k_cache, v_cache, block_tables, seq_lens, query_starts, alibi_slopes, sinks, k_scale, v_scale,
        num_seqs, num_tokens, num_kv_heads, num_heads, max_seq_len, visible, scale_strides,
        few_rows, table_stride, q_token_stride, q_head_stride, out_token_stride, out_head_stride, k_block_stride,
        k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
        scale, softcap, k_number, v_number,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, uint32, alignment=ALIGNMENT))
        # A volatile read: ptxas keeps in registers what follows from it, and does not compute it again in the loop.
        thread = thread_number()
        lane, warp = uint32(thread & 31), shuffle(uint32(thread >> 5), 0)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        lengths = (query_starts, seq_lens)
        # Thread 0 reads the lengths for the block: they may change while the kernel runs, and all threads must agree.
        found = find_item(lane, tile, uint32(GROUP_SIZE), lengths, num_seqs, num_tokens, max_seq_len)
        if thread == 0:
            store_item(shared, found)
        cuda.syncthreads()
        item = load_item(shared)
        if item.num_rows == 0 or is_split(item, few_rows):
            return
        out_strides = (out_token_stride, out_head_stride)
        if item.seq_len == 0:
            output = prologue.output_of(out, out_strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
            store_nothing(output, item, uint32(GROUP_SIZE), thread)
            return

        low, span = prologue.span_of(item, visible)
        table = address(block_tables) + int64(item.seq) * table_stride
        factor, unit = prologue.factors_of(scale, k_scale, k_number, kv_head)
        registers = registers_of()
        start(registers, item, alibi_slopes, kv_head, warp, uint32(lane >> 2))
        q_row = address(q) + int64(item.start) * q_token_stride + int64(uint32(kv_head * GROUP_SIZE)) * q_head_stride
        attend_tiles(
            registers,
            shared,
            thread,
            lane,
            warp,
            item,
            TileQuery(q_row, q_token_stride, q_head_stride, not MODIFIED and factor < float32(0)),
            Cache(address(k_cache) + int64(kv_head) * k_head_stride, k_block_stride, k_token_stride),
            Cache(address(v_cache) + int64(kv_head) * v_head_stride, v_block_stride, v_token_stride),
            TilePages(
                table,
                low,
                span.last,
                scales_of_keys(k_scale, scale_strides, kv_head),
                scales_of_values(v_scale, scale_strides, kv_head),
            ),
            visible,
            TileLogitOptions(factor, bits_float(uint32(softcap)), item.seq, uint32(item.seq_len - 1)),
            span,
            unit,
        )
        # `attend_tiles` needs the registers, so reload what the rest uses.
        item, thread = load_item(shared), thread_number()
        lane, warp = uint32(thread & 31), uint32(thread >> 5)
        tile, kv_head = divmod_32(uint32(cuda.blockIdx.x), uint32(num_kv_heads))
        output = prologue.output_of(out, out_strides, lse, sinks, v_scale, v_number, item, kv_head, num_heads)
        store_rows(registers, output, item, warp, uint32(lane >> 2), uint32(lane & 3), shared)

    return KernelSource(prefill, signature(12), shape.num_threads, **facts)


def dynamic_bytes(config: TensorConfig) -> int:
    """Bytes of dynamic shared memory of a launch."""
    return TileShape(config).nbytes
