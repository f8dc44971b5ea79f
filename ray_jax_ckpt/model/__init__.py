"""Plain data and decisions: no jax, ray, orbax or pyarrow."""
