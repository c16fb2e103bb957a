"""Errors of a model that only autocast causes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trimtab._internal.text import summary_line
from trimtab._internal.user_code import explaining
from trimtab.errors import WorkloadError
from trimtab.train.runtime.memory_errors import gpu_assert_failed, out_of_memory


class explaining_autocast(explaining):
    """A block that runs in the precision of ``precision.autocast``. An error of the model there names that setting, if
    ``without`` shows that the model runs without autocast.

    Raises:
        WorkloadError: the block fails only under autocast.
    """

    def __init__(self, dtype: str, without: Callable[[], object]) -> None:
        self._dtype, self._without = dtype, without

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes; return if that is itself."""
        if not isinstance(error, RuntimeError) or out_of_memory(error) or gpu_assert_failed(error):
            return
        try:
            with torch.enable_grad():
                self._without()
        except (RuntimeError, TypeError, ValueError):
            return
        raise WorkloadError(
            f"The model or its loss fails under precision.autocast={self._dtype!r}: {summary_line(str(error))}. Without "
            "autocast it runs. Leave that setting out, or give 'auto', which tries it first."
        ) from error
