"""Ray: an actor, and so a process, per agent."""

import os
import random
import time

import protocol

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray


@ray.remote(num_cpus=0)
class Agent:
    """The dummy agent."""

    def guess(self, wait):
        """Wait, then a random number."""
        if wait:
            time.sleep(wait)
        return random.random() * 100


def task(agents, wait):
    """All of them at once."""
    made = [Agent.remote() for _ in range(agents)]
    return ray.get([agent.guess.remote(wait) for agent in made])


if __name__ == "__main__":
    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
    )
    protocol.run(task)
    ray.shutdown()
