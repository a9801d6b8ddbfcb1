"""What all peer programs share: when to begin, and how to tell what came."""

import json
import sys
import time


def run(task):
    """Run ``task(agents, wait)``, which returns all answers, when told to."""
    agents, wait = int(sys.argv[1]), float(sys.argv[2])
    print("begin", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    answers = task(agents, wait)
    wall = time.perf_counter() - began
    good = [a for a in answers if isinstance(a, float) and 0 <= a < 100]
    told = {"answers": len(good), "mean": sum(good) / max(1, len(good)), "wall_s": wall}
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
