"""Checkpoints on any pyarrow filesystem, in directories that Orbax reads. Knows no cluster, and writes without JAX."""
