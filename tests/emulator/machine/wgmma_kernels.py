"""A kernel of one wgmma or a few, as PTX text whose parts a test can exchange, and its operands in shared memory."""

import ml_dtypes
import numpy as np

from ..ptx_harness import emulate, filled

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
SWIZZLE_128 = 1 << 62

LOAD = """
ld.param.u64 %ad, [image]; mad.wide.u32 %ad, %who, 8, %ad;
mov.u32 %r0, buf; mad.lo.u32 %r0, %who, 8, %r0; mov.u32 %r1, 0;
more:
ld.global.b64 %x, [%ad]; st.shared.b64 [%r0], %x;
add.u64 %ad, %ad, {step}; add.u32 %r0, %r0, {step}; add.u32 %r1, %r1, {step};
setp.lt.u32 %p, %r1, {nbytes}; @%p bra more;
"""
PARTS = {
    "load": LOAD,
    "proxy_fence": "fence.proxy.async.shared::cta;",
    "barrier": "bar.sync 0;",
    "fence": "wgmma.fence.sync.aligned;",
    "commit": "wgmma.commit_group.sync.aligned;",
    "running": "",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "end": "",
}


def registers(name, count):
    return ", ".join(f"%{name}{i}" for i in range(count))


def text_of(n, products, nbytes, threads=128, extra="", **parts):
    """A kernel `test`: image (shared memory), A (4 words a thread), C and D (n / 2 floats a thread)."""
    parts = PARTS | parts
    step = 8 * threads
    body = [parts["load"].format(step=step, nbytes=nbytes), parts["proxy_fence"], parts["barrier"], parts["fence"]]
    body += [*products, parts["commit"], parts["running"], parts["wait"], parts["end"]]
    half = n // 2
    loads = "\n".join(f"ld.global.f32 %d{i}, [%ad+{4 * i}];" for i in range(half))
    stores = "\n".join(f"st.global.f32 [%ad+{4 * i}], %d{i};" for i in range(half))
    newline = "\n"
    return f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry test(.param .u64 image, .param .u64 a, .param .u64 c, .param .u64 d)
{{
.reg .b64 %ad, %x, %da, %db; .reg .b32 %who, %r<8>, %a<4>; .reg .f32 %d<{half}>, %e<8>; .reg .pred %p, %yes, %no;
.shared .align 1024 .b8 buf[{nbytes}];
mov.u32 %who, %tid.x; setp.eq.u32 %yes, 0, 0; setp.ne.u32 %no, 0, 0;
ld.param.u64 %ad, [a]; mad.wide.u32 %ad, %who, 16, %ad;
ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%ad];
ld.param.u64 %ad, [c]; mad.wide.u32 %ad, %who, {2 * n}, %ad;
{loads}
{extra}
{newline.join(body)}
ld.param.u64 %ad, [d]; mad.wide.u32 %ad, %who, {2 * n}, %ad;
{stores}
ret;
}}
"""


def product(n, kind="f16", a="registers", b_desc="%db", a_desc="%da", adds="%yes", signs="1, 1", majors="0"):
    """A wgmma; its descriptors are in %da and %db."""
    group = "{" + registers("a", 4) + "}" if a == "registers" else a_desc
    operands = f"{{{registers('d', n // 2)}}}, {group}, {b_desc}, {adds}, {signs}, {majors}"
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {operands};"


def descriptor(start, lbo=16, sbo=1024):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | SWIZZLE_128


def set_descriptor(register, start, **strides):
    """Of what begins `start` bytes into `buf`, which is not at address 0 in hardware."""
    of_buf = f"mov.u32 %r7, buf; shr.u32 %r7, %r7, 4; cvt.u64.u32 {register}, %r7;"
    return f"{of_buf} add.u64 {register}, {register}, {descriptor(start, **strides):#x};"


def swizzled(image):
    """Chunks of 16 bytes in their places: bits 4 to 6 of an offset are exclusive-ored with bits 7 to 9."""
    chunks = image.reshape(-1, 16)
    number = np.arange(len(chunks))
    out = np.empty_like(chunks)
    out[number ^ (number >> 3 & 7)] = chunks
    return out.reshape(-1)


def k_major(matrix):
    """The image of a matrix (rows, 64): a row after the other, of 128 bytes."""
    return swizzled(np.ascontiguousarray(matrix).view(np.uint8).reshape(-1))


def mn_major(matrix):
    """The image of a matrix (rows, k): panels of 64 rows, in which k is the slow axis."""
    return swizzled(np.concatenate([np.ascontiguousarray(x.T).view(np.uint8).reshape(-1) for x in panels(matrix)]))


def panels(matrix):
    return [matrix[i : i + 64] for i in range(0, len(matrix), 64)]


def fragments(matrix):
    """A (64, 16) as four words of each of 128 threads."""
    warp, i, g, t, e = np.ix_(range(4), range(4), range(8), range(4), range(2))
    at = matrix[16 * warp + g + 8 * (i & 1), 2 * t + e + 8 * (i >> 1)]  # (warp, i, g, t, e)
    return np.ascontiguousarray(np.moveaxis(at, 1, 3).reshape(128, 4, 2)).view(np.uint32).reshape(128, 4)


def accumulators(matrix):
    """C or D (64, n) as n / 2 floats of each of 128 threads."""
    warp, h, g, j, t, e = np.ix_(range(4), range(2), range(8), range(matrix.shape[1] // 8), range(4), range(2))
    at = matrix[16 * warp + g + 8 * h, 8 * j + 2 * t + e]  # (warp, h, g, j, t, e)
    return at.transpose(0, 2, 4, 3, 1, 5).reshape(128, -1).astype(np.float32)


def run(text, image, a, c, threads=128, launch=emulate, **options):
    """D of every thread, (threads, n / 2)."""
    d = filled(c.shape, np.float32)
    launch(text, [*map(np.ascontiguousarray, (image, a, c)), d], block=threads, **options)
    return d
