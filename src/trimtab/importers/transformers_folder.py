"""Workloads from folders with a transformers model: offline, and without running code from the folder."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import safetensors
import torch
from torch import nn

from trimtab._internal.text import listed, with_fix
from trimtab.core.candidate import MODEL_ERRORS
from trimtab.core.signature import Dim
from trimtab.core.technique import require
from trimtab.errors import TrimtabError, UsageError
from trimtab.importers.input_spec import Inputs, InputSpec, Shapes, inputs_of, random_tensor, structure_of

TASKS = {
    "audio-classification": ("AutoModelForAudioClassification",),
    "automatic-speech-recognition": ("AutoModelForCTC", "AutoModelForSpeechSeq2Seq"),
    "depth-estimation": ("AutoModelForDepthEstimation",),
    "feature-extraction": ("AutoModel",),
    "fill-mask": ("AutoModelForMaskedLM",),
    "image-classification": ("AutoModelForImageClassification",),
    "image-segmentation": (
        "AutoModelForSemanticSegmentation",
        "AutoModelForInstanceSegmentation",
        "AutoModelForUniversalSegmentation",
        "AutoModelForImageSegmentation",
    ),
    "object-detection": ("AutoModelForObjectDetection",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "text-classification": ("AutoModelForSequenceClassification",),
    "text-generation": ("AutoModelForCausalLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "token-classification": ("AutoModelForTokenClassification",),
    "zero-shot-image-classification": ("AutoModelForZeroShotImageClassification",),
}
"""Task -> transformers classes; the first one that supports the model loads it."""

SENTENCES = (
    "The train to the coast leaves at half past nine.",
    "Nobody had expected the small team to win, least of all its own captain.",
    "Rain is likely in the north, while the south stays dry and warm until the weekend.",
    "Could you send me the invoice again? The first one never arrived.",
    "Prices rose by two percent in March, which was less than most economists had feared when the year began.",
    "A good knife, sharp and clean, is worth more in a kitchen than ten machines that fill the cupboards.",
    "She read the letter twice, folded it, and put it back where it had been for thirty years.",
    "Thanks!",
    "The committee will publish its report next week, after both parties have had the time to comment on the draft.",
    "I would not buy this phone again: the battery lasts half a day and the screen scratched within a week.",
    "Water boils at a lower temperature in the mountains because the pressure of the air is lower there.",
    "Turn left at the church, follow the river for a mile, and you will see the old mill on your right.",
    "It was the best concert of the summer.",
    "The patient reported mild pain after the treatment, which was gone the next morning without any medicine.",
    "Two of the three engines had to be replaced before the ship could leave the harbour.",
    "Where did you put the keys?",
)
"""Sentences of different lengths as realistic inputs of text models."""

_FLOATS = {"pixel_values", "input_values", "input_features"}


LOADING_ERRORS: tuple[type[Exception], ...] = (*MODEL_ERRORS, MemoryError, safetensors.SafetensorError)
"""Errors of transformers for a folder that it cannot load, for example if the weights are Git LFS pointers."""


@dataclasses.dataclass(frozen=True)
class TransformersFolder:
    """Factory of the model in folder ``path``, with the class that its configuration names, or a class for ``task``."""

    path: str
    task: str | None = None

    def __call__(self) -> nn.Module:
        """The model in evaluation mode, without its cache of past tokens: caches cannot be passed to other runtimes."""
        model: nn.Module = self.load()[0]
        return model

    def load(self) -> tuple[Any, list[str]]:
        """The model, and the names of the weights that are missing in the folder and therefore random.

        Raises:
            UsageError: the folder, its configuration or its weights cannot be used; the message says why.
            MissingPackageError: transformers is not installed.
        """
        transformers = require("transformers")
        _check_folder(pathlib.Path(self.path))
        options = {"local_files_only": True, "trust_remote_code": False}
        try:
            with _quiet(transformers):
                config = transformers.AutoConfig.from_pretrained(self.path, **options)
                cls = _model_class(transformers, config, self.task)
                only_safe = {} if list(pathlib.Path(self.path).glob("*.bin")) else {"use_safetensors": True}
                model, found = cls.from_pretrained(self.path, config=config, output_loading_info=True, **options, **only_safe)
        except TrimtabError:
            raise
        except (*LOADING_ERRORS, *_hub_errors()) as error:
            problem = f"transformers cannot load {self.path}: {_first_sentence(error)}"
            raise UsageError(with_fix(problem, "Save the model into it again with save_pretrained.")) from error
        for part in model.modules():  # encoders and decoders have their own copies of the configuration
            config = getattr(part, "config", None)
            for settings in filter(None, (config, getattr(config, "text_config", None))):
                if getattr(settings, "use_cache", False):
                    settings.use_cache = False
        return model.eval(), sorted(found["missing_keys"])


def transformers_inputs(source: TransformersFolder, inputs: pathlib.Path | None, shapes: Shapes) -> tuple[InputSpec, Inputs]:
    """The inputs that the model takes, and example inputs: given ones, else sentences through the folder's tokenizer, else
    random.

    Raises:
        UsageError: as for :meth:`TransformersFolder.load`; or an input does not fit.
    """
    model, missing = source.load()
    folder = pathlib.Path(source.path)
    notes = []
    if missing:
        few = listed(missing)
        if source.task not in (None, "feature-extraction"):
            raise UsageError(
                f"{folder.name} holds no weights for {few}, so its answers for --task {source.task} would be random. Leave "
                "--task out, or take a folder that was trained for it."
            )
        notes.append(f"The folder has no weights for {few}; they are random, and so is what comes out of them.")
    spec = _input_spec(model, folder)
    if inputs is None and not shapes and "input_ids" in spec.names:
        tokenizer = _tokenizer(folder)
        if not isinstance(tokenizer, str):
            return _from_sentences(spec, tokenizer, notes)
        notes.append(tokenizer)
    found = inputs_of(spec, inputs, shapes)
    return spec, dataclasses.replace(found, notes=(*notes, *found.notes))


def _check_folder(folder: pathlib.Path) -> None:
    if not os.path.isdir(folder):  # False for a forbidden folder, where pathlib's is_dir raises
        raise UsageError(
            f"There is no folder {str(folder)!r}. Write hf: and the folder that holds config.json and the weights."
        )
    if not os.path.isfile(folder / "config.json"):
        raise UsageError(
            f"{folder} has no config.json, so it is no folder that transformers' save_pretrained wrote. Give one that it did."
        )
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise UsageError(
            f"{folder} has no weights: neither *.safetensors nor *.bin. Save the model into it again with save_pretrained."
        )


def _model_class(transformers: Any, config: Any, task: str | None) -> Any:
    if task is not None and task not in TASKS:
        raise UsageError(f"There is no task {task!r}. Known are: {', '.join(TASKS)}.")
    if task is not None:
        classes = [getattr(transformers, name) for name in TASKS[task]]
        return next((one for one in classes if type(config) in one._model_mapping), classes[0])
    found = getattr(transformers, _architecture(config), None) if _architecture(config) else None
    return found if found is not None and hasattr(found, "from_pretrained") else transformers.AutoModel


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None) or [""]
    return str(names[0])


def _input_spec(model: Any, folder: pathlib.Path) -> InputSpec:
    """The inputs by the kind of model, according to its main input and the sizes in its configuration."""
    config, taken = model.config, set(inspect.signature(model.forward).parameters)
    shapes: dict[str, tuple[int | Dim, ...]] = {}
    batch = Dim("batch")
    both = hasattr(config, "text_config") and hasattr(config, "vision_config")
    if model.main_input_name == "input_ids" or (both and "input_ids" in taken):
        text = (batch, Dim("length", max=_max_tokens(model, config)))
        shapes |= {name: text for name in ("input_ids", "attention_mask") if name in taken}
    if model.main_input_name == "pixel_values" or (both and "pixel_values" in taken):
        shapes["pixel_values"] = (batch, *_image_size(config, folder))
    if model.main_input_name in ("input_values", "input_features"):
        shapes[model.main_input_name] = (batch, *_audio_size(config, model.main_input_name))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        shapes["decoder_input_ids"] = (batch, Dim("decoder_length", max=_max_tokens(model, config)))
    if not shapes:
        raise UsageError(
            f"{type(model).__name__} takes {model.main_input_name!r}, which is not known here. Write a workload file: "
            "trimtab init custom."
        )
    dtypes = tuple(model.dtype if name in _FLOATS else torch.int64 for name in shapes)
    vocabulary = getattr(getattr(config, "text_config", config), "vocab_size", None) or getattr(config, "vocab_size", None)
    return InputSpec(
        source=f"hf:{folder.name}",
        names=tuple(shapes),
        dtypes=dtypes,
        shapes=tuple(shapes.values()),
        structure=structure_of((), {name: torch.empty(1, device="meta") for name in shapes}),
        ones=frozenset(name for name in shapes if name.endswith("mask")),
        bounds={name: int(vocabulary) for name in shapes if name.endswith("input_ids") and vocabulary},
    )


def _max_tokens(model: nn.Module, config: Any) -> int | None:
    """Most tokens that the position table allows, without the rows for padding; ``None`` without a table."""
    text = getattr(config, "text_config", config)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    places = next((found for name in names if (found := getattr(text, name, None))), None)
    if places is None:
        return None
    tables = [m for n, m in model.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    padding = next((m.padding_idx for m in tables if m.num_embeddings == places and m.padding_idx is not None), -1)
    return max(int(places) - padding - 1, 1)


def _image_size(config: Any, folder: pathlib.Path) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _preprocessing(folder)
    if isinstance(size, Mapping):
        size = [size.get("height", size.get("shortest_edge", 224)), size.get("width", size.get("shortest_edge", 224))]
    sides = list(size) if isinstance(size, Sequence) else [size or 224] * 2
    return int(getattr(vision, "num_channels", None) or 3), int(sides[0]), int(sides[-1])


def _preprocessing(folder: pathlib.Path) -> Any:
    path = folder / "preprocessor_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}. Save the model's preprocessor again.") from error
    return found.get("crop_size") or found.get("size")


def _audio_size(config: Any, name: str) -> tuple[int | Dim, ...]:
    """The shape of audio inputs: one second of samples, or a spectrogram of the model's size."""
    bands = getattr(config, "num_mel_bins", None)
    if name == "input_features":
        return int(bands or 80), 2 * int(getattr(config, "max_source_positions", None) or 1500)
    length = getattr(config, "max_length", None)
    return (int(length), int(bands)) if bands and length else (16_000,)


