"""One call to a store: its deadline, its proof of the secret, what its errors say, and the threads that carry it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from ray_jax_ckpt.errors import AuthenticationError, CheckpointError, StoreError
from ray_jax_ckpt.memory import wire
from ray_jax_ckpt.memory.stream import Guard

_GRACE_S = 0.5

_T = TypeVar("_T")


class Call:
    """One call, of one stream or of several that stand or fall together.

    Args:
        address: Of the store.
        secret: The run's.
        timeout_s: Bound of the whole call.
        timeout_error: What it raises when that is over.
        what: It does, for its errors.
    """

    def __init__(
        self, address: str, secret: str, timeout_s: float, timeout_error: type[CheckpointError], what: str
    ) -> None:
        self.address = address
        self.nonce = secrets.token_hex(16)
        self._secret = secret
        self._timeout_s = timeout_s
        self._timeout_error = timeout_error
        self._what = what
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._readers: list[Any] = []
        self._given_up = False

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Until its deadline; never nothing, which would mean no bound."""
        return max(0.001, self._timeout_s - self.elapsed_s)

    def options(self) -> fl.FlightCallOptions:
        """For each of its streams."""
        # gRPC tells the server the deadline too, which frees its buffer when this process is stopped.
        token = wire.call_token(self._secret, self.address)
        return fl.FlightCallOptions(timeout=self.left_s, headers=[(wire.AUTH_HEADER.encode(), token.encode())])

    def check_proof(self, answer: pa.Buffer | None) -> None:
        """Raises AuthenticationError unless the store's first word proves that it knows the secret."""
        proof = b"" if answer is None else answer.to_pybytes()
        if not wire.same(wire.server_proof(self._secret, self.address, self.nonce), proof.decode(errors="replace")):
            raise AuthenticationError("who answers there does not know the run's secret")

    def opened(self, reader: Any) -> None:
        """A stream that ends with the call. Raises StoreError if that is over."""
        with self._lock:
            self._readers.append(reader)
            given_up = self._given_up
        if given_up:
            reader.cancel()
            raise StoreError("the transfer was given up")

    def run(self, works: Sequence[Callable[[Guard], _T]]) -> list[_T]:
        """Runs each of `works` in a thread of its own, and gives all up soon after the deadline, or when one fails.

        gRPC ends a write whose deadline has passed only when TCP has taken its bytes. When the receiver is stopped that
        is never, so the thread stays behind until the receiver goes on or dies. Its closed guard keeps it off the
        caller's memory.
        """
        running = [(Guard(), Future[_T]()) for _ in works]
        for work, (guard, outcome) in zip(works, running, strict=True):
            threading.Thread(target=_settle, args=(outcome, work, guard), name="rjc-transfer", daemon=True).start()
        outcomes = [outcome for _, outcome in running]
        try:
            done, _ = wait(outcomes, self.left_s + _GRACE_S, FIRST_EXCEPTION)
            for outcome in outcomes:
                if outcome in done:
                    outcome.result()
            return [outcome.result(0) for outcome in outcomes]
        except BaseException:
            self._cancel()
            raise
        finally:
            for guard, _ in running:
                guard.close()

    def _cancel(self) -> None:
        with self._lock:
            self._given_up = True
            readers = list(self._readers)
        for reader in readers:
            reader.cancel()

    def translate(self, error: Exception) -> CheckpointError:
        """The error as one of this package's, with the call's circumstances."""
        where = f"{self._what}, store {self.address}, after {self.elapsed_s:.1f} s: "
        if isinstance(error, CheckpointError):
            return type(error)(where + str(error))
        if isinstance(error, fl.FlightUnauthenticatedError):
            return AuthenticationError(where + "the store does not accept this run's secret")
        if isinstance(error, fl.FlightTimedOutError) or self.elapsed_s >= self._timeout_s:
            limit = (
                f"no end within timeout_s={self._timeout_s:g}: raise SnapshotConfig.timeout_s if the network is slow"
            )
            return self._timeout_error(where + limit)
        if isinstance(error, StopIteration):
            return StoreError(where + "the store ended the stream early")
        kind, text = wire.error_from_text(str(error))
        return kind(where + text)


def _settle(outcome: Future[_T], work: Callable[[Guard], _T], guard: Guard) -> None:
    try:
        outcome.set_result(work(guard))
    except BaseException as error:
        outcome.set_exception(error)
