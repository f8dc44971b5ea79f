"""Snapshot memory outside the training process, and the ways between such memories: no jax."""
