"""Plain asyncio: an object and a task per agent, in one process."""

import asyncio
import random

import protocol


class Agent:
    """The dummy agent."""

    async def guess(self, wait):
        """Wait, then a random number."""
        if wait:
            await asyncio.sleep(wait)
        return random.random() * 100


def task(agents, wait):
    """All of them at once."""

    async def play():
        made = [Agent() for _ in range(agents)]
        return await asyncio.gather(*(agent.guess(wait) for agent in made))

    return asyncio.run(play())


if __name__ == "__main__":
    protocol.run(task)
