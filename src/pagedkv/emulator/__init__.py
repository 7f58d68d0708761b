"""Runs the PTX that numba.cuda emits on NumPy memory, and checks every access and every synchronisation."""

from .device import EmulatorDevice
from .entry import Entry, Module
from .errors import (
    EmulatorError,
    KernelFault,
    MemoryFault,
    RaceFault,
    SourceLine,
    SyncFault,
    TrapFault,
    UnsupportedInstructionError,
)
from .footprint import Footprint
from .launch import Device
from .memory import Buffer
from .stats import BufferTraffic, LaunchStats

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
    "SyncFault",
    "TrapFault",
    "UnsupportedInstructionError",
]
