"""Generate ``run.py`` and ``README.md`` of an artifact from its manifest."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trimtab._internal.serialization import from_json
from trimtab._internal.text import counted
from trimtab.artifact.manifest import CLAIMS, GOLDEN, LABELS, FileFacts, Manifest
from trimtab.core.backend import Backend
from trimtab.core.measurement import Comparison, Interval
from trimtab.core.signature import TensorSpec
from trimtab.hardware.system import KEEP_MEMORY

_RUN = '''"""{title}. Needs {packages}.

In this folder, with {kind} in the order of README.md:
    {call}
`python run.py` checks the test vectors.
"""
import {modules}numpy, pathlib, sys
from safetensors.{tensors} import load_file
{memory}{script}
def check():  # whether the outputs for the test vectors are those of the original, within what is allowed
    here, found = pathlib.Path(__file__).resolve().parent, []
    run, golden = load(str(here / "model"), {threads}), load_file(here / "{golden}")
    for case in range({cases}):
        for i, (out, (s, most)) in enumerate(zip(run([golden[f"{{case}}.inputs.{{j}}"] for j in range({inputs})]), {limits})):
            a, b = (numpy.asarray({wide}, "c16") for t in (out, golden[f"{{case}}.outputs.{{i}}"]))
            off = abs(a - b) * (s / numpy.maximum(abs(b), s)) if s else (a != b) / max(b.size, 1)  # or the share that differs
            found.append((float(numpy.where(a == b, 0, off).max(initial=0) if s else off.sum()), most))
    print("largest error %.3g, allowed %.3g" % max(found, key=lambda pair: pair[0] - pair[1]))
    return all(error <= allowed for error, allowed in found)
if __name__ == "__main__":
    sys.exit(not check())
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
        kind=_types(manifest),
        call="\n    ".join(_call("load", manifest)),
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
        *_usage(manifest),
        "## Inputs and outputs",
        _list([f"`{spec}`" for spec in manifest.signature.inputs]),
        _writes(manifest),
        "gives",
        _list([f"`{dataclasses.replace(spec, name=name)}`" for spec, name in _outputs(manifest)]),
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


def _outputs(manifest: Manifest) -> Iterator[tuple[TensorSpec, str]]:
    return zip(manifest.signature.outputs, manifest.signature.output_names, strict=True)


def _types(manifest: Manifest) -> str:
    return "torch tensors" if "torch" in manifest.packages else "numpy arrays"


def _call(load: str, manifest: Manifest) -> tuple[str, str]:
    """The two lines that load the model without trimtab and call it."""
    given, found = (
        ", ".join(map(_identifier, names))
        for names in ([spec.name for spec in manifest.signature.inputs], manifest.signature.output_names)
    )
    found = f"[{found}]" if len(manifest.signature.outputs) == 1 else found
    return f'call = {load}("model", {manifest.settings.threads})', f"{found} = call([{given}])"


def _identifier(name: str) -> str:
    """``name`` as a name of Python."""
    word = re.sub(r"\W", "_", name)
    word = word if word.isidentifier() else f"_{word}"
    return f"{word}_" if keyword.iskeyword(word) else word


def _usage(manifest: Manifest) -> list[str]:
    trust = ", trust=True" if manifest.native_code else ""
    packages = " ".join(dict.fromkeys((*manifest.packages, "numpy", "safetensors")))
    # not imported: that would write a file into this folder, whose files are listed
    call = "\n".join(_call('runpy.run_path("run.py")["load"]', manifest))
    parts = [
        "## Run it",
        f"Without trimtab, in this folder (needs `{packages}`). Inputs and outputs are {_types(manifest)}, in the order below:",
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
    for name, error, most in zip(manifest.signature.output_names, errors, allowed, strict=True):
        if error is not None:
            lines.append(
                f"`{name}`: off by at most {error:.3g} on {counted(manifest.golden.cases, 'test vector')}; {most:.3g} "
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
    if (timed := manifest.evidence.get("comparison")) is not None:
        lines.append(f"while it was timed: {from_json(Comparison, timed).conditions}")
    if manifest.evidence.get("thread_limit") is not None:
        lines.append(
            "Other processes used the machine, so both were timed with one thread. `trimtab verify .` on a quiet machine "
            "writes what it measures into a file beside this folder, and `trimtab report` shows it"
        )
    if (inputs := manifest.evidence.get("inputs")) is not None:
        lines.append(f"inputs that were timed: `{inputs}`")
    return lines


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
