"""Generate ``run.py`` and ``README.md`` of an artifact from its manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimtab._internal.serialization import from_json
from trimtab._internal.text import counted
from trimtab.artifact.manifest import CLAIMS, GOLDEN, LABELS, FileFacts, Manifest
from trimtab.core.backend import Backend
from trimtab.core.measurement import Interval
from trimtab.hardware.system import KEEP_MEMORY

_RUN = '''"""{title}. Needs {packages}. `python run.py` checks the test vectors."""
import {modules}numpy, pathlib, sys
from safetensors.{tensors} import load_file
{memory}{script}
if __name__ == "__main__":
    here, found = pathlib.Path(__file__).resolve().parent, []
    run, golden = load(str(here / "model"), {threads}), load_file(here / "{golden}")
    for case in range({cases}):
        for i, (out, (s, most)) in enumerate(zip(run([golden[f"{{case}}.inputs.{{j}}"] for j in range({inputs})]), {limits})):
            a, b = (numpy.asarray({wide}, "c16") for t in (out, golden[f"{{case}}.outputs.{{i}}"]))
            off = abs(a - b) * (s / numpy.maximum(abs(b), s)) if s else (a != b) / max(b.size, 1)  # or the share that differs
            found.append((float(numpy.where(a == b, 0, off).max(initial=0) if s else off.sum()), most))
    print("largest error %.3g, allowed %.3g" % max(found, key=lambda pair: pair[0] - pair[1]))
    sys.exit(not all(error <= allowed for error, allowed in found))
'''


_MEMORY = f"""libc = ctypes.CDLL(None) if sys.platform == "linux" else None
for option, values in {dict(KEEP_MEMORY)}.items() if hasattr(libc, "mallopt") else ():  # the allocator keeps what is freed
    any(libc.mallopt(option, value) for value in values)
"""


_WRITES = """
plain = load
def load(folder, threads):  # inputs {places} are written to, by the runtime or with what it gives after its outputs
    run = plain(folder, threads)
    def call(arrays):
        found = list(run(arrays))
        for place, value in zip({places}, found[{outputs}:]):
            arrays[place][...] = value
        return found[:{outputs}]
    return call"""


def run_script(manifest: Manifest, backend: Backend) -> str:
    """Source of ``run.py``: the backend's loader, and a main program that checks the test vectors with numpy."""
    packages = ", ".join(dict.fromkeys((*backend.packages, "numpy", "safetensors")))
    in_torch, written = "torch" in backend.packages, manifest.signature.written
    writes = _WRITES.format(places=written, outputs=len(manifest.signature.outputs)) if written else ""
    title = " ".join(f"{manifest.workload}: {manifest.recipe_text}".split())[:60].replace("\\", "/").replace('"', "'")
    return _RUN.format(
        title=title,
        packages=packages,
        script=backend.script().strip("\n") + writes,
        tensors="torch" if in_torch else "numpy",
        wide="t.cdouble().resolve_conj()" if in_torch else "t",  # numpy has no bfloat16
        modules="ctypes, " if manifest.settings.memory.keep_freed else "",
        memory=_MEMORY if manifest.settings.memory.keep_freed else "",
        threads=manifest.settings.threads,
        golden=GOLDEN,
        cases=manifest.golden.cases,
        inputs=len(manifest.signature.inputs),
        limits=tuple(
            (float(f"{scale:.6g}"), float(f"{most * 1.01:.3g}"))
            for scale, most in zip(manifest.golden.scale, manifest.golden.tolerance, strict=True)
        ),
    )


