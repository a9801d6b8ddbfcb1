"""AgentScope 0.1.6: agents made distributed by to_dist, on two of its agent servers."""

import random
import time

import agentscope
import protocol
from agentscope.agents import AgentBase
from agentscope.message import Msg
from agentscope.server import RpcAgentServerLauncher

# Threads per server; with fewer, the waits of 5,000 agents would not overlap.
CAPACITY = 512


class Agent(AgentBase):
    """The dummy agent."""

    def __init__(self, name, wait):
        super().__init__(name=name)
        self.wait = wait

    def reply(self, x=None):
        """Wait, then a random number."""
        if self.wait:
            time.sleep(self.wait)
        return Msg(name=self.name, role="assistant", content=random.random() * 100)


def main():
    """Start the servers, and play."""
    agentscope.init(
        project="peer",
        save_dir="/tmp/agentscope-peer",
        save_log=False,
        save_code=False,
        save_api_invoke=False,
        use_monitor=False,
    )
    servers = [
        RpcAgentServerLauncher(
            host="localhost",
            capacity=CAPACITY,
            max_timeout_seconds=60,
            custom_agent_classes=[Agent],
        )
        for _ in range(2)
    ]
    for server in servers:
        server.launch()

    def task(agents, wait):
        made = [
            Agent(f"agent-{i}", wait).to_dist(host="localhost", port=servers[i % 2].port)
            for i in range(agents)
        ]
        results = [agent(Msg(name="caller", role="user", content="go")) for agent in made]
        return [float(result.content) for result in results]

    protocol.run(task)
    for server in servers:
        server.shutdown()


if __name__ == "__main__":
    main()
