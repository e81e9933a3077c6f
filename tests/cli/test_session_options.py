"""Threads, spinning and the provider's options reach every session, or a sentence says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attngraph.export.runtime import session as session_module
from attngraph.frontend.files.source import Source
from attngraph.measuring.job import Job

USAGE = 2
MODEL = ("--factory", "user_models:dynamic")
COMMANDS = {
    "optimize": ("optimize", "absent.pt2", "-o", "out.onnx"),
    "attend": ("attend", "absent.pt2", "-o", "out.html"),
    "verify": ("verify", "absent.pt2", "absent.onnx"),
    "bench": ("bench", "absent.pt2"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--threads", "0"), "--threads"),
        (("--provider-option", "device_id"), "'device_id' doesn't parse; write KEY=VALUE"),
        (("--provider-option", "device_id=1"), "CPUExecutionProvider has no option 'device_id'"),
        (
            ("--target", "cuda", "--provider-option", "device=1"),
            "CUDAExecutionProvider has no option 'device' that can be set: it has arena_extend",
        ),
        (
            ("--target", "cuda", "--provider-option", "gpu_mem_limit=lots"),
            "gpu_mem_limit is 'lots'; it must be a number, 0 or more",
        ),
        (
            ("--target", "cuda", "--provider-option", "prefer_nhwc=maybe"),
            "prefer_nhwc is 'maybe'; it must be True or False",
        ),
        (
            ("--provider-option", "a=1", "--provider-option", "a=2"),
            "--provider-option a was given twice",
        ),
    ],
)
def test_what_cannot_be_set_is_told_before_a_model_is_read(
    attngraph: Any, here: Path, command: str, options: tuple[str, ...], sentence: str
) -> None:
    ran = attngraph(*COMMANDS[command], *options)
    assert ran.code == USAGE
    assert sentence in " ".join(ran.err.split())
    assert not list(here.glob("out.*"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The threads of each session that was created, and whether they spin."""
    found: list[tuple[int, str]] = []
    create = session_module._create

    def recorded(model: Any, options: Any, *rest: Any) -> Any:
        spins = options.get_session_config_entry("session.intra_op.allow_spinning")
        found.append((options.intra_op_num_threads, spins))
        return create(model, options, *rest)

    monkeypatch.setattr(session_module, "_create", recorded)
    return found


def test_every_session_of_a_command_has_them(
    attngraph: Any, here: Path, opened: list[tuple[int, str]]
) -> None:
    options = ("--threads", "2", "--no-spinning")
    assert attngraph("optimize", *MODEL, "-o", "out.onnx", *options).code == 0
    assert attngraph("verify", *MODEL, "out.onnx", *options).code == 0
    assert len(opened) == 2
    assert set(opened) == {(2, "0")}
    opened.clear()
    attending = ("--factory", "examples.eager_attention:build")
    assert attngraph("attend", *attending, "-o", "out.html", *options).code == 0
    assert len(opened) == 2
    assert set(opened) == {(2, "0")}


def test_a_job_takes_them_to_the_process_that_measures(tmp_path: Path) -> None:
    source = Source(factory="user_models:dynamic")
    job = Job(source, threads=2, spinning=False, provider_options={"device_id": "1"})
    job.write(tmp_path)
    assert Job.read(tmp_path) == job
