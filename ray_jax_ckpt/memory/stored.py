"""A run's checkpoints on storage, as its coordinator knows them: what is there, and which one would be restored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pyarrow.fs

from ray_jax_ckpt.errors import CheckpointError, NoCheckpointError, RestoreError, RestoreTimeoutError, StorageError
from ray_jax_ckpt.memory.messages import RunIdentity, StoredPlace
from ray_jax_ckpt.memory.reports import Reports
from ray_jax_ckpt.model.choice import Tier, rank
from ray_jax_ckpt.model.persistence import Persisted
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.reader import inspect, read_manifest
from ray_jax_ckpt.storage.runs import checkpoint_path, directories, is_named_here, is_temporary
from ray_jax_ckpt.storage.streams import ASK_S, Deadline, ask

logger = logging.getLogger(__name__)

MAX_LATE = 2


@dataclass
class _Listing:
    """What lies in a run's directory of checkpoints.

    Attributes:
        found: With a manifest.
        unfinished: Directories without.
        unread: Directories of which storage does not say whether they have one, and why.
    """

    found: list[Persisted] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)


class Stored:
    """For use in one event loop. Storage is only ever waited for by those who say how long.

    Attributes:
        known: By generation; what the stores wrote.
        reports: What was reported through Ray.
        bad: Paths that somebody could not restore, and why: not offered again.
        unfinished: Directories that earlier drivers have left and that are no checkpoints.
    """

    def __init__(self, run: RunIdentity) -> None:
        self._run = run
        self._looking: asyncio.Task[None] | None = None
        self._problem = "it has not been listed yet"
        self._first_attempt = self._latest_aside = 0
        self.known: dict[Generation, Persisted] = {}
        self.reports = Reports(run)
        self.bad: dict[str, str] = {}
        self.unfinished: set[str] = set()

    def new_path(self, generation: Generation) -> str:
        """Directory for a try to write a generation's checkpoint."""
        return checkpoint_path(self._run.path, generation)

    @property
    def latest_attempt(self) -> int:
        """The highest that left something; 0 if none did."""
        attempts = (one.attempt for one in (*self.known, *self.reports.found))
        return max([self._latest_aside, *attempts])

    def set_aside(self, first_attempt: int) -> None:
        """What is of attempts before this one is not offered, nor counted, nor removed: it stays where it is."""
        self._latest_aside = max(self._latest_aside, self.latest_attempt)
        self._first_attempt = first_attempt
        self.known = {generation: one for generation, one in self.known.items() if self._counts(generation)}

    def require_listed(self) -> None:
        """Raises RestoreError if there may be more on storage than is known."""
        if self._run.filesystem is not None and self._unread:
            raise _unreadable(self._unread)

    @property
    def _unread(self) -> str:
        return "; ".join(filter(None, [self._problem, self.reports.problem]))

    def _counts(self, generation: Generation) -> bool:
        return generation.attempt >= self._first_attempt

    def suspect(self, path: str, said: str) -> None:
        """Somebody could not restore what lies there: it is not offered again."""
        self.bad[path] = said
        logger.warning("The checkpoint %s could not be restored and is passed over from now on: %s", path, said)
        for generation in [one.generation for one in self.known.values() if one.path == path]:
            del self.known[generation]

    async def look_back(self, timeout_s: float) -> None:
        """Waits until it is known what earlier drivers of this run have left, at most so long. Never raises.

        What could not be read is looked at again.
        """
        if self._run.filesystem is None or not self._problem:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look(self._run.filesystem))
        done, _ = await asyncio.wait([self._looking], timeout=timeout_s)
        if not done:
            logger.warning("Storage did not say within %g s which checkpoints of this run are there.", timeout_s)
            # A call that hangs may never return where another one would. If it is only late, it counts all the same.
            self._looking = None

    async def _look(self, filesystem: pyarrow.fs.FileSystem) -> None:
        try:
            listing = await asyncio.to_thread(_listed, filesystem, self._run.path)
        except Exception as error:
            # Filesystems of users raise what they like.
            self._problem = f"{type(error).__name__}: {error}"
            logger.warning("The run's checkpoints on storage could not be listed: %s", self._problem)
            return
        self._problem = "; ".join(f"{path}: {why}" for path, why in listing.unread.items())
        found = {one.generation: one for one in listing.found if one.path not in self.bad}
        self.known = {generation: one for generation, one in found.items() if self._counts(generation)} | self.known
        self.unfinished = listing.unfinished

    async def newest(
        self, in_memory: Generation | None, timeout_s: float, avoided: Collection[Generation] = ()
    ) -> StoredPlace | None:
        """The newest checkpoint that is whole, as far as a listing tells, and better than what memory has.

        Digests are compared while it is read; see `suspect`. Waits for storage at most `timeout_s` for each, and for
        no more when `MAX_LATE` of them have not been shown by then: storage hangs, and there may be thousands.

        Args:
            in_memory: What memory has.
            timeout_s: For each.
            avoided: These count less than all others, however new they are.

        Raises:
            RestoreError: There is nothing to restore, in memory or on storage, as far as this could be read; but there
                may be something that could not be, or there was something that is broken. To start afresh then would
                be to lose the run.
        """
        filesystem = self._run.filesystem
        if filesystem is None:
            return None
        unread, num_late, broken = self._unread, 0, dict[str, str]()
        found = None
        for generation, tier, path in self._offers(avoided):
            if in_memory is not None and rank(generation, avoided) <= rank(in_memory, avoided):
                break
            if num_late >= MAX_LATE:
                logger.warning("The checkpoint %s and older ones are not looked at: storage is too slow.", path)
                break
            look = asyncio.to_thread(_look_at, filesystem, path)
            try:
                problem, created_at_s = await asyncio.wait_for(look, timeout_s)
            except (TimeoutError, StorageError, RestoreTimeoutError) as error:
                # It may be whole: not for good.
                num_late += not isinstance(error, StorageError)
                unread = f"{path}: {error or f'storage did not show it within {timeout_s:g} s'}"
                logger.warning("The checkpoint %s is passed over this time, since it cannot be read: %s", path, error)
                continue
            if not problem:
                found = StoredPlace(generation, path, filesystem, tier, created_at_s)
                break
            # What Ray copies may be whole the next time, and has never been whole if it was interrupted.
            if tier is Tier.STORAGE:
                broken[path] = problem
        if in_memory is None and found is None:
            self._require_none(unread, broken)
        for path, problem in broken.items():
            self.suspect(path, problem)
        return found

    def _require_none(self, unread: str, broken: Mapping[str, str]) -> None:
        """Nothing was found: it must be certain that there is nothing."""
        if unread:
            raise _unreadable(unread)
        own = {path: said for path, said in self.bad.items() if path.startswith(f"{self._run.path}/")}
        if lost := own | dict(broken):
            raise _broken(lost)

    def _offers(self, avoided: Collection[Generation]) -> list[tuple[Generation, Tier, str]]:
        """What there is to restore, best first. Of the same generation what the stores wrote comes first."""
        ours = [(generation, Tier.STORAGE, one.path) for generation, one in self.known.items()]
        reported = [(generation, Tier.RAY, path) for generation, path in self.reports.found.items()]
        counting = [one for one in reported if self._counts(one[0]) and one[2] not in self.bad]
        return sorted([*ours, *counting], key=lambda one: (rank(one[0], avoided), one[1] is Tier.STORAGE), reverse=True)


