"""A driver to be killed: two runs of stub workers, the second with stores that wait for no other driver."""

from __future__ import annotations

import json
import sys
import time

import ray

from faults.crew import CONFIG, Crew, Pool


def main(address: str, nodes: list[tuple[str, str]], run: str) -> None:
    ray.init(address=address, log_to_driver=False)
    crews = [
        Crew(run, nodes, Pool()),
        Crew(f"{run}b", nodes, Pool(), CONFIG.model_copy(update={"orphan_timeout_s": 2})),
    ]
    for crew in crews:
        crew.begin()
        crew.protect(10)
    pids = [pid for crew in crews for pid in crew.live.stores().values()]
    print(json.dumps({"step": 10, "pids": pids}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], [tuple(node) for node in json.loads(sys.argv[2])], sys.argv[3])
