"""What holds for every test: few threads, no network, and a cache of its own instead of the user's."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# The same examples every time, so that no unlucky draw refuses a change that has nothing to do with it. New ones are sought by
# `pytest --hypothesis-profile=default`; what that finds becomes an @example. A busy machine is nobody's fault either.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Set before torch is imported, and seen by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin for work take the cores from tests that run beside
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each of some hundred processes that tests start would compile all of trimtab anew: a fifth of the CPU time that it takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if threading.current_thread() is threading.main_thread():
    # A shell starts what runs in the background without them, and every process that a test means to end would inherit it.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)

OWN_SERVERS = {"test_forkserver.py", "test_odd_processes.py", "test_interruptions.py"}

_SHARED = "TRIMTAB_TESTS_CACHE"
"""Environment variable that names the cache to the processes that run tests side by side: this machine is measured once."""
if _SHARED not in os.environ:
    _OWNER, _CACHE = os.getpid(), tempfile.mkdtemp(prefix="trimtab-tests-")
    os.environ[_SHARED] = os.environ["XDG_CACHE_HOME"] = _CACHE

    @atexit.register
    def _remove_cache() -> None:
        if os.getpid() == _OWNER:  # a forked child must not take it away from the others
            shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Draw alike in every run and in any order, for the same reason."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # which some tests want to see imported by what they test
        sys.modules["torch"].manual_seed(0)
    for name in ("trimtab.measure.host", "trimtab.study.study"):
        if (module := sys.modules.get(name)) is not None:
            module.other_load = lambda: None  # the machine counts as quiet, although other tests run beside


@pytest.fixture(autouse=True)
def one_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies of this process share the server of their workers, but for tests of the server itself."""
    if "trimtab.execution.fork_pool" in sys.modules and request.path.name not in OWN_SERVERS:
        from _server import launch_once  # trimtab, which some tests want to import themselves

        monkeypatch.setattr("trimtab.execution.fork_pool.Workers._launch", launch_once)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, and torch's threads as they were afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ``all_checks`` of the test's file found in each of two processes that train together."""
    from _ranks import on_ranks

    return on_ranks(request.module.all_checks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def peaks_known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The machine's peaks have been measured, so that a run ends with its share of them."""
    from _peaks import write_peaks  # trimtab, which some tests want to import themselves

    folder = tmp_path_factory.mktemp("cache")
    write_peaks(folder, 100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_CACHE", str(folder))
        yield


_OWN: dict[str, str | None] = {}
"""Tests that ran in a process of their own, by their names without parameters: what went wrong."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that sends signals to itself in a process of its own, so that they never end those that run the others.

    Its parameters share that process, which would import torch for each of them.
    """
    if pyfuncitem.get_closest_marker("own_process") is None or "TRIMTAB_OWN_PROCESS" in os.environ:
        return None
    name = pyfuncitem.nodeid.partition("[")[0]
    if name not in _OWN:
        asked = [item.nodeid for item in pyfuncitem.session.items if item.nodeid.partition("[")[0] == name]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked],
            cwd=pyfuncitem.config.rootpath,
            env=environment | {"TRIMTAB_OWN_PROCESS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        _OWN[name] = None if done.returncode == 0 else done.stdout + done.stderr
    assert _OWN[name] is None, _OWN[name]
    return True
