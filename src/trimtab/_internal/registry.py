"""Find a class by name: a folder of the package first, then entry points of installed plug-ins."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from trimtab._internal.user_code import user_code
from trimtab.errors import UnknownNameError, UsageError, WorkloadError

T = TypeVar("T")


class Registry(Mapping[str, type[T]], Generic[T]):
    """A lazy mapping from name to class.

    The modules of ``package`` without a leading underscore are the entries. The file name is the entry's name, and the file
    defines exactly one concrete subclass of ``base``. The entry-point group named ``package`` adds plug-ins.
    Listing names imports no module of the folder; a look-up imports one. Plug-ins that cannot be loaded are not listed;
    :attr:`broken` gives the reasons.

    Raises:
            UnknownNameError: no entry has that name; the message lists the known names.
            UsageError: two sources claim one name, a module does not define its class, or a plug-in cannot be loaded.
    """

    def __init__(self, kind: str, package: str, base: type[T]) -> None:
        self.kind = kind
        self.package = package
        self.base = base

    def __getitem__(self, name: str) -> type[T]:
        sources = self._sources
        if name not in sources:
            raise UnknownNameError(f"There is no {self.kind} {name!r}. Known are: {', '.join(sorted(sources))}.")
        source = sources[name]
        if isinstance(source, EntryPoint):
            return self._checked(self._loaded(source), name, source)
        return self._checked(self._single(importlib.import_module(source), source), name, source)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._sources.keys() - self.broken.keys()))

    def __len__(self) -> int:
        return len(self._sources) - len(self.broken)

    @functools.cached_property
    def plugins(self) -> dict[str, type[T]]:
        """The classes that come from entry points and can be loaded."""
        points = [name for name, source in self._sources.items() if isinstance(source, EntryPoint)]
        return {name: self[name] for name in points if name not in self.broken}

    @functools.cached_property
    def broken(self) -> dict[str, str]:
        """The plug-ins that cannot be loaded, each with the reason. A broken package must not make every command fail."""
        found = {}
        for name, source in self._sources.items():
            if isinstance(source, EntryPoint):
                try:
                    self._checked(self._loaded(source), name, source)
                except UsageError as error:
                    found[name] = str(error)
        return found

    def _loaded(self, point: EntryPoint) -> Any:
        try:
            with user_code("it"):
                return point.load()
        except WorkloadError as error:
            why = error.__cause__
            raise UsageError(
                f"The {self.kind} {point.name!r}, {_origin(point)}, cannot be loaded: {type(why).__name__}: {why}. Update or "
                "uninstall that package."
            ) from why

    @functools.cached_property
    def _sources(self) -> dict[str, str | EntryPoint]:
        folder = importlib.import_module(self.package)
        sources: dict[str, str | EntryPoint] = {
            module.name: f"{self.package}.{module.name}"
            for module in pkgutil.iter_modules(folder.__path__)
            if not (module.ispkg or module.name.startswith("_"))
        }
        for point in entry_points(group=self.package):
            if point.name in sources:
                raise UsageError(
                    f"Two sources claim the {self.kind} {point.name!r}: {_origin(sources[point.name])} and {_origin(point)}. "
                    "Uninstall one of them or rename its entry point."
                )
            sources[point.name] = point
        return sources

    def _single(self, module: Any, source: str) -> Any:
        found = [
            cls
            for cls in vars(module).values()
            if inspect.isclass(cls)
            and issubclass(cls, self.base)
            and cls.__module__ == module.__name__
            and not inspect.isabstract(cls)
        ]
        if len(found) != 1:
            names = ", ".join(cls.__name__ for cls in found) or "none"
            raise UsageError(f"{source} must define exactly one {self.kind}, but defines {names}.")
        return found[0]

    def _checked(self, found: Any, name: str, source: str | EntryPoint) -> type[T]:
        if not (inspect.isclass(found) and issubclass(found, self.base)):
            raise UsageError(f"{_origin(source)} is {found!r}, which is not a subclass of {self.base.__name__}. Name one.")
        if (own := getattr(found, "name", None)) != name:
            raise UsageError(f"{_origin(source)} is registered as {name!r} but calls itself {own!r}. Make them one name.")
        return found


def _origin(source: str | EntryPoint) -> str:
    if isinstance(source, str):
        return source
    package = source.dist.name if source.dist else "an unknown package"
    return f"{source.value} (entry point of {package})"
