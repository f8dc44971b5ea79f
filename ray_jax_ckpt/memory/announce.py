"""Announced snapshots between the coordinator and the ranks' processes: see `model.announce` for the rules."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from ray_jax_ckpt.errors import StaleAttemptError
from ray_jax_ckpt.model import announce
from ray_jax_ckpt.model.announce import Call, Named, Pledge, Position, Verdict

logger = logging.getLogger(__name__)

# Ranks answer from a thread of their own, in milliseconds. One that does not within this is busy dying.
CALL_TIMEOUT_S = 2.0
# A rank waits at its ceiling for longer than a call can take, and for no longer.
HOLD_TIMEOUT_S = 5.0
LISTEN_S = 60.0
RETRY_S = 1.0
# A coordinator that is started again looks dead for a moment; one that looks so this often in a row is.
MAX_DEATHS = 10


@dataclass(frozen=True)
class Word:
    """What ranks are told: a call has begun (`over` False), or ended, with what was named."""

    ballot: int
    over: bool = False
    named: Named | None = None


@dataclass(frozen=True)
class Ear:
    """What a rank says when it asks for words.

    Attributes:
        attempt: The group's.
        rank: Who.
        source: Whose words it has heard; "" for nobody's yet.
        heard: How many of these.
        pledge: Its answer to a call: ballot and ceiling.
        named: The last announcement that it has heard of, from whomever.
    """

    attempt: int
    rank: int
    source: str = ""
    heard: int = 0
    pledge: tuple[int, Position] | None = None
    named: Named | None = None


class Announcer:
    """The coordinator's side, for use in one event loop."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._attempt = 0
        self._words: list[Word] = []
        self._call: Call | None = None
        self._changed = asyncio.Condition()

    async def begin(self, attempt: int) -> None:
        """A new group: nothing is announced to it yet, and the old one's ranks are told that they are."""
        async with self._changed:
            self._attempt, self._words, self._call = attempt, [], None
            self._changed.notify_all()

    async def listen(self, ear: Ear) -> tuple[str, int, tuple[Word, ...]]:
        """Takes a rank's answer and waits for words that are new to it, at most `LISTEN_S`.

        Returns:
            Who speaks, how many words that makes, and the new ones, in order.

        Raises:
            StaleAttemptError: A newer attempt has started.
        """
        async with self._changed:
            self._attempt = max(self._attempt, ear.attempt)
            self._learn(ear)
            heard = ear.heard if ear.source == self._id else 0
            with_news = self._changed.wait_for(lambda: len(self._words) > heard or self._attempt != ear.attempt)
            try:
                await asyncio.wait_for(with_news, LISTEN_S)
            except TimeoutError:
                return self._id, heard, ()
            if self._attempt != ear.attempt:
                raise StaleAttemptError(f"Attempt {ear.attempt} has been replaced by {self._attempt}.")
            return self._id, len(self._words), tuple(self._words[heard:])

    def _learn(self, ear: Ear) -> None:
        if ear.attempt != self._attempt:
            return
        if self._call is not None and ear.pledge is not None:
            self._call = announce.pledged(self._call, ear.pledge[0], ear.rank, ear.pledge[1])
            self._changed.notify_all()
        known = {word.ballot for word in self._words}
        if ear.named is not None and ear.source != self._id and ear.named.ballot not in known:
            # A coordinator that was killed had told some ranks, and perhaps not all.
            self._words.append(Word(ear.named.ballot, True, ear.named))
            self._changed.notify_all()

    async def announce(self, attempt: int, ranks: frozenset[int], leaving: frozenset[int]) -> Named | None:
        """Names a snapshot for all these ranks; None, after a bounded time, if one of them does not answer."""
        async with self._changed:
            if attempt != self._attempt or self._call is not None:
                return None
            # Grows from call to call, also when the coordinator is started again.
            ballot = max(time.time_ns(), 1 + max((word.ballot for word in self._words), default=0))
            self._call = Call(ballot, ranks, leaving)
            self._tell(Word(ballot))
            try:
                done = self._changed.wait_for(lambda: self._call is None or self._call.outcome() is not None)
                await asyncio.wait_for(done, CALL_TIMEOUT_S)
            except TimeoutError:
                logger.warning(
                    "Ranks %s did not say at which step they are.", self._call.silent() if self._call else ""
                )
            call, self._call = self._call, None
            if call is None or attempt != self._attempt:
                return None
            named = call.outcome()
            self._tell(Word(ballot, True, named))
            return named

    def _tell(self, word: Word) -> None:
        self._words.append(word)
        self._changed.notify_all()