def readme(manifest: Manifest, files: Mapping[str, FileFacts]) -> str:
    """Text of ``README.md``: how to run the model, its inputs and outputs, measurements and conditions."""
    parts = [
        f"# {manifest.workload}",
        f"`{manifest.recipe_text}`, made by trimtab {manifest.trimtab} on {manifest.created}.",
        *_how(manifest),
        "## Inputs and outputs",
        _list([f"`{spec}`" for spec in manifest.signature.inputs]),
        _writes(manifest),
        "gives",
        _list([f"`{spec}`" for spec in manifest.signature.outputs]),
        _dims(manifest),
        "## Evidence",
        _list(_figures(manifest)) or "Nothing was measured.",
        _list(list(manifest.notes)),
        "## Conditions",
        _list(_conditions(manifest)),
        "## Files",
        _list([f"`{name}`, {facts.size:,} bytes" for name, facts in files.items()]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _how(manifest: Manifest) -> list[str]:
    trust = ", trust=True" if manifest.native_code else ""
    packages = " ".join(dict.fromkeys((*manifest.packages, "numpy", "safetensors")))
    names = ", ".join(re.sub(r"\W", "_", spec.name) for spec in manifest.signature.inputs)
    kind = "torch tensors" if "torch" in manifest.packages else "numpy arrays"
    # not imported: that would write a file into this folder, whose files are listed
    call = f'call = runpy.run_path("run.py")["load"]("model", {manifest.settings.threads})\noutputs = call([{names}])'
    parts = [
        "## Run it",
        f"Without trimtab, in this folder (needs `{packages}`). Inputs and outputs are {kind}, in the order below:",
        f"```python\nimport runpy\n\n{call}\n```",
        "`python run.py` checks the test vectors. With trimtab:",
    ]
    parts.append(f'```python\nimport trimtab\n\nmodel = trimtab.load("."{trust})\n```')
    if manifest.native_code:
        parts.append(
            "The model's files are machine code. They run as they are loaded, and nothing can check them: load them only if "
            "you trust who built them."
        )
    return parts


def _dims(manifest: Manifest) -> str:
    bounds = [f"`{dim.name}` from {dim.bounds}" for dim in manifest.signature.dims]
    return f"Sizes that may differ from call to call: {', '.join(bounds)}." if bounds else "All sizes are fixed."


def _writes(manifest: Manifest) -> str:
    names = " and ".join(f"`{name}`" for name in manifest.signature.writes)
    return f"A call writes to {names}, as the original does. Give it memory that may be written to." if names else ""


def _figures(manifest: Manifest) -> list[str]:
    lines = []
    for name, value in manifest.evidence.items():
        ratio = from_json(Interval, value) if name in CLAIMS and value is not None else None
        if (text := _figure(value, claim=ratio.quoted() if ratio is not None and ratio.vague else None)) is not None:
            lines.append(f"{LABELS.get(name, name)}: {text}")
    errors, allowed = manifest.golden.measured, manifest.golden.tolerance
    for spec, error, most in zip(manifest.signature.outputs, errors, allowed, strict=True):
        if error is not None:
            lines.append(
                f"`{spec.name}`: off by at most {error:.3g} on {counted(manifest.golden.cases, 'test vector')}; {most:.3g} "
                "is allowed"
            )
    return lines


def _figure(value: Any, *, claim: str | None = None) -> str | None:
    """One figure of the evidence as text. ``claim`` replaces its number. ``None`` for values without a number and for tables,
    which are in ``evidence.json``."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.4g}"
    if not isinstance(value, Mapping):
        return None
    if "median" in value:
        return f"{value['median']:.4g} {value.get('unit', '')} (median of {value.get('n', '?')})"
    if value.get("value") is None:
        return None
    bounds = [f"{value[key]:.4g}" for key in ("low", "high", "upper") if value.get(key) is not None]
    return (claim or f"{value['value']:.4g}") + (f" (95% interval {' to '.join(bounds)})" if bounds else "")


def _conditions(manifest: Manifest) -> list[str]:
    here = manifest.environment
    lines = [f"CPU {here.cpu}, {here.usable_cores} usable cores", f"{here.os}, Python {here.python}"]
    lines += [str(gpu) for gpu in here.gpus]
    lines += [f"{name} {here.versions[name]}" for name in manifest.packages if name in here.versions]
    lines.append(f"threads: {manifest.settings.threads or 'the default of the runtime'}")
    if (inputs := manifest.evidence.get("inputs")) is not None:
        lines.append(f"inputs that were timed: `{inputs}`")
    return lines


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
