"""What the benchmarks share: options, processes that are measured, and models of ONNX nodes.

A bench says what is measured and how a row is printed. Its functions run in processes of their own,
where libraries print to stderr:

    python -m bench.harness MODULE:FUNCTION KEYWORDS [--serve]

prints what the function returns of these keywords, a JSON object, as JSON; with --serve it returns
a block, which is run for each line of standard input (attngraph/measuring/turns.py).
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
from onnx import NodeProto, TensorProto, helper
from onnx.numpy_helper import from_array

from attngraph.measuring.turns import Server, own_stdout, serve, take_turns


def option(default: Any, help: str | None = None, **more: Any) -> dict[str, Any]:
    """An option of a bench whose default doesn't say all; `more` are argparse's settings."""
    return {"default": default, "help": help, **more}


def options_of(
    doc: str | None, arguments: Sequence[str] | None = None, /, **declared: Any
) -> argparse.Namespace:
    """The options of a command line (default: this process's), by the values they have otherwise.

    False is a switch, and a list an option of several values. `doc` is the help.
    """
    parser = argparse.ArgumentParser(description=doc)
    for name, given in declared.items():
        settings = given if isinstance(given, dict) else option(given)
        default = settings["default"]
        if default is False:
            settings["action"] = "store_true"
        elif isinstance(default, list):
            settings |= {"nargs": "+", "type": type(next(iter(default), ""))}
        elif default is not None:
            settings["type"] = type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser.parse_args(arguments)


def _command(function: Callable[..., Any], given: Mapping[str, Any], *more: str) -> list[str]:
    # Not `__main__`, as which a bench is run, nor that of a decorator.
    module = inspect.unwrap(function).__globals__["__spec__"].name
    what = f"{module}:{function.__name__}"
    return [sys.executable, "-W", "ignore", "-m", "bench.harness", what, json.dumps(given), *more]


def in_process(function: Callable[..., Any], **given: Any) -> Any:
    """What a function of a bench returns in a process of its own. Both ways as JSON."""
    command = _command(function, given)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


class Turn:
    """Of processes that name the same file: they prepare side by side, and one after the other has
    its turn when none of them prepares any more. Without a file nobody waits.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self._lock(fcntl.LOCK_SH)

    def take(self) -> None:
        """It is ready: waits for its turn, which it has until `end`."""
        self._lock(fcntl.LOCK_EX)

    def end(self) -> None:
        """It neither prepares nor has its turn any more."""
        if self._file is not None:
            self._file.close()  # which unlocks it
            self._file = None

    def _lock(self, kind: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, kind)


def in_turns(
    make: Callable[..., Callable[[], Any]],
    engines: Mapping[str, Mapping[str, Any]],
    rounds: int,
    *,
    failed: dict[str, str] | None = None,
    needed: str | None = None,
    patience: float | None = None,
    ready: Callable[[], None] = lambda: None,
) -> dict[str, list[Any]]:
    """What the blocks of each engine return, one a round: `make` gives its block of its keywords.

    `ready` is called when all of them are. An engine that ends is left out and `failed` is told
    why, unless it is `needed`; without `failed` EOFError is raised.
    """
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(Server(_command(make, given, "--serve"), patience=patience))
            for name, given in engines.items()
        }
        for name in list(servers):
            try:
                servers[name].answer()
            except EOFError as error:
                if failed is None or name == needed:
                    raise
                failed[name] = str(error)
                del servers[name]
        ready()
        return take_turns(servers, rounds, failed)


def onnx_model(
    nodes: Iterable[NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Iterable[str] = ("y",),
    weights: Mapping[str, Any] | None = None,
    booleans: Collection[str] = (),
) -> bytes:
    """A model of ONNX nodes, whose inputs are float32 but for `booleans`.

    `weights` are tensors of torch or numpy, or of ONNX, which have their own names.
    """
    dtypes = dict.fromkeys(booleans, TensorProto.BOOL)
    graph = helper.make_graph(
        list(nodes),
        "bench",
        [
            helper.make_tensor_value_info(name, dtypes.get(name, TensorProto.FLOAT), list(shape))
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            data if isinstance(data, TensorProto) else from_array(numpy.asarray(data), name)
            for name, data in (weights or {}).items()
        ],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Writes what the compiler goes by from a bench's results."""
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}")


def main() -> None:
    what, given, *serves = sys.argv[1:]
    answers = own_stdout()
    module, _, name = what.partition(":")
    found = getattr(importlib.import_module(module), name)(**json.loads(given))
    if serves:
        serve(found, answers)
    else:
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
