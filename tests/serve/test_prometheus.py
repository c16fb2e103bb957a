"""A real Prometheus scrapes a server, and every expression of the Grafana dashboard gives series."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from _serving import Server, write

ROOT = pathlib.Path(__file__).parents[2]
VARIABLES = {"$job": ".*", "$model": ".*", "$__rate_interval": "10s"}
"""What Grafana fills in."""


def program() -> str:
    """Prometheus: the installed one, or Debian's package, which is unpacked into the cache and not installed."""
    if (found := shutil.which("prometheus")) is not None:
        return found
    cache = pathlib.Path(os.environ.get("TRIMTAB_TOOLS", pathlib.Path.home() / ".cache" / "trimtab-tools"))
    binary = cache / "usr" / "bin" / "prometheus"
    if not binary.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            pytest.skip("there is no prometheus here, and no apt-get to get it with")
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", "prometheus"], cwd=cache, capture_output=True, check=False)
        packages = sorted(cache.glob("prometheus_*.deb"))
        if done.returncode or not packages:
            pytest.skip("there is no prometheus here, and apt-get does not get it: apt-get install prometheus")
        subprocess.run(["dpkg", "-x", str(packages[-1]), str(cache)], check=True)
    return str(binary)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    made, flags = write(folder / "artifact", original=True), ["--instances", "1", "--threads", "1", "--batch", "8"]
    with Server(folder / "log", str(made.path), *flags, "--shadow", "100%") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes the server every second."""
    folder, binary = tmp_path_factory.mktemp("prometheus"), program()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = f"scrape_configs: [{{job_name: trimtab, static_configs: [{{targets: ['127.0.0.1:{server.port}']}}]}}]"
    (folder / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{target}\n")
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        words = [binary, *flags, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def query(address: str, expression: str) -> Any:
    """The series that an expression gives now; nothing while Prometheus starts."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={urllib.parse.quote(expression)}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except (ConnectionError, urllib.error.HTTPError, urllib.error.URLError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 400:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return []


@pytest.mark.long
def test_every_expression_of_the_dashboard_gives_series(server: Server, prometheus: str) -> None:
    dashboard = json.loads((ROOT / "docs" / "serving-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for name, value in VARIABLES.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    assert not [expression for expression in expressions if "$" in expression]
    missing, end = set(expressions), time.monotonic() + 60
    while missing and time.monotonic() < end:
        assert server.infer([[1.0] * 16])[0] == 200
        for expression in sorted(missing):
            found = query(prometheus, expression)
            if found and all(series["value"][1] != "NaN" for series in found):
                missing.remove(expression)
        time.sleep(0.2)
    assert missing == set()
    assert float(query(prometheus, 'sum(trimtab_requests_total{outcome="ok"})')[0]["value"][1]) > 0
