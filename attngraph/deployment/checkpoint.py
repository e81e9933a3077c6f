"""`optimize_checkpoint`: from the folder of a model of transformers to one that runtimes open."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Unpack

from attngraph.checkpoints.folder import require_tokenizer
from attngraph.checkpoints.tasks import Task
from attngraph.deployment.compilers import Parts, Request, compiled
from attngraph.deployment.folder import Place, place_of
from attngraph.errors import UsageError
from attngraph.frontend.files.source import Source
from attngraph.frontend.read_source import load_source, model_of, parsed
from attngraph.keywords import CheckpointKeywords, read, spelled_out
from attngraph.options import DecoderOptions, Options
from attngraph.reports.report import Report
from attngraph.stages import Progress, begins, telling


class OptimizedCheckpoint:
    """A compiled checkpoint: `result` is what is called, `parts` are the files that it becomes.

    `result` is an `Optimized`, a `Decoder` where the task is text-generation, a `Seq2Seq` of an
    encoder-decoder, or a `Multimodal` of a model that reads images or listens. `task` is None for a
    head that no task is known of.
    """

    def __init__(self, source: Path, task: Task | None, parts: Parts) -> None:
        self.source, self.task = source, None if task is None else task.name
        self.result: Any = parts.result
        self.parts = parts

    @property
    def report(self) -> Report:
        """The report of the first file; `parts.files` have one each."""
        return next(iter(self.parts.files.values())).report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `result` returns."""
        return self.result(*args, **kwargs)

    def save(self, path: str | Path) -> None:
        """Writes a folder with the ONNX files and what the checkpoint has beside its weights.

        To a path that ends in .onnx it writes the ONNX file alone. Raises OutputError, and
        UsageError where there are several files; nothing is left half written.
        """
        with place_of(Path(path), self.source) as place:
            place.write(self.parts.files, self.parts.texts, self.parts.settings)


@spelled_out(CheckpointKeywords)
def optimize_checkpoint(
    folder: str | Path,
    *,
    task: str | None = None,
    trust_pickle: bool = False,
    trust_code: bool = False,
    progress: Progress | None = None,
    **options: Unpack[CheckpointKeywords],
) -> OptimizedCheckpoint:
    """Compiles the model whose config.json and weights are in `folder`, and checks it.

    Its class is that of config.json, and its task follows from the head, unless `task` names
    another, such as "feature-extraction". Samples and dynamic dims follow from both. Weights are
    read from safetensors; from a pickle (.bin) only with `trust_pickle`. A class of the
    checkpoint's author's own is imported with `trust_code` only. A causal language model becomes a
    decoder: `cache`, `max_length`, `all_logits`, `padding` and `position_ids` are those of
    `optimize_decoder`, and `runtime` "genai" adds genai_config.json. The other options are those of
    `optimize`.

    Raises LoadError for what the folder lacks or is not trusted with, UsageError for a task that
    the model isn't for, and as `optimize` does.
    """
    chosen, decoding = read(options)
    decoding.check_with(chosen)
    path = Path(folder)
    source = Source(path, trust_pickle=trust_pickle, task=task, trust_code=trust_code)
    source.check()
    if not source.is_folder:
        raise UsageError(f"{path} is a file; optimize_checkpoint takes the folder of a checkpoint.")
    if decoding.runtime is not None:
        require_tokenizer(path, decoding.runtime)
    with telling(progress):
        return checkpoint_of(source, chosen, decoding)


def checkpoint_of(
    source: Source,
    options: Options,
    decoding: DecoderOptions,
    *,
    place: Place | None = None,
) -> OptimizedCheckpoint:
    """As `optimize_checkpoint`, for what the command line says."""
    given = parsed(source)
    start = time.perf_counter()
    begins("load")
    loaded = load_source(source)
    if given.ranges and loaded.task is not None and loaded.task.kind != "model":
        raise UsageError(
            f"{loaded.source} generates text, and the dims of its files are those of its cache: "
            "leave out --dim."
        )
    request = Request(loaded, lambda: model_of(loaded, source, given), options, decoding, place)
    seconds = time.perf_counter() - start
    assert source.path is not None
    found = OptimizedCheckpoint(source.path, loaded.task, compiled(request))
    found.report.timings = {"load": seconds, **found.report.timings}
    return found
