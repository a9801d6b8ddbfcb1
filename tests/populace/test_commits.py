"""What is kept of committed rounds, and what goes."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from populace import Scenario
from populace._runtime.saving import StateStore
from populace.commits import Commits, last_commit
from populace.scenario import NoParams
from populace.world import World, open_world
from shared.messages.control import SavedPart
from tests.conftest import Services, unique
from tests.populace.sample import Counter


class Counting(Scenario):
    async def setup(self) -> None:
        self.people = await self.population(Counter, name="people", count=4)


def played_in(world: World) -> Counting:
    return Counting(world, params=NoParams(), seed=5, rounds=9, agents=4)


async def test_nothing_is_left_of_what_later_lives_have_replaced(services: Services) -> None:
    """Neither what the owner of an earlier one kept, nor what those wrote that did not commit."""
    run = unique("r")

    def life(number: int) -> AbstractAsyncContextManager[World]:
        url = services.broker.url
        return open_world(
            services.settings(), url, run=run, seed=5, workers=1, life=number, durable=True
        )

    async def subjects_held(world: World) -> list[str]:
        subjects = world._subjects
        start = len(subjects.run_state(run, "", "")) - 1
        read = world._bus.read(subjects.stream_states, (subjects.run_state(run),))
        return sorted([message.subject[start:] async for message in read])

    async with life(1) as world:
        first = played_in(world)
        await first.setup()
        commits = Commits(world, first)
        for number in (0, 1):
            await commits.commit(number, [], 0)
        await commits.close()
        at_first = await subjects_held(world)
        assert at_first[-2:] == ["1.1.owner", "last.commit"]
    async with life(3) as world:
        bus, subjects = world._bus, world._subjects
        for earlier in (1, 2):  # both died as they were about to commit the second round
            store = StateStore(bus, subjects, run, earlier)
            await store.write(2, "people.0", b"people")
            await store.write(2, "@room", b"a room")
        taken = await last_commit(bus, subjects, run)
        assert taken is not None
        assert (taken.round, taken.life) == (1, 1)
        commits = Commits(world, played_in(world))
        await commits.take_up(taken)
        await commits.commit(2, [], 0)
        await commits.close()
        held = await subjects_held(world)
        left = [f"2.{n}.{what}" for n in (1, 2) for what in ("@room", "people.0")]
        assert set(left) < set(held)  # one of these may be about to commit it after all
        assert "1.1.owner" not in held
        await commits.commit(3, [], 0)
        await commits.close()
        held = await subjects_held(world)
        assert not set(left) & set(held)
        assert held[-2:] == ["3.3.owner", "last.commit"]
        taken = await last_commit(bus, subjects, run)
        assert taken is not None
        assert (taken.round, taken.life) == (3, 3)
        for name, where in taken.world["parts"].items():  # what it names is there
            assert await StateStore(bus, subjects, run, 3).read(
                name, SavedPart.model_validate(where)
            )
