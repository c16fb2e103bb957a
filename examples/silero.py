"""Voice activity: the pretrained Silero VAD, a recurrent network with three outputs, called frame by frame with its own state.

The network is rebuilt here as plain PyTorch and takes its weights from the TorchScript file in the silero-vad package. It is
judged on a labelled recording of 30 seconds (two speakers): is there speech in this frame of 32 milliseconds or not? The
recording is cut into segments of one second; each is heard from half a second before, so that the state has settled.

    trimtab optimize examples/silero.py --max-drop 3% --budget 3m
"""

from __future__ import annotations

import wave
from collections.abc import Callable

import numpy as np
import torch
from material import package_folder
from torch import nn

import trimtab

RATE, HOP, CONTEXT, STATE = 16_000, 512, 64, 128
SETTLE, SEGMENT = 16, 31
"""Frames that are heard but not scored, and frames that are."""


class Silero(nn.Module):
    """``x: float32 (B, 576)``, ``h, c: float32 (B, 128)`` -> ``(probability (B, 1), h, c)``; 309,633 parameters at 16 kHz."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        sizes, strides = (129, 128, 64, 64, 128), (1, 2, 2, 1)
        self.encoder = nn.ModuleList(
            nn.Conv1d(inside, outside, 3, stride, padding=1)
            for inside, outside, stride in zip(sizes, sizes[1:], strides, strict=False)
        )
        self.input_gates = nn.Linear(STATE, 4 * STATE)
        self.hidden_gates = nn.Linear(STATE, 4 * STATE)
        self.head = nn.Linear(STATE, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One frame of 512 samples, led by the last 64 of the frame before, and the state."""
        padded = nn.functional.pad(x.unsqueeze(1), (0, 64), mode="reflect")
        real, imaginary = self.stft(padded).chunk(2, dim=1)
        features = torch.sqrt(real.square() + imaginary.square())
        for conv in self.encoder:
            features = torch.relu(conv(features))
        gates = self.input_gates(features.squeeze(2)) + self.hidden_gates(h)
        enter, forget, cell, leave = gates.chunk(4, dim=1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(cell)
        h = torch.sigmoid(leave) * torch.tanh(c)
        return torch.sigmoid(self.head(torch.relu(h))), h, c


def oracle() -> torch.jit.ScriptModule:
    """The package's own TorchScript module, which takes 512 samples and keeps its state inside."""
    folder = package_folder("silero_vad", "silero-vad==6.2.3")
    return torch.jit.load(str(folder / "data" / "silero_vad.jit"), map_location="cpu").eval()


def build() -> nn.Module:
    """The network with the pretrained weights of the 16 kHz half."""
    theirs = {key.removeprefix("_model."): value for key, value in oracle().state_dict().items() if key.startswith("_model.")}
    weights = {
        "stft.weight": theirs["stft.forward_basis_buffer"],
        "input_gates.weight": theirs["decoder.rnn.weight_ih"],
        "input_gates.bias": theirs["decoder.rnn.bias_ih"],
        "hidden_gates.weight": theirs["decoder.rnn.weight_hh"],
        "hidden_gates.bias": theirs["decoder.rnn.bias_hh"],
        "head.weight": theirs["decoder.decoder.2.weight"].squeeze(2),
        "head.bias": theirs["decoder.decoder.2.bias"],
    }
    for i in range(4):
        for part in ("weight", "bias"):
            weights[f"encoder.{i}.{part}"] = theirs[f"encoder.{i}.reparam_conv.{part}"]
    model = Silero()
    model.load_state_dict(weights)
    return model.eval()


def recording() -> tuple[torch.Tensor, torch.Tensor]:
    """The frames, float32 ``(938, 576)``, and for each 1.0 where somebody speaks in its middle."""
    folder = package_folder("pyannote", "pyannote.audio==4.0.7") / "audio" / "sample"
    with wave.open(str(folder / "sample.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    count = -(-len(samples) // HOP)
    padded = torch.zeros(CONTEXT + count * HOP)
    padded[CONTEXT : CONTEXT + len(samples)] = torch.from_numpy(samples)
    middle = (torch.arange(count) + 0.5) * HOP / RATE
    speech = torch.zeros(count)
    for line in (folder / "sample.rttm").read_text(encoding="utf-8").splitlines():
        start, length = map(float, line.split()[3:5])
        speech[(middle >= start) & (middle < start + length)] = 1.0
    return padded.unfold(0, CONTEXT + HOP, HOP).contiguous(), speech


def segments() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(frames with the settling ones before them, labels)`` of every second; silence stands before the first."""
    frames, speech = recording()
    led = torch.cat([torch.zeros(SETTLE, CONTEXT + HOP), frames])
    starts = range(0, len(frames), SEGMENT)
    return [(led[i : i + SETTLE + SEGMENT], speech[i : i + SEGMENT]) for i in starts]


def listen(model: Callable[..., tuple[torch.Tensor, ...]], frames: torch.Tensor) -> torch.Tensor:
    """The probability of speech in each frame after the settling ones, the state handed from call to call."""
    h = c = torch.zeros(1, STATE)
    heard = []
    for frame in frames.split(1):
        probability, h, c = model(frame, h, c)
        heard.append(probability.reshape(1))
    return torch.cat(heard[SETTLE:])


def right(probability: torch.Tensor, speech: torch.Tensor) -> torch.Tensor:
    """For each frame whether speech was told from silence."""
    return (probability > 0.5) == (speech > 0.5)


def workload() -> trimtab.Workload:
    """One frame at a time must be fast; the shapes are fixed, as they are in a stream."""
    frames, _ = recording()
    return trimtab.Workload(
        name="silero",
        model=build,
        inputs=(frames[400:401], torch.zeros(1, STATE), torch.zeros(1, STATE)),
        evaluation=trimtab.Evaluation(data=segments(), score=right, run=listen),
        dynamic={},
    )
