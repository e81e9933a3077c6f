"""What each head of transformers is for, and so how its model is compiled.

A task is called as pipelines of transformers and optimum call it. The classes that have its head
are those that an auto class of transformers lists, and others whose name ends as theirs do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from attngraph.errors import UsageError

Kind = Literal["model", "decoder", "seq2seq", "multimodal"]
"""Of a task: one graph of the forward; a decoder with its cache; an encoder and such a decoder; a
decoder whose prompt holds images or sound as well.
"""


@dataclass(frozen=True)
class Task:
    """`lists` name tables of auto classes: the middle of MODEL_FOR_…_MAPPING_NAMES.

    `heads` are the ends of class names. `kind` chooses the compiler
    (attngraph/deployment/compilers.py).
    """

    name: str
    lists: tuple[str, ...]
    heads: tuple[str, ...]
    kind: Kind = "model"

    def classes(self) -> Mapping[str, tuple[str, ...]]:
        """The classes of transformers that have this head, by model type."""
        auto: Any = import_module("transformers.models.auto.modeling_auto")
        found: dict[str, tuple[str, ...]] = {}
        for name in self.lists:
            wanted = f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES"
            for model_type, classes in getattr(auto, wanted, {}).items():
                both = classes if isinstance(classes, tuple | list) else (classes,)
                found[model_type] = (*found.get(model_type, ()), *both)
        return found

    def has(self, architecture: str) -> bool:
        """Whether a class has this head: it is listed, or called as those are."""
        is_listed = any(architecture in names for names in self.classes().values())
        return is_listed or architecture.endswith(self.heads)


# A class that several have is that of the first: a decoder that takes images is no text model.
TASKS = (
    Task(
        "image-text-to-text",
        ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISION_2_SEQ"),
        (),
        "multimodal",
    ),
    Task("audio-text-to-text", ("MULTIMODAL_LM",), (), "multimodal"),
    Task("automatic-speech-recognition", ("SPEECH_SEQ_2_SEQ",), (), "seq2seq"),
    Task("image-to-text", ("IMAGE_TO_TEXT",), ("VisionEncoderDecoderModel",), "seq2seq"),
    Task(
        "text2text-generation", ("SEQ_TO_SEQ_CAUSAL_LM",), ("ForConditionalGeneration",), "seq2seq"
    ),
    Task("text-generation", ("CAUSAL_LM",), ("ForCausalLM", "LMHeadModel"), "decoder"),
    Task("fill-mask", ("MASKED_LM",), ("ForMaskedLM", "ForPreTraining")),
    Task("text-classification", ("SEQUENCE_CLASSIFICATION",), ("ForSequenceClassification",)),
    Task("token-classification", ("TOKEN_CLASSIFICATION",), ("ForTokenClassification",)),
    Task(
        "question-answering",
        ("QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING"),
        ("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    ),
    Task("multiple-choice", ("MULTIPLE_CHOICE",), ("ForMultipleChoice",)),
    Task("next-sentence-prediction", ("NEXT_SENTENCE_PREDICTION",), ("ForNextSentencePrediction",)),
    Task("image-classification", ("IMAGE_CLASSIFICATION",), ("ForImageClassification",)),
    Task("object-detection", ("OBJECT_DETECTION",), ("ForObjectDetection",)),
    Task("zero-shot-object-detection", ("ZERO_SHOT_OBJECT_DETECTION",), ()),
    Task(
        "image-segmentation",
        (
            "SEMANTIC_SEGMENTATION",
            "IMAGE_SEGMENTATION",
            "INSTANCE_SEGMENTATION",
            "UNIVERSAL_SEGMENTATION",
        ),
        ("Segmentation",),
    ),
    Task("depth-estimation", ("DEPTH_ESTIMATION",), ("ForDepthEstimation",)),
    Task("image-to-image", ("IMAGE_TO_IMAGE",), ("ForImageSuperResolution",)),
    Task("masked-im", ("MASKED_IMAGE_MODELING",), ("ForMaskedImageModeling",)),
    Task("video-classification", ("VIDEO_CLASSIFICATION",), ("ForVideoClassification",)),
    Task("zero-shot-image-classification", ("ZERO_SHOT_IMAGE_CLASSIFICATION",), ()),
    Task("audio-classification", ("AUDIO_CLASSIFICATION",), ("ForAudioClassification",)),
    Task("automatic-speech-recognition", ("CTC",), ("ForCTC",)),
    Task("audio-frame-classification", ("AUDIO_FRAME_CLASSIFICATION",), ()),
    Task("audio-xvector", ("AUDIO_XVECTOR",), ("ForXVector",)),
    Task("feature-extraction", ("", "TEXT_ENCODING"), ("Model", "ModelWithProjection", "Encoder")),
)
NAMES = tuple(dict.fromkeys(task.name for task in TASKS))


_ADAPTED = {
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "CAUSAL_LM": "text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
    "QUESTION_ANS": "question-answering",
    "FEATURE_EXTRACTION": "feature-extraction",
}
"""The tasks of peft's adapters, by the names it has for them."""


def require_task(name: str | None) -> None:
    """Raises UsageError for a name that no task has; the message lists them."""
    if name is not None and name not in NAMES:
        raise UsageError(f"--task {name} is unknown; it can be {', '.join(NAMES)}.")


def task_of(architecture: str) -> Task | None:
    """The task of a class, by its own name or by its head."""
    whole = (t for t in TASKS if architecture in t.heads)
    listed = (t for t in TASKS if any(architecture in names for names in t.classes().values()))
    named = (t for t in TASKS if architecture.endswith(t.heads or ("\0",)))
    return next(whole, None) or next(listed, None) or next(named, None)


def task_adapted(said: object, architecture: str | None) -> str | None:
    """The name of the task that an adapter of peft says it is of; None where the class of its base
    is to be taken as it was saved. To peft all that generates is a language model, one that sees or
    listens too.
    """
    name = _ADAPTED.get(str(said))
    own = None if architecture is None else task_of(architecture)
    generates = any(task.name == name and task.kind != "model" for task in TASKS)
    return None if generates and own is not None and own.kind != "model" else name


def class_for(name: str, architecture: str | None, model_type: str) -> tuple[Task, str]:
    """The task of this name, and the class that does it: the saved one if that has its head.

    Raises UsageError where transformers has none for the model type.
    """
    named = [task for task in TASKS if task.name == name]
    for task in named:
        if architecture is not None and task.has(architecture):
            return task, architecture
    for task in named:
        if classes := task.classes().get(model_type):
            return task, classes[0]
    raise UsageError(
        f"--task {name}: transformers has no {model_type} model with such a head"
        f"{f'; the checkpoint is a {architecture}' if architecture else ''}."
    )
