"""Where the tasks of a sweep run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from attngraph.errors import ProviderError, UsageError
from attngraph.sweeping.isolation import Attempt, Record, isolated, isolated_each

_DEATHS = 3
"""How many workers may die of one task before it isn't begun again."""

Trial = tuple[tuple[Any, ...], Record]
"""The arguments of a trial, and its record if its process is lost."""


def on_this_machine(
    attempt: Attempt, trials: Sequence[Trial], *, jobs: int, timeout: float | None
) -> Iterator[Record]:
    """The trials' records as they finish, `jobs` at a time."""
    yield from isolated_each(attempt, trials, jobs=jobs, timeout=timeout)


def on_ray(
    attempt: Attempt, trials: Sequence[Trial], *, address: str, cpus: int, timeout: float | None
) -> Iterator[Record]:
    """The trials' records as they finish, of a Ray cluster that runs already.

    A trial reserves `cpus` cores. Where the worker or the node of one dies, it is begun again on
    another, up to three times. The nodes need attngraph, and the files of the models, at the same
    paths as here. Raises UsageError without Ray, ProviderError where no cluster answers.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("--ray needs Ray: pip install 'attngraph[ray]'.") from error
    was_ready = ray.is_initialized()
    if not was_ready:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ProviderError(
                f"No Ray cluster answers at {address}: {str(error).splitlines()[0]}"
            ) from error
    # A process of its own inside the worker: a crash of the compile is the task's, and ends there,
    # while a death of the worker is the cluster's, and Ray's to mend.
    remote = ray.remote(num_cpus=cpus, max_retries=_DEATHS)(isolated)
    running = {remote.remote(attempt, *trial, timeout): trial for trial in trials}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            _, lost = running.pop(done)
            try:
                record: Record = ray.get(done)
            except ray.exceptions.RayError as error:
                said = " ".join(str(error).split())
                record = {**lost, "error": f"Ray lost it {_DEATHS + 1} times: {said[:300]}"}
            yield record
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            for task in running:
                ray.cancel(task, force=True)
        if not was_ready:
            ray.shutdown()
