"""The record of what belongs to a checkpoint on storage: written last, and all that a restore believes.

A checkpoint is complete if its manifest is there and every file that this names has the size and the digest that it
says. What else lies in the directory does not belong to it. A manifest comes from storage and so may be damaged or
forged: reading one bounds what it takes, and no path in it leaves the directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

import ray_jax_ckpt.values  # noqa: F401  (np.dtype knows bfloat16 and its like only then)
from ray_jax_ckpt.errors import CheckpointError, IntegrityError, NotSupportedError
from ray_jax_ckpt.model import metrics as metrics_
from ray_jax_ckpt.model.leaves import LeafSpec
from ray_jax_ckpt.model.shards import Box, Generation, whole
from ray_jax_ckpt.storage.grid import chunks_of, num_chunks

FORMAT = 1
FOLDER = "ray_jax_ckpt"
"""What Orbax has no place for is below this directory of a checkpoint."""
MANIFEST = f"{FOLDER}/manifest.json"
BLOCK_BYTES = 32 << 20
"""Files larger than this have a digest for each block of so many bytes, so that a part of one can be verified."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_FILES = 1_000_000
MAX_LEAVES = 1_000_000
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 1024, 255  # what S3 and Linux take

Form = Literal["chunks", "ocdbt", "raw", "value"]
Parsed = TypeVar("Parsed", bound=BaseModel)


def rank_file(rank: int) -> str:
    """Path of what belongs to one rank alone; `RankRecord`."""
    return f"{FOLDER}/rank_{rank}.json"


def rank_blob(rank: int) -> str:
    """Path of the bytes that a rank's record places in it."""
    return f"{FOLDER}/rank_{rank}.bin"


def raw_leaf(number: int) -> str:
    """Directory of a leaf that Orbax has no type for."""
    return f"{FOLDER}/leaf_{number}"


def check_path(path: str) -> str:
    """Returns the path of a file in a checkpoint as it is.

    Raises:
        ValueError: It could leave the directory, or is nothing that every filesystem takes.
    """
    names = path.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise ValueError(f"the path {path!r:.200} is not relative, or has empty names, . or ..")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in path):
        raise ValueError(f"the path {path!r:.200} has control characters")
    sizes = [len(name.encode("utf-8", "surrogatepass")) for name in names]
    if max(sizes) > _MAX_NAME_BYTES or sum(sizes) + len(sizes) > _MAX_PATH_BYTES:
        raise ValueError(f"the path {path!r:.200} is longer than {_MAX_PATH_BYTES} bytes, or a name in it is too long")
    return path


class _Record(BaseModel):
    """Frozen; fields of newer versions are passed over. NaN and infinities are strings in JSON, which lacks them."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class FileRecord(_Record):
    """A file of a checkpoint.

    Attributes:
        size: In bytes.
        digest: Of all of it, as `ray_jax_ckpt.digest` makes it.
        blocks: Digests of its blocks of `BLOCK_BYTES`, the last one shorter; None: it is not larger than one.
    """

    size: NonNegativeInt
    digest: str = Field(max_length=100)
    blocks: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _fits(self) -> FileRecord:
        if self.blocks is not None and len(self.blocks) != -(-self.size // BLOCK_BYTES):
            raise ValueError(f"{len(self.blocks)} block digests for {self.size} bytes")
        return self


class LeafRecord(_Record):
    """A leaf of the tree and where its content is.

    Attributes:
        spec: Its description, of `LeafSpec.to_json`.
        name: Directory of its array. "" is the checkpoint's own: of a state that is a single leaf, or of a key "".
        form: "chunks": zarr 3, uncompressed, a file per chunk of raw little-endian bytes in row-major order. "raw":
            such files without a zarr.json, for element types that zarr has no name for. "ocdbt": an array of this name
            in the OCDBT database of the directory. "value": `Manifest.values` has it; what Orbax reads is beside it.
        shape: Of the stored array: of a PRNG key with the dimensions of its data.
        dtype: Element type of the stored array, as `np.dtype` understands it once ml_dtypes is imported.
        chunks: Shape of the chunks: all are full. None for values.
        local: Each rank had one of its own: this is rank 0's, and that of each rank whose record has no other.
    """

    spec: dict[str, Any]
    name: str
    form: Form
    shape: tuple[NonNegativeInt, ...] = Field(default=(), max_length=64)
    dtype: str = Field(default="uint8", max_length=100)
    chunks: tuple[PositiveInt, ...] | None = None
    local: bool = False

    def path(self, key: str) -> str:
        """Path in the checkpoint of a file of its array, such as "zarr.json" or "c/0/1"."""
        return f"{self.name}/{key}" if self.name else key

    @property
    def itemsize(self) -> int:
        """Bytes per element of the stored array."""
        return np.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Of the stored array."""
        return self.itemsize * _volume(self.shape)

    @field_validator("spec")
    @classmethod
    def _is_spec(cls, spec: dict[str, Any]) -> dict[str, Any]:
        LeafSpec.from_json(spec)
        return spec

    @field_validator("dtype")
    @classmethod
    def _is_dtype(cls, name: str) -> str:
        try:
            dtype = np.dtype(name)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
            raise ValueError(f"{name} is no plain element type")
        return name

    @model_validator(mode="after")
    def _fits(self) -> LeafRecord:
        if self.name:
            check_path(self.name)
        if self.form != "value" and (self.chunks is None or len(self.chunks) != len(self.shape)):
            raise ValueError(f"a leaf of shape {self.shape} with chunks {self.chunks}")
        if self.form in ("chunks", "raw") and any(n % c for n, c in zip(self.shape, self.chunks or (), strict=True)):
            raise ValueError(f"chunks {self.chunks} do not divide the shape {self.shape}")
        return self


