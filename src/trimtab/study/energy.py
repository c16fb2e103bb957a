"""Energy per call of the artifact and of the original in it, if this machine has energy counters."""

from __future__ import annotations

from trimtab._internal.serialization import from_json
from trimtab.errors import TrimtabError
from trimtab.execution.trial_runner import RIVALS
from trimtab.measure.energy import Energy, Meter, Power, energy_meter
from trimtab.measure.remote import RemoteRunner
from trimtab.study.study import Study

READY_S = 60.0
"""Time limit for loading a model, in seconds."""


def energy(study: Study, artifact: str, seconds: tuple[float, float]) -> Energy:
    """Joules of a call of the ``artifact`` and of its original, or the reason why they are unknown.

    Nothing runs on a machine without counters. A study measures an artifact once.

    Args:
        seconds: duration of a call of each, from the confirmation.
    """
    meter = energy_meter()
    if isinstance(meter, str):
        return Energy(reason=meter)
    key = f"energy {seconds[0]:.9g} {seconds[1]:.9g}"
    if (known := study.storage.get(key)) is not None:
        return from_json(Energy, known)
    if study.interrupted():
        return Energy(reason="Energy was not measured: the study was interrupted.")
    try:
        found = _measured(study, artifact, seconds, meter)
    except (TrimtabError, OSError) as error:
        return Energy(reason=f"Energy was not measured: {error}")
    study.storage.put(key, found)
    return found


def _measured(study: Study, artifact: str, seconds: tuple[float, float], meter: Meter) -> Energy:
    power = Power(meter)
    with study.runner.servers(f"{RIVALS}/energy") as servers:
        for (name, baseline), call_s in zip((("subject", False), ("rival", True)), seconds, strict=True):
            servers.start_job(name, {"artifact": artifact, "trust": True, "baseline": baseline})  # just written by this study
            servers.ready(name, seconds=READY_S, interrupted=study.interrupted)
            power.measure(name, RemoteRunner(servers.addresses[name], servers.authkey), call_s)
            servers.stop(name)
    return power.energy(*seconds)
