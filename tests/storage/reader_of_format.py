"""A reader of checkpoints whose arrays are files, written from FORMAT.md: numpy and the standard library only."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

OURS = "ray_jax_ckpt"


def read(path: Path, rank: int = 0) -> dict[tuple[Any, ...], Any]:
    """What a rank had, by the keys on the path of each leaf. Of a PRNG key its data."""
    manifest = json.loads((path / OURS / "manifest.json").read_text())
    assert manifest["format"] == 1
    for name, record in manifest["files"].items():
        assert (path / name).stat().st_size == record["size"], name
    own = json.loads((path / OURS / f"rank_{rank}.json").read_text())
    values = {**manifest["values"], **own["values"]}
    found = {}
    for number, leaf in enumerate(manifest["leaves"]):
        keys = tuple(key for _, key in leaf["spec"]["key_path"])
        items = [item for item in own["items"] if item["leaf"] == number]
        if leaf["form"] == "value":
            found[keys] = decode(values[str(number)])
        else:
            found[keys] = own_array(path, rank, leaf, items) if items else array(path, leaf)
    return found


def array(path: Path, leaf: dict[str, Any]) -> np.ndarray:
    assert leaf["form"] in ("chunks", "raw")
    result = np.empty(leaf["shape"], np.dtype(leaf["dtype"]))
    chunks = leaf["chunks"]
    for place in itertools.product(*(range(n // c) for n, c in zip(leaf["shape"], chunks, strict=True))):
        file = path / leaf["name"] / "/".join(["c", *map(str, place)])
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunks, strict=True))
        result[box] = np.frombuffer(file.read_bytes(), result.dtype).reshape(chunks)
    return result


def own_array(path: Path, rank: int, leaf: dict[str, Any], items: list[dict[str, Any]]) -> np.ndarray:
    content = (path / OURS / f"rank_{rank}.bin").read_bytes()
    dtype = np.dtype(leaf["dtype"])
    result = np.empty([max(item["box"][axis][1] for item in items) for axis in range(len(items[0]["box"]))], dtype)
    for item in items:
        box = tuple(slice(*side) for side in item["box"])
        piece = content[item["offset"] : item["offset"] + item["size"]]
        result[box] = np.frombuffer(piece, dtype).reshape(result[box].shape)
    return result


def decode(j: Any) -> Any:
    if isinstance(j, list):
        return [decode(one) for one in j]
    if not isinstance(j, dict):
        return j
    if "$" not in j:
        return {key: decode(one) for key, one in j.items()}
    if j["$"] == "np":
        flat = np.frombuffer(base64.b64decode(j["v"]), np.dtype(j["d"]))
        return flat.reshape(j["s"]) if "s" in j else flat[0]
    return DECODERS[j["$"]](j["v"])


DECODERS = {
    "int": lambda v: int(v, 16),
    "float": lambda v: struct.unpack("<d", bytes.fromhex(v))[0],
    "complex": lambda v: complex(*struct.unpack("<dd", bytes.fromhex(v))),
    "str": lambda v: base64.b64decode(v).decode("utf-8", "surrogatepass"),
    "bytes": lambda v: base64.b64decode(v),
    "tuple": lambda v: tuple(map(decode, v)),
    "dict": lambda v: {decode(key): decode(one) for key, one in v},
    "np.str": lambda v: np.str_(decode(v)),
    "np.bytes": lambda v: np.bytes_(base64.b64decode(v)),
}
