"""Loads, stores, atomics, cp.async, fences and prints, and hints, which do nothing."""

from __future__ import annotations

from ..ptx.instruction import Instruction, split_group
from ..ptx.types import SIZE, bits_of, view_of
from .block import BlockTranslator, Handlers, UntranslatedError
from .mem_op import Fence, MemOp

HANDLERS = Handlers()

_SPACES = ("global", "shared", "local", "const", "param")
_ATOMS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_BLOCK_SCOPES = ("cta", "cluster")  # without clusters a thread block is one
_FENCES = ("sc", "acq_rel", "acquire", "release")
_FENCE_SCOPES = [[q] for q in ("gl", "sys", "gpu", *_BLOCK_SCOPES)]
_STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")


def _space(ins: Instruction) -> str:
    s = next((q.split("::")[0] for q in ins.parts[1:] if q.split("::")[0] in _SPACES), "generic")
    return "global" if s == "const" else s


def _mem_op(ins: Instruction, kind: str, ty: str, count: int) -> MemOp:
    p = ins.parts
    if "async" in p or "bulk" in p:
        raise UntranslatedError
    strong = kind == "atomic" or any(q in _STRONG for q in p)
    # An atom that drops the old value is a red.
    observes = strong and kind != "store" and p[0] != "red" and ins.operands[0] != "_"
    return MemOp(
        ins,
        kind,
        _space(ins),
        SIZE[ty],
        count,
        strong,
        acquire=any(q in ("acquire", "acq_rel") for q in p),
        release=any(q in ("release", "acq_rel") for q in p),
        observes=observes,
        grid=not any(q in _BLOCK_SCOPES for q in p),
        read_only="nc" in p,
    )


@HANDLERS.of("ld", "ldu")
def _load(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    dests = split_group(o[0])
    space = _space(ins)
    if space == "param":
        name, _, off = o[1].strip("[] ").partition("+")
        for i, d in enumerate(dests):
            t.put(d, ty, f"param('{name.strip()}',{int(off or 0) + i * SIZE[ty]},'{view_of(ty)}')")
        return
    # A signed load into a wider register sign-extends.
    view = view_of(ty) if ty[0] == "s" and any(d != "_" and t.width(d) > SIZE[ty] for d in dests) else bits_of(ty)
    targets = []
    for d in dests:
        targets.append("None" if d == "_" else t.reg(d, f"{view[0]}{8 * t.width(d)}"))
    op = t.object(_mem_op(ins, "load", ty, len(dests)))
    t.emit(f"ld_{space}({op},{t.address(o[1])},'{view}',{t.mask},({','.join(targets)},))")


@HANDLERS.of("st")
def _store(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = ins.operands, ins.parts[-1]
    u = bits_of(ty)
    values = split_group(o[1])
    op = t.object(_mem_op(ins, "store", ty, len(values)))
    t.emit(f"st_{_space(ins)}({op},{t.address(o[0])},'{u}',{t.mask},({','.join(t.src(v, u) for v in values)},))")


@HANDLERS.of("atom", "red")
def _atom(t: BlockTranslator, ins: Instruction) -> None:
    o, ty = list(ins.operands), ins.parts[-1]
    if any(q in ("v2", "v4", "v8") for q in ins.parts) or ty in ("b128", "bf16", "f16x2", "bf16x2"):
        raise UntranslatedError
    what = next(q for q in ins.parts if q in _ATOMS)
    dest = o.pop(0) if ins.parts[0] == "atom" else "_"
    op = t.object(_mem_op(ins, "atomic", ty, 1))
    target = "None" if dest == "_" else t.reg(dest, ty)
    values = ",".join(t.src(v, ty) for v in o[1 : 3 if what == "cas" else 2])
    t.emit(f"atom_{_space(ins)}({op},'{what}',{t.address(o[0])},'{view_of(ty)}',{t.mask},{target},({values},))")


@HANDLERS.of("cp")
def _cp_async(t: BlockTranslator, ins: Instruction) -> None:
    p, o = ins.parts, ins.operands
    if p[1] != "async" or "bulk" in p or "mbarrier" in p:
        raise UntranslatedError
    if p[2] == "commit_group":
        t.emit(f"async_commit({t.mask})")
    elif p[2] == "wait_group":
        t.emit(f"async_wait({t.mask},{t.literal(o[0])})")
    elif p[2] == "wait_all":
        t.emit(f"async_wait({t.mask},None)")
    elif p[2] in ("ca", "cg"):
        size = t.literal(o[2])
        if size not in (4, 8, 16) or (p[2] == "cg" and size != 16):
            raise UntranslatedError
        extra = o[3:-1] if "L2::cache_hint" in p else o[3:]
        limit = "None"
        if extra and t.scope.registers.get(extra[0]) == "pred":
            limit = f"np.where({t.src(extra[0], 'pred')},0,{size})"
        elif extra:
            limit = f"{t.src(extra[0], 'u32')}"
        load = t.object(MemOp(ins, "load", "global", size))
        store = t.object(MemOp(ins, "store", "shared", size))
        t.emit(f"async_copy({load},{store},{t.address(o[0])},{t.address(o[1])},{limit},{t.mask})")
    else:
        raise UntranslatedError


@HANDLERS.of("vprintf")
def _vprintf(t: BlockTranslator, ins: Instruction) -> None:
    count, form, buffer = ins.operands
    t.emit(f"v=vprintf({t.object(ins)},{t.src(form, 'u64')},{t.src(buffer, 'u64')},{t.mask})")
    t.put(count, "u32", "v")


@HANDLERS.of("membar", "fence")
def _fence(t: BlockTranslator, ins: Instruction) -> None:
    head, *rest = ins.parts
    if rest[0] == "proxy":
        if rest[1] != "async":
            raise UntranslatedError
        if rest[2:] != ["global"]:
            t.emit(f"proxy_fence({t.mask})")
        return
    what = "sc" if head == "membar" else rest.pop(0) if rest[0] in _FENCES else "acq_rel"
    if rest not in _FENCE_SCOPES:  # for some operations only
        raise UntranslatedError
    both = what in ("sc", "acq_rel")
    fence = Fence(both or what == "acquire", both or what == "release", what == "sc", rest[0] not in _BLOCK_SCOPES)
    t.emit(f"fence({t.object(fence)},{t.mask})")


@HANDLERS.of(
    "nanosleep",
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    "griddepcontrol",
    "pmevent",
    "cluster",
)
def _no_op(t: BlockTranslator, ins: Instruction) -> None:
    if ins.parts[0] == "discard" or ins.parts[0] == "cluster":
        raise UntranslatedError


@HANDLERS.of("createpolicy")
def _createpolicy(t: BlockTranslator, ins: Instruction) -> None:
    t.put(ins.operands[0], "u64", t.scope.constant("int", 0, "u64"))
