"""Read the records of a torch zip archive by strict rules."""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Self

from trimtab.errors import IntegrityError

ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
)
"""Errors of the standard library for damaged or unusual zip files. An encrypted member raises RuntimeError."""

MAX_RECORDS = 100_000
MAX_INFLATED = 64 << 20
_NAME = re.compile(r"[A-Za-z0-9_.+@-]+(?:/[A-Za-z0-9_.+@-]+)*")


class Records(Mapping[str, bytes]):
    """Mapping of record names, without torch's top folder, to their bytes.

    torch stores records uncompressed, except TorchScript source. Other compressed records, encrypted or duplicate ones, and
    names that lead out of the archive are refused when the archive is opened.

    Raises:
        IntegrityError: the file is not a zip, is damaged, or is not written as torch writes it.
    """

    def __init__(self, source: str | os.PathLike[str] | BytesIO, *, deflated: tuple[str, ...] = ()) -> None:
        self.path = "The archive" if isinstance(source, BytesIO) else os.fspath(source)
        self._deflated = deflated
        try:
            self._bytes = len(source.getbuffer()) if isinstance(source, BytesIO) else os.path.getsize(source)
            self._zip = zipfile.ZipFile(source)
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        except ZIP_ERRORS as error:
            raise IntegrityError(f"{self.path} is not an archive as torch writes it: {error}.") from error
        try:
            self._infos = self._checked()
        except BaseException:
            self._zip.close()
            raise

    def __getitem__(self, name: str) -> bytes:
        return bytes(self.read(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def size(self, name: str) -> int:
        """Size of record ``name`` in bytes, as declared; :meth:`read` verifies it."""
        return self._info(name).file_size

    def read(self, name: str, limit: int | None = None) -> bytearray:
        """A copy of the bytes of ``name``, verified against size and checksum.

        Raises:
            IntegrityError: the record is missing, damaged or larger than ``limit`` bytes.
        """
        info = self._info(name)
        if limit is not None and info.file_size > limit:
            raise IntegrityError(f"{self.path}: the record {name!r} has {info.file_size} bytes; at most {limit} are read.")
        try:
            with self._zip.open(info) as stream:
                data = bytearray(stream.read())
        except (OSError, *ZIP_ERRORS) as error:
            raise IntegrityError(f"{self.path}: the record {name!r} is damaged: {error}.") from error
        if len(data) != info.file_size:
            raise IntegrityError(f"{self.path}: the record {name!r} has {len(data)} bytes instead of {info.file_size}.")
        return data

    def _info(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._infos[name]
        except KeyError:
            raise IntegrityError(f"{self.path}: the record {name!r} is missing.") from None

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        members = self._zip.infolist()
        if not members:
            raise IntegrityError(f"{self.path} is an archive without any record.")
        if len(members) > MAX_RECORDS:
            raise IntegrityError(f"{self.path} has {len(members)} records; at most {MAX_RECORDS} are read.")
        roots = {info.filename.partition("/")[0] for info in members}
        if len(roots) != 1:
            raise IntegrityError(
                f"{self.path}: the records lie in {len(roots)} folders, {', '.join(sorted(roots)[:3])}; want one."
            )
        found: dict[str, zipfile.ZipInfo] = {}
        for info in members:
            name = info.filename.partition("/")[2]
            self._check_member(info, name)
            if name in found:
                raise IntegrityError(f"{self.path}: the record {name!r} is there twice.")
            found[name] = info
        self._check_sizes(members)
        return found

    def _check_member(self, info: zipfile.ZipInfo, name: str) -> None:
        # orig_filename is the name in the file: zipfile cuts names at a zero byte, other readers may not
        whole = info.orig_filename
        if (
            whole != info.filename
            or not _NAME.fullmatch(whole)
            or any(set(part) == {"."} for part in whole.split("/"))
            or not name
        ):
            raise IntegrityError(f"{self.path}: the record name {info.orig_filename!r} is not one that torch writes.")
        if info.flag_bits & 1:
            raise IntegrityError(f"{self.path}: the record {name!r} is encrypted.")
        if info.compress_type == zipfile.ZIP_DEFLATED and name.endswith(self._deflated or ("\0",)):
            return
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise IntegrityError(f"{self.path}: the record {name!r} is compressed; torch stores it as it is.")

    def _check_sizes(self, members: list[zipfile.ZipInfo]) -> None:
        if sum(info.compress_size for info in members) > self._bytes:
            raise IntegrityError(f"{self.path}: its records claim more bytes than the {self._bytes} that the file has.")
        inflated = sum(info.file_size for info in members if info.compress_type != zipfile.ZIP_STORED)
        if inflated > MAX_INFLATED:
            raise IntegrityError(f"{self.path}: compressed records claim {inflated} bytes; at most {MAX_INFLATED} are read.")
