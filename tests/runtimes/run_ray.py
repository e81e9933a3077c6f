"""A sweep on a local Ray of two workers, of which one is killed midway. Run in Ray's environment.

`python -m tests.runtimes.run_ray SPEC.toml OUT` prints the exit code of the sweep and the
version of Ray.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from ray.cluster_utils import Cluster

_PATIENCE = 300


def main(spec: str, out: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    try:
        line = ("-m", "attngraph", "sweep", spec, "-o", out, "--ray", cluster.address)
        sweep = subprocess.Popen([sys.executable, *line])
        late = time.monotonic() + _PATIENCE
        while not (Path(out) / "sweep.json").exists():
            assert sweep.poll() is None, "it ended before it had a record"
            assert time.monotonic() < late, "no task ended"
            time.sleep(0.1)
        cluster.remove_node(workers[0], allow_graceful=False)
        print("code", sweep.wait(_PATIENCE), "of Ray", version("ray"))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
