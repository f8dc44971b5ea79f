"""From the layouts of states that older versions wrote to the one of today, one version at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tree = dict[str, Any]


def is_of_ray(tree: Mapping[str, Any]) -> bool:
    """Whether Ray's own manager wrote it, which is version 0."""
    return "version" not in tree and "ray_version" in tree and "checkpoint_results" in tree


def _from_ray(tree: Tree) -> Tree:
    """Version 0: what was reported, as Ray's `checkpoint_manager_snapshot.json` has it."""
    results = tree["checkpoint_results"]
    pending = [one["checkpoint_dir_name"] for one in tree.get("pending_training_results", ())]
    specs = dict(zip(pending, tree.get("pending_validation_specs", ()), strict=False))
    status_of = dict.fromkeys(pending, "validating")
    for field, status in (
        ("validated_checkpoint_dir_names", "validated"),
        ("timed_out_validation_checkpoint_dir_names", "validation_timed_out"),
        ("failed_validation_checkpoint_dir_names", "invalid"),
    ):
        status_of |= dict.fromkeys(tree.get(field, ()), status)
    # States of older versions of Ray know no indices: their results are in the order of their scores.
    indices = tree.get("checkpoint_report_indices") or list(range(len(results)))
    checkpoints = [
        {
            "path": one["checkpoint_dir_name"].strip("/"),
            "report_index": index,
            "status": status_of.get(one["checkpoint_dir_name"], "complete"),
            "origin": "report",
            "metrics": one.get("metrics") or {},
            "validation": specs.get(one["checkpoint_dir_name"]),
        }
        for one, index in zip(results, indices, strict=True)
    ]
    count = tree.get("current_report_index", 1 + max(indices, default=-1))
    return {"version": 1, "report_index": count, "checkpoints": checkpoints}


MIGRATIONS: Mapping[int, Callable[[Tree], Tree]] = {0: _from_ray}
"""By version, what makes the next one of it."""
