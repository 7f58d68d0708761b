"""Literal types for arguments that take a name, for type checkers and for validation."""

from __future__ import annotations

from typing import Literal

Layout = Literal["NHD", "HND", "vllm"]
KvDtype = Literal["fp8_e4m3", "fp8_e5m2", "int8"]
Kernel = Literal["auto", "v1", "v2", "split"]
Backend = Literal["auto", "cpu", "cuda", "emulator"]

__all__ = ["Backend", "Kernel", "KvDtype", "Layout"]
