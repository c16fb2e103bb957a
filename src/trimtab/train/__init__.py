"""Training: loaders, losses, schedules, callbacks and tuning for the Trainer, and the parts of its loop."""

from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.autotune.learning_rate import find_lr
from trimtab.train.checkpoint.weights import weights
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader
from trimtab.train.data.memory_mapped import MappedTensors
from trimtab.train.data.worker_tuning import tune_loader
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.loss.distillation import Distillation
from trimtab.train.loss.manual_run import ManualRun
from trimtab.train.optim.schedules import cosine, linear, one_cycle
from trimtab.train.parts import Parts
from trimtab.train.telemetry.events import (
    Adjusted,
    Ended,
    EpochEnded,
    EpochStarted,
    Event,
    JsonLines,
    Progressed,
    Remarked,
    Saved,
    TensorBoard,
    Validated,
)
from trimtab.train.telemetry.log import log
from trimtab.train.telemetry.loggers import CsvLines, MLflow, WandB
from trimtab.train.telemetry.model_summary import model_summary

__all__ = [
    "Adjusted",
    "Collate",
    "CsvLines",
    "Distillation",
    "EarlyStopping",
    "Ended",
    "EpochEnded",
    "EpochStarted",
    "Event",
    "JsonLines",
    "Loader",
    "MLflow",
    "ManualRun",
    "MappedTensors",
    "Parts",
    "Progressed",
    "Remarked",
    "Saved",
    "TensorBoard",
    "Validated",
    "WandB",
    "cosine",
    "find_batch",
    "find_lr",
    "linear",
    "log",
    "model_summary",
    "one_cycle",
    "tune_loader",
    "weights",
]
