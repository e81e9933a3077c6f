"""The deployment of docs/serving.md on a local Ray, asked by HTTP. Run in Ray's environment.

`python -m tests.runtimes.run_serve` in the folder of app.py answers with one line of JSON for each
of the rows of ids that it reads from stdin.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve

_CORES = 9  # by name: two replicas of four, and one for what receives the requests


def main() -> None:
    rows = json.load(sys.stdin)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=_CORES, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(importlib.import_module("app").app)

        def asked(ids: list[int]) -> Any:
            data = json.dumps(ids).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data, timeout=60) as reply:
                return json.load(reply)

        with ThreadPoolExecutor(4) as threads:
            print("found", json.dumps([list(threads.map(asked, rows)), ray.__version__]))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
