"""What Datarax 0.1.4 wrote, with plain Orbax: strings, keys and metadata as parts of the tree."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax_process import Model

import ray_jax_ckpt as rjc
from ray_jax_ckpt.errors import IntegrityError
from ray_jax_ckpt.storage.entries import Empty, Entry
from ray_jax_ckpt.storage.markers import int_keys, unmarked
from ray_jax_ckpt.storage.restore import load
from ray_jax_ckpt.testing.equality import assert_identical

METADATA = {"epoch": 2, "note": "hello", "nested": {"a": [1, 2], "e": []}}


def state():
    return {
        "name": "train é",
        "empty": "",
        "rng": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(1), 3),
        "array": jnp.ones((2, 2)),
        "index": 3,
        "nothing": None,
        "layers": {0: jnp.zeros(1), 10: jnp.ones(1), 2: jnp.full(1, 2.0)},
        "list": [1, "two", jnp.zeros(2)],
    }


def test_strings_keys_and_metadata_come_back_as_what_they_were(orbax_root):
    found = load(orbax_root / "datarax" / "ckpt-3", state())
    assert_identical(found.state, state())
    metadata = dict(found.data_by_rank[0])
    assert metadata.pop("scores").tolist() == [0, 1, 2]
    assert metadata == METADATA
    assert found.step == 3


def test_bare_steps_and_a_default_directory_are_found(orbax_root):
    found = load(orbax_root / "datarax", state())
    assert (found.step, found.state["index"]) == (12, 12)


def test_a_state_that_is_no_dictionary_is_unpacked(orbax_root):
    found = load(orbax_root / "enveloped" / "checkpoint")
    assert (found.state.tolist(), found.data_by_rank) == ([0, 1, 2], {0: {"x": 1}})


def test_without_a_template_numbers_as_names_can_become_ints(orbax_root):
    found = int_keys(load(orbax_root / "datarax" / "ckpt-3").state)
    assert list(found["layers"]) == [0, 2, 10]
    assert (found["name"], found["empty"], found["list"][:2]) == ("train é", "", [1, "two"])
    np.testing.assert_array_equal(found["rng"], jax.random.key_data(jax.random.key(5)))


class Pipeline:
    """An object that has a state."""

    def __init__(self):
        self.seen = None

    def get_state(self):
        return state()

    def set_state(self, found):
        self.seen = found


def test_the_handler_restores_objects_steps_and_metadata(orbax_root):
    with rjc.OrbaxCheckpointHandler() as handler:
        directory = orbax_root / "datarax"
        assert handler.get_checkpoint_steps(directory) == [3, 12]
        assert handler.latest_step(directory) == 12
        assert list(handler.list_checkpoints(directory)) == [3, 12]
        pipeline = Pipeline()
        assert handler.restore(directory, pipeline, step=3) is pipeline
        assert_identical(pipeline.seen, state())
        found = handler.restore(directory, step=3, metadata_only=True)
        assert {name: value for name, value in found.items() if name != "scores"} == METADATA
        without = handler.restore(directory, step=3)
        assert_identical(without["rng"], jax.random.key(5))
        assert list(without["layers"]) == [0, 2, 10]


def test_the_handler_restores_a_whole_model(orbax_root):
    model = Model(2)
    with rjc.OrbaxCheckpointHandler() as handler:
        assert handler.restore(orbax_root / "model", model) is model
    assert_identical(nnx.state(model), nnx.state(Model(1)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("('name', 'char_codes', '1')", "name are no __string__"),
        ("('keys', 'key_data', '0', '0')", "keys are no __prng_key__"),
    ],
)
def test_a_marker_that_lacks_a_part_is_damage(orbax_root, tmp_path, change, words):
    root = shutil.copytree(orbax_root / "datarax" / "ckpt-3", tmp_path / "c")
    tree = json.loads((root / "_METADATA").read_text())
    del tree["tree_metadata"][change]
    (root / "_METADATA").write_text(json.dumps(tree))
    with pytest.raises(IntegrityError, match=words):
        load(root)


def test_a_tree_without_markers_stays_as_it_is():
    entries = [Entry((("d", "a"), ("s", 0)), "scalar", value=np.int64(1)), Entry((("d", "b"),), "string", value="x")]
    empty = [Empty((("d", "a"), ("s", 1)), "none", 1)]
    found = unmarked(entries, empty, lambda entry: np.empty(0))
    assert (found.entries, found.empty, found.metadata) == (entries, empty, None)