class Manifest(_Record):
    """See the module.

    Attributes:
        format: Version of this layout.
        run: Name of the run; "" for a checkpoint that was not made in one.
        attempt: With `restores` and `step`, the generation.
        restores: See `Generation`.
        step: The training step; None if the checkpoint has none.
        created_at_s: Unix time.
        world_size: Ranks of the group that made it. Each has a `rank_file`.
        structure: Digest of the tree and how it was sharded.
        metrics: Per rank. In JSON as `ray_jax_ckpt.model.metrics.encode` makes them.
        leaves: In tree order.
        skeleton: JSON of the tree's inner nodes; see `ray_jax_ckpt.arrays.skeleton`.
        values: Of leaves of the form "value", by their number in tree order, as `ray_jax_ckpt.values` encodes them.
        files: All files of the checkpoint but this one, by path.
    """

    format: int
    run: str = ""
    attempt: NonNegativeInt = 0
    restores: NonNegativeInt = 0
    step: NonNegativeInt | None = None
    created_at_s: float = 0.0
    world_size: PositiveInt = 1
    structure: str = ""
    metrics: dict[int, dict[str, Any]] = {}
    leaves: tuple[LeafRecord, ...] = Field(max_length=MAX_LEAVES)
    skeleton: str = "{}"
    values: dict[int, Any] = {}
    files: dict[str, FileRecord] = Field(max_length=MAX_FILES)

    @property
    def generation(self) -> Generation:
        """Which one it holds. One without a step counts as step 0."""
        return Generation(self.attempt, self.restores, self.step or 0)

    def to_bytes(self) -> bytes:
        """JSON.

        Raises:
            ValueError: It would be larger than what is read.
        """
        encoded = self.model_dump_json().encode()
        if len(encoded) > MAX_MANIFEST_BYTES:
            raise ValueError(f"the manifest has {len(encoded)} bytes, and {MAX_MANIFEST_BYTES} are read at most")
        return encoded

    @field_serializer("metrics", when_used="json")
    def _encoded(self, found: dict[int, dict[str, Any]]) -> Any:
        return metrics_.encode(found)

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        for path in self.files:
            check_path(path)
        if MANIFEST in self.files:
            raise ValueError("it names itself")
        if self.world_size > len(self.files):
            raise ValueError(f"{len(self.files)} files cannot hold those of {self.world_size} ranks")
        for rank in range(self.world_size):
            if rank_file(rank) not in self.files:
                raise ValueError(f"it names no {rank_file(rank)}")
        for number, leaf in enumerate(self.leaves):
            self._check_leaf(number, leaf)
        return self

    def _check_leaf(self, number: int, leaf: LeafRecord) -> None:
        """That there are files for all of it: so no array is larger than what lies on storage."""
        if leaf.form == "value":
            if number not in self.values:
                raise ValueError(f"it lacks the value of leaf {number} ({leaf.spec['path']})")
            return
        chunks = leaf.chunks or ()
        if leaf.form == "ocdbt" or not _volume(leaf.shape):
            return
        # Before they are looked at one by one: a forged shape has any number of them.
        if num_chunks(leaf.shape, chunks) > len(self.files):
            raise ValueError(f"leaf {number} ({leaf.spec['path']}) of shape {leaf.shape} has more chunks than files")
        size = leaf.itemsize * _volume(chunks)
        for key, _ in chunks_of(whole(leaf.shape), chunks):
            path = leaf.path(key)
            found = self.files.get(path)
            if found is None or found.size != size:
                raise ValueError(
                    f"leaf {number} ({leaf.spec['path']}) needs {path} with {size} bytes, and the manifest "
                    + (f"has it with {found.size}" if found else "does not name it")
                )


