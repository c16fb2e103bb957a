from __future__ import annotations

import contextlib
import pathlib
import time

import psutil
import pytest
import torch

from trimtab.measure import memory
from trimtab.measure.memory import PeakMemory, rss_mb

pytestmark = pytest.mark.alone

TENSOR_MB = 120


def use(megabytes: int) -> None:
    """Touch that much memory, hold it for a moment, and let it go."""
    block = torch.ones(megabytes * 250_000)
    time.sleep(0.03)
    assert block.sum() > 0


def test_rss() -> None:
    assert rss_mb() == pytest.approx(psutil.Process().memory_info().rss / 1e6, rel=0.2)


def test_a_peak_that_is_gone_at_the_end_is_seen() -> None:
    with PeakMemory() as peak:
        use(TENSOR_MB)
    assert peak.result.host_mb == pytest.approx(TENSOR_MB, abs=25)
    assert peak.result.idle_mb > 20
    assert (peak.result.device_mb is None) == (not torch.cuda.is_initialized())


def test_an_earlier_higher_peak_does_not_count() -> None:
    use(2 * TENSOR_MB)
    with PeakMemory() as peak:
        use(TENSOR_MB // 4)
    assert peak.result.host_mb < TENSOR_MB


def test_without_a_mark_that_can_be_reset_it_samples(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(4 * TENSOR_MB)  # the mark of the whole life lies above what follows, and must not be taken for it
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with PeakMemory() as peak:
        use(TENSOR_MB)
    assert peak.result.method == "samples every 2 ms"
    assert peak.result.host_mb == pytest.approx(TENSOR_MB, abs=25)


def test_a_reset_that_does_nothing_is_noticed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(4 * TENSOR_MB)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    assert not memory._reset_peak()


def test_without_proc_the_life_long_mark_helps(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    higher = memory.peak_rss_mb() - rss_mb() + 3 * TENSOR_MB
    with PeakMemory() as peak:
        use(int(higher))
    assert peak.result.host_mb == pytest.approx(int(higher), abs=40)


def test_the_result_is_not_there_before_the_end_and_survives_an_error() -> None:
    peak = PeakMemory()
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = peak.result
    with contextlib.suppress(KeyError), peak:
        use(TENSOR_MB)
        raise KeyError
    assert peak.result.host_mb > TENSOR_MB / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_peak_of_the_cuda_allocator() -> None:
    torch.zeros(1, device="cuda")
    with PeakMemory() as peak:
        torch.ones(25_000_000, device="cuda")
    assert peak.result.device_mb == pytest.approx(100, rel=0.05)
