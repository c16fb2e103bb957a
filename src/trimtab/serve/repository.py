"""The models of a server: loaded, replaced by a newer version without loss, unloaded."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from trimtab.serve.canary import CanaryStats, TrafficSplit, run_canary
from trimtab.serve.connection import StartError
from trimtab.serve.deployment import Deployment, Layout
from trimtab.serve.metrics import ModelMetrics
from trimtab.serve.options import Options
from trimtab.serve.protocol import Refusal
from trimtab.serve.shadow import Shadow
from trimtab.serve.tuning import Tuning, tune_layout

Log = Callable[..., None]


class Model:
    """A name, the folder of its artifact, and the version that serves."""

    def __init__(self, name: str, path: pathlib.Path, options: Options, log: Log) -> None:
        self.name, self.path = name, path
        self.active: Deployment | None = None
        self.canary: Deployment | None = None
        """The new version of a canary, which gets a share of the requests."""
        self.version = 0
        self.draining = False
        self.reason = ""
        """Why no version serves, or why the last load failed."""
        self._split: TrafficSplit | None = None
        self.retiring: list[Deployment] = []
        self.tuning: Tuning | None = None
        self._options, self._log = options, log
        self._lock, self._newest = asyncio.Lock(), 0

    @property
    def state(self) -> str:
        """The state as a term of the protocol."""
        if self.active is None:
            return "LOADING" if self._lock.locked() else "UNAVAILABLE"
        return "READY" if self.active.ready else "UNAVAILABLE"

    async def load(self) -> None:
        """Start a new version beside the one that serves, switch to it when it is ready, and drain the old one. With
        ``--canary`` the new version gets a share of the requests first.

        Raises:
            StartError: the new version did not become ready, or was withdrawn after its canary; the old one serves on.
        """
        async with self._lock:
            options, version = self._options, self._newest + 1
            layout = self.active.layout if self.active is not None else await self._layout()
            deployment = Deployment(
                self.path,
                layout,
                ModelMetrics(self.name, str(version)),
                self._log,
                trust=options.trust,
                queue=options.queue,
                max_wait_s=options.max_wait_s,
                shadow=self._shadow(),
            )
            sentence = ""
            try:
                await deployment.start()
                self._newest = version
                if self.active is not None and options.canary:
                    sentence = await self._run_canary(self.active, deployment)
            except StartError as error:
                self.reason = str(error)
                self._log("version not loaded", model=self.name, version=str(version), reason=str(error))
                raise
            old, self.active, self.version, self.reason = self.active, deployment, version, ""
        why = {"reason": sentence} if sentence else {}
        self._log("version serves", model=self.name, version=str(version), instances=layout.instances, **why)
        await self._retire(old)

    async def _run_canary(self, old: Deployment, new: Deployment) -> str:
        """Send a share of the requests to ``new`` for a time. The sentence why it takes over.

        Raises:
            StartError: ``new`` is withdrawn, and was stopped.
        """
        options, version = self._options, new.metrics.version
        stats = new.metrics.canary, old.metrics.canary = CanaryStats(), CanaryStats()
        try:
            if new.interface != old.interface:
                raise StartError(
                    "UsageError",
                    "The new version has other inputs or outputs than the old one, so that they cannot be compared on the same "
                    "requests. Start the server anew with it.",
                )
            self._split = TrafficSplit(options.canary, new.layout.rows, *stats)
            self.canary, share = new, f"{100 * options.canary:g}%"
            self.reason = f"Version {version} gets {share} of the requests for {options.canary_time_s:g} s."
            self._log("canary", model=self.name, version=version, share=share, seconds=options.canary_time_s)
            decision = await run_canary(*stats, options.canary_time_s, options.canary_slowdown, lambda: self.draining)
            if not decision.takes_over:
                raise StartError("UsageError", decision.sentence)
        except BaseException:  # cancelled, too: no process is left
            self.canary = None
            await self._retire(new)
            raise
        finally:
            self.canary = self._split = new.metrics.canary = old.metrics.canary = None
        return decision.sentence

    async def _layout(self) -> Layout:
        """The layout of the options, or the best measured one if the options leave a value open."""
        options = self._options
        if options.instances is not None and options.threads is not None and options.batch is not None:
            return Layout(options.instances, options.threads, options.batch)
        self.tuning = await tune_layout(self.path, options, self._make_for_tuning, self._log)
        return self.tuning.layout

    def _shadow(self) -> Shadow | None:
        options = self._options
        if not options.shadow:
            return None
        return Shadow(self.path, options.shadow_from.get(self.name), options.shadow, trust=options.trust, log=self._log)

    def _make_for_tuning(self, layout: Layout) -> Deployment:
        metrics, trust = ModelMetrics(self.name, "measured"), self._options.trust
        return Deployment(self.path, dataclasses.replace(layout, rows=1), metrics, self._log, trust=trust)

    async def unload(self) -> None:
        """Stop serving. Requests in the queue are answered first."""
        async with self._lock:
            old, self.active, self.reason = self.active, None, "unloaded"
        await self._retire(old)

    async def _retire(self, old: Deployment | None) -> None:
        if old is None:
            return
        self.retiring.append(old)
        await old.drain()
        await old.stop()
        self.retiring.remove(old)

    def serving(self, version: str | None = None) -> Deployment:
        """The version that serves.

        Raises:
            Refusal: 404 for another version, or if none is loaded; 503 while one is being loaded.
        """
        if self.canary is not None and version == self.canary.metrics.version:
            return self.canary
        if version is not None and version != str(self.version):
            raise Refusal(404, f"There is no version {version!r} of {self.name}; {self.version} is served.")
        if self.active is None:
            if self._lock.locked():
                raise Refusal(503, f"The model {self.name} is being loaded.", 2)
            raise Refusal(404, f"The model {self.name} is not loaded: {self.reason or 'nothing was loaded yet'}.")
        return self.active

    def route(self, version: str | None = None) -> Deployment:
        """The version for the next request: the active one, or the canary for its share of the requests.

        Raises:
            Refusal: as :meth:`serving`.
        """
        on_trial = version is None and self._split is not None and self._split.next_is_new()
        if on_trial and self.canary is not None and self.canary.ready:
            return self.canary
        return self.serving(version)


class Repository:
    """All models of a server."""

    def __init__(self, options: Options, log: Log) -> None:
        self.options = options
        self.models = {name: Model(name, path, options, log) for name, path in options.models.items()}
        self.draining = False
        self.log = log

    @property
    def ready(self) -> bool:
        """Whether every model that was not unloaded serves."""
        models = [model for model in self.models.values() if model.reason != "unloaded"]
        return not self.draining and all(model.state == "READY" for model in models)

    def model(self, name: str) -> Model:
        """The model ``name``. Raises ``Refusal`` 404 for an unknown name."""
        if name not in self.models:
            raise Refusal(404, f"There is no model {name!r:.200}. Served: {', '.join(self.models)}.")
        return self.models[name]

    async def load_all(self) -> None:
        """Load every model, one after another: their measurements must not disturb each other.

        Raises:
            StartError: one of them cannot be served.
        """
        for model in self.models.values():
            await model.load()

    async def reload(self) -> None:
        """Load a new version of every model from its folder; one that fails leaves the old version serving."""
        for model in self.models.values():
            try:
                await model.load()
            except StartError:
                continue

    async def watch(self, every_s: float) -> None:
        """Poll the folders of the models. A model is reloaded when its files have changed and were stable for one poll."""
        loaded = {name: _files(model.path) for name, model in self.models.items()}
        last = dict(loaded)
        while True:
            await asyncio.sleep(every_s)
            for name, model in self.models.items():
                now = _files(model.path)
                if now != loaded[name] and now == last[name] and model.active is not None:
                    loaded[name] = now
                    self.log("new files", model=name, path=str(model.path))
                    try:
                        await model.load()
                    except StartError:
                        continue  # the log has the reason; the old version serves on
                last[name] = now

    def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        """The repository index of the protocol."""
        rows = [
            {"name": model.name, "version": str(model.version), "state": model.state, "reason": model.reason}
            for model in self.models.values()
        ]
        return [row for row in rows if row["state"] == "READY" or not ready_only]

    def deployments(self) -> Iterator[Deployment]:
        """Every version that runs."""
        for model in self.models.values():
            yield from [one for one in (model.active, model.canary) if one is not None]
            yield from model.retiring

    def metrics(self) -> Iterator[tuple[ModelMetrics, int, list[int]]]:
        """Metrics, queue depth and process ids of each version."""
        for one in self.deployments():
            yield one.metrics, one.batcher.size, [instance.pid for instance in one.instances if instance.state == "ready"]

    async def drain(self) -> None:
        """Take no further requests, and wait until all accepted ones are answered."""
        self.draining = True
        for model in self.models.values():
            model.draining = True
        await asyncio.gather(*[deployment.drain() for deployment in self.deployments()])

    async def stop(self) -> None:
        """Stop all instances."""
        self.draining = True
        await asyncio.gather(*[deployment.stop() for deployment in self.deployments()])


def _files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Size and modification time in ns of every file below ``folder``."""
    found = {}
    for path in folder.rglob("*"):
        try:
            facts = path.stat()
        except OSError:  # being replaced
            continue
        found[str(path)] = (facts.st_size, facts.st_mtime_ns)
    return found
