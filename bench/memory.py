<<<<<<< HEAD
"""Peak resident memory from half-precision safetensors to a saved ONNX file, by stage.

    python -m bench.memory [--layers 18] [--verify off final]

The weights are those of a Llama, 0.94 B at 18 layers, in a file that lies beside the output for as
long as it takes. Each measurement has a process of its own; the figure is its VmHWM, which counts
every page of a mapped file that is in memory at that moment too.
=======
"""Peak memory of `attngraph optimize weights.safetensors --factory …`: 0.94 B parameters in fp16.

    python -m bench.memory [--layers 18] [--keep out/bench/memory]

The compiler runs as a user runs it, in a process of its own. Reported are the peak of its resident
set, pages of mapped files included, and the peak of what is no file's: the latter can't be dropped
when memory is short.
>>>>>>> d9cef76 (attngraph bench: every engine in a process of its own, parity before any time; workloads, memory)
"""

from __future__ import annotations

import argparse
<<<<<<< HEAD
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from bench.machine import write

_LAYERS = "ATTNGRAPH_BENCH_LAYERS"
_MEBIBYTE = 1 << 20


def llama() -> tuple[Any, tuple[Any, ...], Any]:
    """The model without weights, in float16; its buffers, which no file has, are real."""
    import torch
    from transformers import LlamaConfig, LlamaModel
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    class Logits(torch.nn.Module):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__()
            self.model = LlamaModel(config)
            self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            output = self.model(input_ids, use_cache=False)
            logits: torch.Tensor = self.head(output.last_hidden_state)
            return logits

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=int(os.environ[_LAYERS]),
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=5632,
        vocab_size=32000,
    )
    with torch.device("meta"):
        module = Logits(config).half()
    module.model.rotary_emb = LlamaRotaryEmbedding(config)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    return module, (torch.randint(0, 32000, (2, 16)),), (dims,)


def store(path: Path) -> int:
    """Writes random weights for `llama`, one at a time; returns their number."""
    import torch

    random = torch.Generator().manual_seed(0)
    shapes = {name: tuple(value.shape) for name, value in llama()[0].named_parameters()}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            if len(shape) == 1:
                values = torch.ones(shape)
            else:
                values = torch.randn(shape, generator=random) * shape[1] ** -0.5
            file.write(values.half().numpy().data)
    return end // 2


def _peak() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(weights: Path, output: Path, verify: str) -> dict[str, Any]:
    """One measurement in this process: peaks in MiB, as they stood when each stage ended."""
    warnings.simplefilter("ignore")
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from attngraph.compiler import Model, compile_model
    from attngraph.frontend.load import load

    torch.set_grad_enabled(False)
    peaks: dict[str, float] = {}
    stage = "import"

    def begins(name: str) -> None:
        nonlocal stage
        peaks[stage] = _peak()
        stage = name

    begins("load")
    model = Model.of(load(weights, factory="bench.memory:llama"))
    optimized = compile_model(model, verify=verify, progress=begins)
    begins("save")
    optimized.save(output)
    begins("end")
    report = optimized.report
    return {
        "verify": verify,
        "peak_mib": _peak(),
        "peak_mib_after": peaks,
        "weights_mib": report.weight_bytes / _MEBIBYTE,
        "timings_wall_s": report.timings,
    }


def _in_process(weights: Path, verify: str) -> dict[str, Any]:
    output = weights.with_name("model.onnx")
    command = [sys.executable, "-m", "bench.memory", "--weights", str(weights)]
    command += ["--output", str(output), "--verify", verify]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The measurement with --verify {verify} failed:\n{done.stderr}")
    for written in weights.parent.glob("model.onnx*"):
        written.unlink()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--verify", nargs="+", default=["off", "final"])
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.weights is not None:
        print(json.dumps(measure(options.weights, options.output, options.verify[0])))
        return
    os.environ.update({"HF_HUB_OFFLINE": "1", _LAYERS: str(options.layers)})
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        count = store(weights)
        rows = [_in_process(weights, verify) for verify in options.verify]
    for row in rows:
        stages = ", ".join(f"{name} {peak:.0f}" for name, peak in row["peak_mib_after"].items())
        print(f"--verify {row['verify']}: {row['peak_mib']:.0f} MiB ({stages})")
    print(write("memory", {"parameters": count, "rows": rows}))


if __name__ == "__main__":
    main()
=======
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from bench.machine import write

_LAYERS = "BENCH_MEMORY_LAYERS"
_POLL = 0.02


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=int(os.environ.get(_LAYERS, "18")),
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=36000,
        max_position_embeddings=2048,
        use_cache=False,
        dtype=torch.float16,
    )


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]:
    """The model without weights: parameters on meta, buffers that no file holds computed."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        module: Any = LlamaForCausalLM(_config())
    module = module.half()
    rotary = module.model.rotary_emb
    module.model.rotary_emb = type(rotary)(module.config)
    ids = torch.randint(1000, (1, 16), generator=torch.Generator().manual_seed(0))
    return module.eval(), (ids,), ({0: Dim("batch", max=64), 1: Dim("seq", max=2048)},)


def make_weights(path: Path) -> int:
    """Random weights under the names of the model; returns how many parameters there are."""
    from safetensors.torch import save_file

    module, _, _ = build()
    random = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(value.shape, generator=random).mul_(0.02).half()
        for name, value in module.state_dict().items()
    }
    save_file(weights, path)
    return sum(weight.numel() for weight in weights.values())


def _watch(command: list[str]) -> dict[str, Any]:
    """Runs a command; its exit code, last words, seconds and peaks in bytes."""
    start, anonymous = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    said = b""
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        said += process.stderr.read() or b""
        if pid:
            break
        anonymous = max(anonymous, _anonymous(process.pid))
        time.sleep(_POLL)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": process.returncode,
        "said": said.decode(errors="replace").strip()[-500:],
        "wall_s": time.perf_counter() - start,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "peak_anonymous_bytes": anonymous,
    }


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--keep", type=Path, default=Path("out/bench/memory"))
    options = parser.parse_args()
    os.environ[_LAYERS] = str(options.layers)
    options.keep.mkdir(parents=True, exist_ok=True)
    weights = options.keep / f"weights-{options.layers}.safetensors"
    if not weights.exists():
        make_weights(weights)
    command = [sys.executable, "-m", "attngraph", "optimize", str(weights), "--verify", "off"]
    command += ["--factory", "bench.memory:build", "-o", str(options.keep / "model.onnx")]
    found = _watch(command)
    rss, own = (found[key] / 1e9 for key in ("peak_rss_bytes", "peak_anonymous_bytes"))
    print(f"weights {weights.stat().st_size / 1e9:.2f} GB, peak {rss:.2f} GB, of no file {own:.2f}")
    if found["exit_code"]:
        print(f"attngraph ended with {found['exit_code']}: {found['said']}", file=sys.stderr)
        return 1
    module, _, _ = build()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    result = {"layers": options.layers, "parameters": parameters, "dtype": "float16"}
    print(write("memory", {**result, "weight_bytes": weights.stat().st_size, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
>>>>>>> d9cef76 (attngraph bench: every engine in a process of its own, parity before any time; workloads, memory)