def _unreadable(unread: str) -> RestoreError:
    return RestoreError(
        f"What this run has on storage cannot be read ({unread:.1000}), and memory holds nothing. Failing this "
        "attempt instead of starting from the beginning. If there is nothing to go on from, use another name= "
        "for the run, or remove what cannot be read."
    )


def _broken(lost: Mapping[str, str]) -> RestoreError:
    said = "; ".join(f"{path}: {problem}" for path, problem in lost.items())
    return RestoreError(
        f"Nothing of what this run has on storage can be restored ({said:.1000}), and memory holds nothing. Failing "
        "this attempt instead of starting from the beginning. Bring back what is missing; or, to start from the "
        "beginning, say CheckpointManager(resume='never'), or use another name= for the run."
    )


def _listed(filesystem: pyarrow.fs.FileSystem, run_path: str) -> _Listing:
    listing, deadline = _Listing(), Deadline.after(ASK_S)
    for path in ask(lambda: directories(filesystem, run_path), f"Listing the checkpoints of {run_path}", deadline):
        ours = {path} if is_named_here(path) else set[str]()
        if is_temporary(path):
            listing.unfinished |= ours
            continue
        try:
            manifest = read_manifest(filesystem, path, deadline.again())
            listing.found.append(Persisted(manifest.generation, manifest.metrics.get(0, {}), path))
        except NoCheckpointError:
            listing.unfinished |= ours
        except (StorageError, RestoreTimeoutError) as error:
            listing.unread[path] = str(error)
        except CheckpointError as error:
            logger.warning("Passed over the checkpoint %s: %s", path, error)
    return listing


def _look_at(filesystem: pyarrow.fs.FileSystem, path: str) -> tuple[str, float]:
    """Why a checkpoint cannot be restored, "" if it seems to be whole; and when it was made.

    Raises StorageError, RestoreTimeoutError.
    """
    problem, manifest = inspect(filesystem, path)
    return problem, 0.0 if manifest is None else manifest.created_at_s
