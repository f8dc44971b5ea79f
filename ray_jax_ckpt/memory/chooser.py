"""Chooses what a new worker group restores, of memory, storage and what the user named, and says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import pyarrow.fs

from ray_jax_ckpt.config import SnapshotConfig
from ray_jax_ckpt.errors import CheckpointError, NoCheckpointError
from ray_jax_ckpt.memory.fleet import was_restarted
from ray_jax_ckpt.memory.history import History
from ray_jax_ckpt.memory.ledger import Ledger
from ray_jax_ckpt.memory.messages import Located, RunIdentity, StoredPlace
from ray_jax_ckpt.memory.stored import Stored
from ray_jax_ckpt.model import choice
from ray_jax_ckpt.model.choice import Announcement, Resume, Tier, Trial
from ray_jax_ckpt.model.shards import Generation
from ray_jax_ckpt.storage.filesystem import describe, reading, resolve
from ray_jax_ckpt.storage.reader import lacking, read_manifest
from ray_jax_ckpt.storage.runs import FOLDER

logger = logging.getLogger(__name__)

# Longer is not worth it where memory has something.
LOOK_S = 10.0
MAX_BEGUN = 64


@dataclass(frozen=True)
class Choice:
    """What is restored. See `Decision`."""

    located: Located | None = None
    stored: StoredPlace | None = None
    ray_counts: bool = True
    needed: str = ""

    @property
    def generation(self) -> Generation | None:
        """Which; None: nothing."""
        found = self.located or self.stored
        return None if found is None else found.generation


class Chooser:
    """For use in the coordinator's event loop.

    Attributes:
        trials: What became of the attempts. Those of earlier drivers do not count: a new one may have other code. Nor
            do those before this coordinator was killed.
        history: What earlier drivers have left word of.
    """

    def __init__(
        self,
        run: RunIdentity,
        config: SnapshotConfig,
        resume: Resume,
        ledger: Ledger,
        stored: Stored,
        record: Callable[..., None],
    ) -> None:
        self._run, self._config, self._resume, self._record = run, config, resume, record
        self._ledger, self._stored, self.history = ledger, stored, History(run, ledger.roster.driver)
        self.trials: tuple[Trial, ...] = ()
        self._chosen: Generation | None = None
        self._begun: dict[Generation, float] = {}
        self._preempted = self._reported = False

    # What happens to an attempt.

    def begun(self, generation: Generation) -> None:
        """A rank snapshots it."""
        if generation not in self._begun:
            kept = sorted(self._begun)[-MAX_BEGUN + 1 :]
            self._begun = {one: self._begun[one] for one in kept} | {generation: time.time()}

    def note(self) -> None:
        """Something may have become complete. What earlier attempts have left says nothing of this one."""
        newest, trial = self._ledger.books.newest(), self._trial()
        if trial is None or newest is None or newest.attempt != trial.attempt:
            return
        if trial.newest is None or newest > trial.newest:
            self._keep(replace(trial, newest=newest))

    def confirmed(self) -> None:
        """All ranks have restored what was chosen."""
        trial = self._trial()
        if trial is not None and trial.restored is None:
            self._keep(replace(trial, restored=self._chosen))

    def failed(self, crash: Collection[str]) -> None:
        """The group has failed, with these kinds of errors, and by itself unless nodes were to be taken away."""
        trial = self._trial()
        if trial is not None and not self._preempted:
            self._keep(replace(trial, crash=frozenset(crash)))

    def preempted(self) -> None:
        """Nodes of the group are going to be taken away."""
        self._preempted = True

    def reported(self, path: str) -> None:
        """Ray has registered a checkpoint."""
        self._reported = True
        self._stored.reports.told_of(path)

    def _trial(self) -> Trial | None:
        return self.trials[-1] if self.trials else None

    def _keep(self, trial: Trial) -> None:
        self.trials = choice.remembered(self.trials, trial)

    # The next one.

    async def look(self) -> None:
        """Looks at storage, for a bounded time."""
        timeout_s = self._config.timeout_s
        reports = self._stored.reports.look(min(timeout_s, LOOK_S))
        await asyncio.gather(self.history.load(), self._stored.look_back(timeout_s), reports)

    @property
    def latest_attempt(self) -> int:
        """The highest that storage knows of, when it was last looked at."""
        return max(self._stored.latest_attempt, self.history.latest_attempt)

    async def choose(self, attempt: int) -> Choice:
        """The newest of memory and storage, verified; but not what two attempts have crashed with.

        Raises:
            RestoreError: What there is cannot be read, and to start afresh would be to lose the run.
        """
        if self._resume.mode == "never" and not self._ledger.first_attempt:
            self._start_anew(attempt)
        if self._ledger.first_attempt:
            self._stored.set_aside(self._ledger.first_attempt)
        avoided = self._avoided()
        begun = {*self._begun, *self._ledger.books.entries}
        located = await self._ledger.choose(attempt, avoided)
        in_memory = located.generation if located is not None else None
        stored = await self._stored.newest(in_memory, self._config.timeout_s, avoided)
        ray_counts = self._resume.mode != "never" or self._reported or self.history.has_reported
        found = Choice(None if stored is not None else located, stored, ray_counts)
        if found.generation is None:
            found = await self._nothing(found)
        elif self._resume.place is not None and not self._begun:
            logger.warning("%s", _unused(self._resume))
        self._say(attempt, found, begun)
        if not self.trials:
            self._say_first(found)
        # Of what the user named there is no older one to go back to.
        is_own = stored is not None or located is not None
        self._chosen, self._preempted = found.generation if is_own else None, False
        self._keep(Trial(attempt, newest=found.generation))
        return found

    def _start_anew(self, attempt: int) -> None:
        """Only what is of this driver counts from now on; a coordinator that was killed may have said so before."""
        if not self.history.first_attempt:
            # While storage has not said which attempts there were, theirs might count as this driver's own later.
            self._stored.require_listed()
        self._ledger.first_attempt = self.history.first_attempt or attempt

    def _avoided(self) -> dict[Generation, choice.Crashes]:
        avoided = choice.crashing(self.trials)
        for generation, crashes in avoided.items():
            logger.warning(
                "Attempts %s restored step %d (generation %s) and failed in the same way (%s) before anything newer "
                "was complete: an older one is restored, if there is one.",
                " and ".join(map(str, crashes.attempts)),
                generation.step,
                generation,
                crashes.kind,
            )
        return avoided

    async def _nothing(self, found: Choice) -> Choice:
        """There is nothing of the run itself."""
        looked = f"memory ({len(self._ledger.roster.handles)} stores of this run live), {self._run.path}/{FOLDER}, and "
        needed = (
            f"resume='must', and there is nothing to restore. Looked for: {looked}what was reported through Ray. Check "
            "that name= and storage_path= of RunConfig are those of the run to go on with; for a new run say "
            "resume='auto'."
        )
        if self._resume.place is not None:
            try:
                work = asyncio.to_thread(_given, self._resume.place)
                return replace(found, stored=await asyncio.wait_for(work, self._config.timeout_s))
            except (CheckpointError, TimeoutError) as error:
                said = str(error) or f"storage did not show it within {self._config.timeout_s:g} s"
                return replace(found, needed=f"resume_from={self._resume.place!r}: {said}")
        return replace(found, needed=needed if self._resume.mode == "must" else "")

    def _say_first(self, found: Choice) -> None:
        """What only the first attempt of a driver has to say. A coordinator that was killed has said it before."""
        if was_restarted():
            return
        self.history.warn_of_rival()
        generation = found.generation
        if generation is not None and generation.attempt and self.history.warn_of_end(generation.step):
            self._record("resumed_after_end", step=generation.step)

    def _say(self, attempt: int, found: Choice, begun: set[Generation]) -> None:
        generation, stored = found.generation, found.stored
        tier = stored.tier if stored is not None else Tier.MEMORY if generation is not None else None
        made_at_s = stored.created_at_s if stored is not None else self._begun.get(generation) if generation else None
        age_s = max(0.0, time.time() - made_at_s) if made_at_s else None
        lost = choice.steps_lost(generation, begun) if generation is not None and tier is not Tier.GIVEN else None
        place = describe(stored.filesystem, stored.path) if stored is not None else ""
        said = self._run.name, attempt, generation, tier, place, age_s, lost, self._resume.mode, found.needed
        logger.log(logging.ERROR if found.needed else logging.INFO, "%s", Announcement(*said))
        self._record(
            "decision",
            attempt=attempt,
            first_attempt=self._ledger.first_attempt,
            step=generation.step if generation else None,
            generation=str(generation) if generation else None,
            path=stored.path if stored else None,
            tier=tier,
            age_s=None if age_s is None else round(age_s, 3),
            steps_lost=lost,
        )


def _unused(resume: Resume) -> str:
    return (
        f"resume_from={resume.place!r} is not used: this run has something of its own to go on from. To begin with "
        "what resume_from names all the same, set resume='never' too, or use another name for the run."
    )


def _given(place: object) -> StoredPlace:
    """What the user named; of another run, or of none.

    Raises:
        NoCheckpointError, IntegrityError, StorageError, RestoreTimeoutError, ConfigError: It cannot be restored.
    """
    filesystem, path = resolve(place)
    try:
        manifest = read_manifest(filesystem, path)
    except NoCheckpointError:
        with reading(f"Looking for {describe(filesystem, path)}"):
            kind = filesystem.get_file_info(path).type
        if kind is not pyarrow.fs.FileType.Directory:
            raise NoCheckpointError(f"there is no directory {describe(filesystem, path)}.") from None
        # Of plain Orbax, or a directory of several: the ranks find out.
        return StoredPlace(Generation(0, 0, 0), path, filesystem, Tier.GIVEN)
    missing = lacking(filesystem, path, manifest)
    if missing:
        raise NoCheckpointError(f"{len(missing)} of its files are not as they were written: {', '.join(missing[:3])}.")
    return StoredPlace(Generation(0, 0, manifest.step or 0), path, filesystem, Tier.GIVEN, manifest.created_at_s)
