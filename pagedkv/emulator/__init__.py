"""The emulator runs PTX from numba-cuda on NumPy memory, and checks every access and every synchronisation."""

from .device import EmulatorDevice
from .errors import EmulatorError, SourceLine, UnsupportedInstructionError
from .machine.launch import Device
from .run import run
from .state.faults import KernelFault, MemoryFault, RaceFault, SyncFault, TrapFault
from .state.footprint import Footprint
from .state.memory import Buffer
from .state.stats import BufferTraffic, LaunchStats
from .state.warp_trace import Step, Warp, WarpAccess, WarpTrace
from .translation.entry import Entry, Module

__all__ = [
    "Buffer",
    "BufferTraffic",
    "Device",
    "EmulatorDevice",
    "EmulatorError",
    "Entry",
    "Footprint",
    "KernelFault",
    "LaunchStats",
    "MemoryFault",
    "Module",
    "RaceFault",
    "SourceLine",
    "Step",
    "SyncFault",
    "TrapFault",
    "UnsupportedInstructionError",
    "Warp",
    "WarpAccess",
    "WarpTrace",
    "run",
]
