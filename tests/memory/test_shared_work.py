"""Work that is done once for all who ask at the same time."""

from __future__ import annotations

import asyncio

import pytest

from ray_jax_ckpt.memory.shared_work import SharedWork


class Work:
    """Goes on until it is let go; counts how often it was started."""

    def __init__(self) -> None:
        self.started, self.gate = 0, asyncio.Event()

    async def __call__(self) -> int:
        self.started += 1
        await self.gate.wait()
        return self.started


def test_callers_with_one_key_share_what_runs_and_the_next_one_starts_it_again():
    async def scene():
        shared, work = SharedWork(), Work()
        callers = [asyncio.ensure_future(shared.get("key", work)) for _ in range(3)]
        await asyncio.sleep(0)
        other = Work()
        other.gate.set()
        assert await shared.get("another", other) == (1, True)
        work.gate.set()
        assert await asyncio.gather(*callers) == [(1, True), (1, False), (1, False)]
        assert await shared.get("key", work) == (2, True)

    asyncio.run(scene())


def test_what_it_raises_is_raised_to_all():
    async def fail():
        await asyncio.sleep(0)
        raise ValueError("no")

    async def scene():
        shared = SharedWork()
        return await asyncio.gather(*(shared.get("key", fail) for _ in range(2)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(scene())] == ["no", "no"]


def test_a_caller_that_gives_up_does_not_end_it_for_the_others():
    async def scene():
        shared, work = SharedWork(), Work()
        one, two = (asyncio.ensure_future(shared.get("key", work)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        work.gate.set()
        assert await two == (1, False)

    asyncio.run(scene())
