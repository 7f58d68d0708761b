"""What the emulator's tests share: PTX of one-off kernels, kernels compiled by numba-cuda, and launches of both.

`launch_on` and `run_on` launch on a GPU, too, and have ptxas assemble what the emulator runs. Other launches are the
emulator's, with all that it can be asked to look for.
"""

import linecache
import re
from itertools import count

import numpy as np
import pytest
from numba import cuda, types

from pagedkv.compiler.compile import CompiledKernel
from pagedkv.compiler.numba_overrides import overridden
from pagedkv.compiler.ptx import is_specific
from pagedkv.emulator import Buffer, Device, Module

from ..support.devices import FILL, with_capability

_BITS = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}
_serial = count()

SHARED = {"shared": ".shared .align 16 .b8 buf[1024];"}  # an option of launches: shared memory `buf`


def kernel_text(body, inputs, outputs, extra="", shared="", target="sm_80"):
    """PTX of a kernel `test` that loads a value per thread from each input, and stores one to each output.

    `inputs` and `outputs` are item sizes. In the body, inputs are %i0.., outputs %o0.., scratch registers %r, %rd, %f,
    %h and %p. `target` is the first one with all of its instructions.
    """
    sizes = [*inputs, *outputs]
    params = ",\n".join(f".param .u64 p{i}" for i in range(len(sizes)))
    names = [f"%i{i}" for i in range(len(inputs))] + [f"%o{i}" for i in range(len(outputs))]
    declare, move = [], []
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        declare.append(f".reg .{'b16' if size == 1 else _BITS[size]} {name};")
        address = f"ld.param.u64 %ad0, [p{i}]; mad.lo.u64 %ad0, %gid64, {size}, %ad0;"
        load = f"ld.global.{_BITS[size]} {name}, [%ad0];"
        move.append(f"{address} {load if i < len(inputs) else f'st.global.{_BITS[size]} [%ad0], {name};'}")
    newline = "\n"
    return f"""
.version {"8.8" if target == "sm_100" else "8.5"}
.target {target}
.address_size 64
{extra}
.visible .entry test({params})
{{
.reg .b64 %ad<4>; .reg .b64 %gid64; .reg .b32 %gid, %nt, %ct, %lid;
.reg .b32 %r<40>; .reg .b64 %rd<40>; .reg .f32 %f<40>; .reg .f64 %fd<8>; .reg .b16 %h<40>; .reg .pred %p<40>;
{shared}
{newline.join(declare)}
mov.u32 %lid, %tid.x; mov.u32 %nt, %ntid.x; mov.u32 %ct, %ctaid.x; mad.lo.u32 %gid, %ct, %nt, %lid;
cvt.u64.u32 %gid64, %gid;
{newline.join(move[: len(inputs)])}
{body}
{newline.join(move[len(inputs) :])}
ret;
}}
"""


