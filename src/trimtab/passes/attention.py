"""Choice of the attention kernel."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab._internal.text import message_line
from trimtab.core.candidate import Candidate
from trimtab.core.technique import SettingPass
from trimtab.tensors.attention_kernels import KERNELS

ON_GPUS = ("efficient", "cudnn")


@dataclass(frozen=True, kw_only=True)
class Attention(SettingPass):
    """Make scaled dot-product attention use one kernel, instead of the first one in torch's order that supports the inputs.

    Pays off if torch's order is wrong for the shapes, as for short sequences, where plain matrix products are fastest.
    Source: Dao 2023, https://arxiv.org/abs/2307.08691;
    https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
    """

    words = "{kernel} attention"
    modes = frozenset({"train"})
    sets = frozenset({"attention"})
    tries = True

    kernel: Literal["flash", "efficient", "cudnn", "math"] = "flash"
    """``flash`` and ``efficient`` never store the attention matrix; ``cudnn`` is NVIDIA's; ``math`` is plain products."""

    def why_not_here(self) -> str | None:
        """``efficient`` and ``cudnn`` need a GPU."""
        if self.kernel in ON_GPUS and not torch.cuda.is_available():
            return f"{self.kernel} attention needs an NVIDIA GPU, and PyTorch finds none here."
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a model that calls torch's attention with inputs that the kernel supports; the model is run to find out."""
        if self.kernel in ON_GPUS and not candidate.settings.device.startswith("cuda"):
            return f"{self.kernel} attention needs an NVIDIA GPU, and this runs on {candidate.settings.device!r}."
        if self._failure(candidate, []) is None:
            return "attention needs a model that calls torch's scaled_dot_product_attention, and this one does not."
        if failure := self._failure(candidate, [KERNELS[self.kernel]]):
            return f"The model fails with {self.kernel} attention: {failure.rstrip('.')}."
        return None

    def _failure(self, candidate: Candidate, kernels: list[SDPBackend]) -> str | None:
        """The error of a call of the model in which attention may use ``kernels`` only; ``None`` if it runs.

        Gradients are enabled, because fused inference layers do not call attention separately. Autocast follows the settings,
        because some kernels support 16 bits only.
        """
        device, dtype = torch.device(candidate.settings.device), candidate.settings.precision.autocast
        autocast = torch.autocast(device.type, dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext()
        rng_devices = [] if device.type == "cpu" else [device]  # by default torch initializes all GPUs, with a warning
        rng_state = torch.random.fork_rng(rng_devices, device_type=device.type)
        try:
            with sdpa_kernel(kernels), rng_state, torch.enable_grad(), autocast:
                args, kwargs = candidate.own_inputs()
                candidate.model(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            return message_line(error)
        return None
