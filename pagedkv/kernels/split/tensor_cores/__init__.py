"""The split kernel on tensor cores: caches of 16-bit floats and fp8."""
