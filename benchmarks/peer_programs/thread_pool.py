"""A thread pool: a thread per agent, as far as 1,000 go."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import protocol


class Agent:
    """The dummy agent."""

    def guess(self, wait):
        """Wait, then a random number."""
        if wait:
            time.sleep(wait)
        return random.random() * 100


def task(agents, wait):
    """All of them at once, or a thousand at a time."""
    made = [Agent() for _ in range(agents)]
    with ThreadPoolExecutor(max_workers=min(agents, 1000)) as pool:
        return list(pool.map(lambda agent: agent.guess(wait), made))


if __name__ == "__main__":
    protocol.run(task)
