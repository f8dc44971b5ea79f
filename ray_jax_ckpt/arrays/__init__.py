"""Pytrees and device arrays: describing them, pinning them in host memory, in-process snapshots. JAX, no Ray."""