class Listener:
    """A rank's side: hears what is announced in a daemon thread, and says at each step whether it is that one.

    Args:
        coordinator: Whose words these are.
        attempt: The group's.
        rank: Whose side.
        leaving: Ranks that are leaving from the start.
        missed: Told of the position of an announced snapshot that the others take and this rank did not.
    """

    def __init__(
        self,
        coordinator: ActorHandle,
        attempt: int,
        rank: int,
        leaving: frozenset[int],
        missed: Callable[[Position], None],
    ) -> None:
        self._coordinator, self._ear, self._missed = coordinator, Ear(attempt, rank), missed
        self._pledge = Pledge(leaving=leaving)
        self._changed = threading.Condition()
        self._pace: float | None = None
        self._last: tuple[Position, float] | None = None
        threading.Thread(target=self._run, name="rjc-announcements", daemon=True).start()

    @property
    def leaving(self) -> frozenset[int]:
        """Ranks that get no copies of a snapshot at the position that was gone through last."""
        return self._pledge.leaving

    def arrive(self, position: Position) -> bool:
        """Whether the announced snapshot is due here. The training thread asks at every step.

        It waits, bounded, only if a call has not ended within the half second or so that this rank had left.
        """
        deadline = None
        with self._changed:
            self._keep_pace(position)
            while True:
                self._pledge, verdict = announce.arrive(self._pledge, position)
                if verdict is not Verdict.HOLD:
                    return verdict is Verdict.DUE
                deadline = deadline or time.monotonic() + HOLD_TIMEOUT_S
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    self._pledge = announce.go_alone(self._pledge)

    def _keep_pace(self, position: Position) -> None:
        now = time.monotonic()
        if self._last is not None and self._last[0][0] == position[0] and position > self._last[0]:
            took = (now - self._last[1]) / (position[1] - self._last[0][1])
            self._pace = took if self._pace is None else (self._pace + took) / 2
        if self._last is None or position != self._last[0]:
            self._last = position, now

    def _run(self) -> None:
        ear, deaths = self._ear, 0
        while ray.is_initialized():
            try:
                # Asked anew here, not by Ray: its retries would outlive the coordinator's end.
                answer: Any = ray.get(self._coordinator.listen.options(max_task_retries=0).remote(ear))
                (source, heard, words), deaths = answer, 0
            except SystemExit:
                # This process lets go of Ray.
                return
            except Exception as error:
                deaths += isinstance(error, ActorDiedError)
                # Nobody will end the call that this rank may be waiting for.
                with self._changed:
                    self._pledge = announce.go_alone(self._pledge)
                    self._changed.notify_all()
                if _is_final(error) or deaths >= MAX_DEATHS:
                    return
                logger.debug("The run's coordinator did not say what is announced: %r", error)
                time.sleep(RETRY_S)
                continue
            pledge, named = None, ear.named
            for word in words:
                pledge = self._hear(word) or pledge
                named = word.named or named
            ear = Ear(ear.attempt, ear.rank, source, heard, pledge, named)

    def _hear(self, word: Word) -> tuple[int, Position] | None:
        missed = None
        with self._changed:
            if word.over:
                self._pledge, missed = announce.over(self._pledge, word.ballot, word.named)
            else:
                self._pledge = announce.called(self._pledge, word.ballot, announce.margin(self._pace))
            ceiling = self._pledge.ceiling
            self._changed.notify_all()
        if missed is not None:
            self._missed(missed)
        return None if word.over or ceiling is None or self._pledge.ballot != word.ballot else (word.ballot, ceiling)


def _is_final(error: Exception) -> bool:
    """Whether there is nothing to listen to any more: the run is over, or this attempt."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, StaleAttemptError)
    return not isinstance(error, RayError)
