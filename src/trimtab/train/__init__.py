"""Training: a loop that is fast by default, right in the corners, and can be cut off at any time."""

from trimtab.train.batch_size import find_batch
from trimtab.train.collate import Collate
from trimtab.train.loader import Loader
from trimtab.train.mapped import MappedTensors
from trimtab.train.stopping import EarlyStopping
from trimtab.train.tuned_loader import tune_loader

__all__ = ["Collate", "EarlyStopping", "Loader", "MappedTensors", "find_batch", "tune_loader"]