class RankItem(_Record):
    """A box of a leaf that is this rank's own and not rank 0's: `size` bytes at `offset` of the rank's blob."""

    leaf: NonNegativeInt
    box: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = Field(max_length=64)
    offset: NonNegativeInt
    size: NonNegativeInt
    digest: str = Field(max_length=100)

    @property
    def region(self) -> Box:
        """The box."""
        return self.box


class RankBlob(_Record):
    """A large content of `data`: `size` bytes at `offset` of the rank's blob."""

    offset: NonNegativeInt
    size: NonNegativeInt
    digest: str = Field(max_length=100)


class RankRecord(_Record):
    """What one rank had to itself.

    Attributes:
        rank: Whose.
        data: Its encoded `data`, or None if it gave none.
        blobs: Large contents that `data` refers to by position.
        values: Of local leaves, where they differ from the manifest's.
        specs: Descriptions of local leaves, where they differ from the manifest's.
        items: Boxes of local leaves whose content differs from the stored one. A leaf that is here is here whole.
    """

    rank: NonNegativeInt
    data: Any = None
    blobs: tuple[RankBlob, ...] = ()
    values: dict[int, Any] = {}
    specs: dict[int, dict[str, Any]] = {}
    items: tuple[RankItem, ...] = ()

    def to_bytes(self) -> bytes:
        """JSON."""
        return self.model_dump_json().encode()


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Reads a manifest.

    Args:
        raw: Its bytes.
        where: Path for messages.

    Raises:
        IntegrityError: It is damaged, or says what cannot be.
        NotSupportedError: A newer version of this package wrote it.
    """
    tree = parse_object(raw, where)
    version = tree.get("format")
    if type(version) is int and version > FORMAT:
        raise NotSupportedError(
            f"{where} has format {version}, and this version of ray_jax_ckpt reads up to {FORMAT}. Install a newer one."
        )
    if type(version) is not int or version != FORMAT:
        raise IntegrityError(f"{where} is not the manifest of a checkpoint: its format is {version!r:.50}.")
    try:
        tree = {**tree, "metrics": metrics_.decode(tree.get("metrics", {}))}
    except RecursionError:
        raise IntegrityError(f"{where} is damaged: it is nested too deeply.") from None
    return _parse(Manifest, tree, where)


def parse_rank(raw: bytes, where: str) -> RankRecord:
    """Reads what one rank had to itself. Raises IntegrityError if it is damaged."""
    return _parse(RankRecord, parse_object(raw, where), where)


def parse_object(
    raw: bytes, where: str, *, most_bytes: int = MAX_MANIFEST_BYTES, error: type[CheckpointError] = IntegrityError
) -> dict[str, Any]:
    """A JSON object that comes from storage. Raises `error` if it is none, or too large."""
    if len(raw) > most_bytes:
        raise error(f"{where} has {len(raw)} bytes, and {most_bytes} are read at most.")
    try:
        # Nesting is bounded by the interpreter's limit on recursion.
        tree = json.loads(raw)
    except (ValueError, RecursionError) as found:
        raise error(f"{where} is damaged: {type(found).__name__}: {found}.") from None
    if not isinstance(tree, dict):
        raise error(f"{where} is damaged: it is no JSON object.")
    return tree


def _parse(model: type[Parsed], tree: Mapping[str, Any], where: str) -> Parsed:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"])) or "the whole"
        raise IntegrityError(f"{where} is damaged, at {at:.200}: {first['msg']}.") from None
    except RecursionError:
        raise IntegrityError(f"{where} is damaged: it is nested too deeply.") from None


def _volume(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