def _tokenizer(folder: pathlib.Path) -> Any:
    """The folder's tokenizer, or a sentence that says why it cannot be loaded without code from the folder."""
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
    if not any((folder / name).is_file() for name in names):
        return f"{folder.name} has no tokenizer, so the token ids are random."
    transformers = require("transformers")
    try:
        with _quiet(transformers):
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        problem = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message").rstrip(".")
        return (
            f"The tokenizer of {folder.name} cannot be loaded ({type(error).__name__}: {problem}), so the token ids are "
            "random. Install what it asks for, or give --inputs (in Python, inputs=...)."
        )


def _from_sentences(spec: InputSpec, tokenizer: Any, notes: list[str]) -> tuple[InputSpec, Inputs]:
    """Inputs from :data:`SENTENCES`, one call per sentence, restricted to those that the model takes."""
    most = next((s.max for shape in spec.shapes for s in shape if isinstance(s, Dim) and s.name == "length"), None) or 128
    ids = [tokenizer(text, truncation=True, max_length=min(most, 128))["input_ids"] for text in SENTENCES]
    generator = torch.Generator().manual_seed(0)
    calls = []
    for row in ids:
        tokens = torch.tensor([row])
        made = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "decoder_input_ids": tokens[:, :4]}
        for name, dtype, shape in zip(spec.names, spec.dtypes, spec.shapes, strict=True):
            if name not in made:  # the image of a model of text and images
                made[name] = random_tensor([1, *(s for s in shape[1:] if isinstance(s, int))], dtype, generator)
        calls.append(spec.workload_inputs([made[name] for name in spec.names]))
    what = f"The inputs are {len(calls)} English sentences that come with trimtab, through the folder's own tokenizer."
    notes.append(f"{what} For your own data and labels write a workload file: trimtab init FOLDER.")
    return spec, Inputs(example=calls[1], calibration=[*calls[:1], *calls[2:]], notes=tuple(notes))


def _hub_errors() -> tuple[type[Exception], ...]:
    """Errors of huggingface_hub, which transformers passes on, for example for wrong types in a configuration."""
    found = vars(require("huggingface_hub.errors")).values()
    return tuple(value for value in found if isinstance(value, type) and issubclass(value, Exception))


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress transformers' progress bars and messages in the block."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if "trust_remote_code" in str(error):
        return "it needs Python code from the folder, which is never run. Save it with a class that transformers has itself."
    return line[:300]
