"""Settings that a probe applies to an unmodified script, and edits that a person applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from trimtab._internal.validation import by_name


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What changes in one ``DataLoader``. ``None`` leaves the script's argument."""

    workers: int | None = None
    persistent: bool | None = None
    prefetch: int | None = None
    pin_memory: bool | None = None
    batch_fetch: bool = False
    """One ``dataset[places]`` per batch instead of an item at a time; only where both are equal, bit for bit."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """What changes in a script. The default changes nothing."""

    threads: int | None = None
    """torch's threads within an operator, whatever the script sets."""
    optimizer: Literal["fused", "foreach"] | None = None
    set_to_none: bool = False
    """Whether ``zero_grad`` frees gradients instead of filling them with zeros."""
    no_grad: bool = False
    """Whether modules in evaluation mode compute without a graph."""
    trim_padding: bool = False
    """Whether columns that the attention mask excludes in every row are cut off, and the outputs padded again."""
    channels_last: bool = False
    autocast: Literal["bfloat16", "float16"] | None = None
    compile: bool = False
    compile_dynamic: bool = False
    """Whether what the script compiles with ``torch.compile`` is compiled for dynamic sizes, whatever the script asks for."""
    debug_off: bool = False
    """Whether anomaly mode stays off."""
    float32: bool = False
    """Whether float64 parameters and inputs of modules become float32."""
    keep_freed: bool = False
    """Whether the C library keeps freed memory, from the start of the process on."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the process."""
    loaders: Mapping[str, LoaderSettings] = dataclasses.field(default_factory=dict)
    """By the line that makes the loader."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Path -> new text of files of the script, to measure the gain of a patch. Only in an overlay, so that the files themselves
    stay; it is never applied for use."""
    without: Literal["data", "logging", "synchronization", "evaluation", "saving", "lines"] | None = None
    """Leaves a phase out, to measure at most how much a remedy for it can bring. ``data`` hands out the same batches again;
    ``lines`` makes each of :attr:`lines` return its first value again. It is never applied for use."""
    lines: tuple[str, ...] = ()
    """Lines of the script, such as ``train.py:35``, that are measured in a copy in which they can be left out."""

    @property
    def fresh(self) -> bool:
        """Whether these settings need a new process; others can be switched between two steps."""
        return bool(self.loaders or self.environment or self.keep_freed or self.compile_dynamic or self.files)

    def changes(self) -> dict[str, Any]:
        """The fields with a value other than the default."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != getattr(ScriptSettings(), f.name)}

    def merged(self, other: ScriptSettings) -> ScriptSettings:
        """The settings of both; ``other`` wins where both set a field."""
        loaders = dict(self.loaders)
        for site, found in other.loaders.items():
            values = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
            given = {n: value for n, value in values.items() if value is not None and (n, value) != ("batch_fetch", False)}
            loaders[site] = dataclasses.replace(loaders.get(site, LoaderSettings()), **given)
        changed = other.changes() | {"loaders": loaders, "environment": {**self.environment, **other.environment}}
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeEdit:
    """A change of the script's text that a person makes; ``trimtab doctor --write`` writes complete ones as a patch."""

    site: str
    advice: str
    """What to write there, as a sentence."""
    replacement: str | None = None
    """The new text of that line (several lines are divided by newlines); ``None`` if only the person can write it."""
