"""Orbax's metadata files, made by Orbax's own classes. The only module that imports what Orbax keeps to itself.

Seams, found in orbax-checkpoint 0.12.8 and pinned by tests/storage/test_conformance.py:

* Keys in `_sharding` are urlsafe base64 of the array's name; what is there counts only for who gives no template.
* Only `array_metadatas` says that an array is a PRNG key; the shapes in it are those of the key's data.
* A node of `_METADATA` without content needs a type: None, Dict, List or Tuple. Nodes of other classes are None to it.
* A directory whose `_CHECKPOINT_METADATA` names one handler, not a dictionary of them, holds its tree itself.
  `v1.load` and v0's checkpointers read both kinds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint._src.metadata import array_metadata, array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.metadata import tree as tree_metadata
from orbax.checkpoint._src.metadata.checkpoint import StepMetadata
from orbax.checkpoint._src.metadata.pytree_metadata_options import PYTREE_METADATA_OPTIONS
from orbax.checkpoint._src.metadata.step_metadata_serialization import serialize
from orbax.checkpoint._src.metadata.value_metadata_entry import ValueMetadataEntry
from orbax.checkpoint._src.tree.utils import is_empty_or_leaf

from ray_jax_ckpt.arrays import tree
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.shards import box_of, whole
from ray_jax_ckpt.storage.grid import DATABASE_CHUNK_BYTES, chunk_shape, split
from ray_jax_ckpt.storage.manifest import FOLDER, FORMAT
from ray_jax_ckpt.storage.names import orbax_name
from ray_jax_ckpt.storage.orbax_types import OrbaxType, orbax_types

_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_EMPTY: Mapping[type, str] = {dict: "Dict", list: "List", tuple: "Tuple"}


def orbax_files(flat: tree.Flat, values: Mapping[int, Any], *, ocdbt: bool = False) -> dict[str, bytes]:
    """The metadata files of a checkpoint by path; the same for all generations of one tree, shardings and types.

    Any rank may make them alone: shardings say where all shards are.

    Args:
        flat: The state.
        values: Its plain values, encoded.
        ocdbt: Whether the arrays are in an OCDBT database.

    Raises:
        UnsupportedLeafError: A leaf cannot be saved.
    """
    specs = [tree.describe(*leaf) for leaf in zip(flat.paths, flat.keys, flat.leaves, strict=True)]
    types = orbax_types(specs, values)
    arrays = {
        number: tree.key_data(leaf) if tree.is_key(leaf) else leaf
        for number, (leaf, kind) in enumerate(zip(flat.leaves, types, strict=True))
        if kind == "jax.Array"
    }
    chunks = {number: _chunks(array, ocdbt) for number, array in arrays.items()}
    found = {
        "_CHECKPOINT_METADATA": json.dumps(serialize(StepMetadata(item_handlers=_HANDLER))),
        "_METADATA": json.dumps(_tree(flat, types, chunks, ocdbt)),
    }
    if arrays:
        found["_sharding"] = json.dumps(_shardings(specs, arrays))
        found["array_metadatas/process_0"] = _array_metadatas(specs, arrays, chunks, ocdbt)
    return {path: text.encode() for path, text in found.items()}


def _chunks(array: jax.Array, ocdbt: bool) -> tuple[int, ...]:
    indices = array.sharding.devices_indices_map(array.shape).values()
    chunks = chunk_shape(array.shape, [whole(array.shape), *(box_of(index, array.shape) for index in indices)])
    return split(chunks, array.dtype.itemsize, DATABASE_CHUNK_BYTES) if ocdbt else chunks


def _tree(
    flat: tree.Flat, types: Sequence[OrbaxType], chunks: Mapping[int, tuple[int, ...]], ocdbt: bool
) -> dict[str, Any]:
    # Nodes without content are no leaves to JAX, and are to Orbax.
    state = jax.tree_util.tree_unflatten(flat.treedef, list(range(len(flat.leaves))))
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_empty_or_leaf)
    entries = []
    for key_path, node in nodes:
        if type(node) is int:
            value = ValueMetadataEntry(types[node], types[node] == "None", chunks.get(node))
        else:
            value = ValueMetadataEntry(_EMPTY.get(type(node), "None"), skip_deserialize=True)
        entries.append(_entry(key_path, value))
    return tree_metadata.InternalTreeMetadata(
        tree_metadata_entries=entries,
        use_ocdbt=ocdbt,
        use_zarr3=True,
        # Whoever finds this, and no manifest, has a checkpoint that was not finished, not one of plain Orbax.
        custom_metadata={FOLDER: FORMAT},
        store_array_data_equal_to_fill_value=True,
        pytree_metadata_options=PYTREE_METADATA_OPTIONS,
    ).to_json()


def _entry(key_path: Sequence[Any], value: ValueMetadataEntry) -> tree_metadata.InternalTreeMetadataEntry:
    typed = tree.typed_key_path(key_path)
    keys = [
        tree_metadata.NestedKeyMetadataEntry(
            str(key), tree_metadata.KeyType.SEQUENCE if tag in ("s", "f") else tree_metadata.KeyType.DICT
        )
        for tag, key in typed
    ]
    name = str(tuple(str(key) for _, key in typed))
    return tree_metadata.InternalTreeMetadataEntry(name, tree_metadata.KeyMetadataEntry(keys), value)


def _shardings(specs: Sequence[LeafSpec], arrays: Mapping[int, jax.Array]) -> dict[str, str]:
    found = {}
    for number, array in arrays.items():
        described = sharding_metadata.from_jax_sharding(array.sharding)
        if described is not None:
            name = orbax_name(specs[number].key_path)
            found[base64.urlsafe_b64encode(name.encode()).decode()] = described.to_serialized_string()
    return found


def _array_metadatas(
    specs: Sequence[LeafSpec], arrays: Mapping[int, jax.Array], chunks: Mapping[int, tuple[int, ...]], ocdbt: bool
) -> str:
    described = []
    for number, array in arrays.items():
        spec = specs[number]
        key = {array_metadata.RANDOM_KEY_IMPL: spec.key_impl} if spec.kind == "key" else None
        described.append(
            array_metadata.ArrayMetadata(
                param_name=orbax_name(spec.key_path),
                shape=array.shape,
                dtype=np.dtype(array.dtype),
                write_shape=chunks[number],
                chunk_shape=chunks[number],
                use_ocdbt=ocdbt,
                use_zarr3=True,
                ext_metadata=key,
            )
        )
    return array_metadata_store.Serializer().serialize(described)