def launch_ptx(body, inputs, out_dtypes, *, block=None, grid=1, n=None, extra="", shared="", **options):
    """Run `body` once for each element of the inputs (or `n` times); returns the output arrays and the LaunchStats."""
    inputs = [np.asarray(array) for array in inputs]
    outs = [np.dtype(dtype) for dtype in out_dtypes]
    n = n or len(inputs[0])
    text = kernel_text(body, [a.itemsize for a in inputs], [dtype.itemsize for dtype in outs], extra, shared)
    device = Device(8 << 20)
    args = [device.upload(array, f"in{i}") for i, array in enumerate(inputs)]
    results = [device.alloc(n, dtype, f"out{i}") for i, dtype in enumerate(outs)]
    stats = device.launch(Module(text).entry(), grid, block or n // grid, args + results, **options)
    return [buffer.get() for buffer in results], stats


def run_ptx(body, inputs, out_dtypes, **options):
    """The output arrays of `launch_ptx`."""
    return launch_ptx(body, inputs, out_dtypes, **options)[0]


def stats_of(body, inputs, out_dtypes, **options):
    """The LaunchStats of `launch_ptx`."""
    return launch_ptx(body, inputs, out_dtypes, stats=True, **options)[1]


def launch_on(open_device, text, args, *, block, grid=1, **checks):
    """Run the kernel of a PTX module on a device of `open_device`: arrays are as it left them afterwards.

    A GPU that lacks its instructions skips the test.
    """
    digits = int(re.search(r"^\.target sm_(\d+)", text, re.MULTILINE)[1])
    needed = divmod(digits, 10)
    with with_capability(open_device(**checks), max(needed, (9, 0))) as device:
        if device.capability < needed or (is_specific(text) and device.capability != needed):
            pytest.skip(f"needs compute capability {needed[0]}.{needed[1]}")
        kernel = CompiledKernel("test", Module(text).entry_names[0], text, block, device.capability)
        assert kernel.cubin  # of what only the emulator runs, too: it is what a GPU would get
        given = [device.address(f"arg{i}", arg) if isinstance(arg, np.ndarray) else arg for i, arg in enumerate(args)]
        device.launch(kernel, (grid, 1, 1), given)


def emulate(text, args, *, block, grid=1, **options):
    """As `launch_on`, in the emulator alone, with any options of its launches."""
    device = Device(1 << 22)
    given = [device.upload(arg, f"arg{i}") if isinstance(arg, np.ndarray) else arg for i, arg in enumerate(args)]
    device.launch(Module(text).entry(), grid, block, given, **options)
    for arg, buffer in zip(args, given, strict=True):
        if isinstance(arg, np.ndarray):
            arg[...] = buffer.get()


def aligned(array):
    """A copy at a multiple of 256 bytes, as memory of a GPU."""
    array = np.asarray(array)
    room = np.empty(array.nbytes + 256, np.uint8)
    first = -room.ctypes.data % 256
    copy = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def filled(shape, dtype):
    """A new array whose bytes no kernel has written."""
    array = aligned(np.empty(shape, dtype))
    array.view(np.uint8)[...] = FILL
    return array


def run_on(
    open_device, body, inputs, out_dtypes, *, block=None, grid=1, n=None, extra="", shared="", target="sm_80", **checks
):
    """As `run_ptx`, on a device of `open_device`."""
    inputs, n = list(map(aligned, inputs)), n or len(inputs[0])
    outs = [filled(n, dtype) for dtype in out_dtypes]
    sizes = [[x.itemsize for x in arrays] for arrays in (inputs, outs)]
    text = kernel_text(body, *sizes, extra, shared, target)
    launch_on(open_device, text, inputs + outs, block=block or n // grid, grid=grid, **checks)
    return outs


def compile_ptx(function, *signature, cc=(9, 0), **options):
    """PTX of a Python function or a cuda.jit object."""
    with overridden(cc):
        function = getattr(function, "py_func", function)
        return cuda.compile_ptx(function, types.void(*signature), cc=cc, **options)[0]


def build(function, *signature, cc=(9, 0), **options):
    """The compiled kernel, ready for `Device.launch`."""
    return Module(compile_ptx(function, *signature, cc=cc, **options)).entry()


def build_source(source, name, scope, *signature, **options):
    """The kernel `name` that a source text defines; its lines are known to faults."""
    file = f"<{name} {next(_serial)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope = dict(scope)
    exec(compile(source, file, "exec"), scope)
    return build(scope[name], *signature, **options)


def run(function, signature, args, *, block=64, grid=1, uninit=(), **options):
    """Compile and run a kernel; returns the arguments, arrays as the kernel left them.

    Array i is a buffer arg{i}, which holds no value yet if i is in `uninit`.
    """
    device = Device(1 << 20)
    given = []
    for i, arg in enumerate(args):
        if not isinstance(arg, np.ndarray):
            given.append(arg)
        elif i in uninit:
            given.append(device.alloc(arg.shape, arg.dtype, f"arg{i}"))
        else:
            given.append(device.upload(arg, f"arg{i}"))
    device.launch(build(function, *signature), grid, block, given, **options)
    return [arg.get() if isinstance(arg, Buffer) else arg for arg in given]


def array_arguments(buffer):
    """The 5 + 2 * ndim kernel parameters that numba uses for one C-contiguous array argument."""
    return [0, 0, buffer.size, buffer.dtype.itemsize, buffer, *buffer.shape, *buffer.strides]


def _numba_type(arg):
    from numba.cuda.np import numpy_support

    if isinstance(arg, np.ndarray):
        return types.Array(numpy_support.from_dtype(arg.dtype), arg.ndim, "C")
    return numpy_support.from_dtype(arg.dtype) if isinstance(arg, np.generic) else types.int64


def run_arrays(kernel, grid, block, *args, shared_bytes=0, cc=(9, 0), fastmath=False, **options):
    """Compile for the given NumPy arguments, run, and copy the results back into the arrays; returns LaunchStats."""
    device = Device(1 << 20)
    entry = build(kernel, *map(_numba_type, args), cc=cc, fastmath=fastmath)
    buffers = [device.upload(arg, f"arg{i}") if isinstance(arg, np.ndarray) else arg for i, arg in enumerate(args)]
    flat = [value for b in buffers for value in (array_arguments(b) if isinstance(b, Buffer) else [b])]
    stats = device.launch(entry, grid, block, flat, shared_bytes, **options)
    for arg, buffer in zip(args, buffers, strict=True):
        if isinstance(arg, np.ndarray):
            arg[...] = buffer.get()
    return stats
