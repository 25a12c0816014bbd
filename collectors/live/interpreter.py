"""The Python of another process: which version it is, and where the functions are that an injection needs.

Nothing is asked of the process and nothing of it is stopped. Addresses come from the dynamic symbols of the files
that it has mapped (they are there in stripped files, too) and are compared with its memory before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

VERSION: Final = "Py_Version"
"""A number that every CPython since 3.11 exports: 0x030b07f0 is 3.11.7."""
PENDING: Final = "Py_AddPendingCall"
RUN: Final = "PyRun_SimpleString"
MAP: Final = "mmap"
UNMAP: Final = "munmap"
_PYTHON: Final = ("libpython", "python")
_LIBC: Final = ("libc.so", "libc-", "ld-musl", "libc.musl")
_COMPARED: Final = 16
"""Bytes of each function that must be those of its file."""


class NoInterpreter(Exception):
    """It cannot be said where the functions are; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """CPython in a process. Addresses are those of the process."""

    version: tuple[int, int, int]
    addresses: dict[str, int]

    @property
    def shown_version(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A file that the process has mapped from its beginning, and where."""

    path: str
    start: int


def interpreter_of(pid: int) -> Interpreter:
    """The CPython in process ``pid``. Raises :class:`NoInterpreter` or OSError (no permission, ended)."""
    addresses: dict[str, int] = {}
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for mapped in _mapped_files(pid):
            addresses |= {n: a for n, a in _addresses_in(pid, mapped, memory).items() if n not in addresses}
        if PENDING not in addresses or RUN not in addresses:
            raise NoInterpreter("it shows no symbols of CPython")
        if VERSION not in addresses:
            raise NoInterpreter("its Python is 3.10 or older")
        memory.seek(addresses[VERSION])
        version = int.from_bytes(memory.read(4), "little")
    if MAP not in addresses or UNMAP not in addresses:
        raise NoInterpreter("its C library shows no mmap")
    return Interpreter((version >> 24, version >> 16 & 255, version >> 8 & 255), addresses)


def _mapped_files(pid: int) -> Iterator[_Mapped]:
    seen: set[str] = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(None, 5)
        if not path or not path[0].startswith("/") or int(offset, 16) != 0 or path[0] in seen:
            continue
        name = path[0].rpartition("/")[2]
        if name.startswith((*_PYTHON, *_LIBC)):
            seen.add(path[0])
            yield _Mapped(path[0], int(span.partition("-")[0], 16))


def _addresses_in(pid: int, mapped: _Mapped, memory: Any) -> dict[str, int]:
    if mapped.path.endswith(" (deleted)"):
        raise NoInterpreter(f"{mapped.path.removesuffix(' (deleted)')} was replaced since it was started")
    found: dict[str, int] = {}
    try:
        with Path(f"/proc/{pid}/root{mapped.path}").open("rb") as file:
            elf = ELFFile(file)
            symbols: Any = elf.get_section_by_name(".dynsym")
            if symbols is None:
                return {}
            bias = mapped.start - _first_address(elf) if elf["e_type"] == "ET_DYN" else 0
            for name in (VERSION, PENDING, RUN, MAP, UNMAP):
                for symbol in symbols.get_symbol_by_name(name) or ():
                    if symbol["st_shndx"] == "SHN_UNDEF":
                        continue
                    address = symbol["st_value"]
                    if name != VERSION:
                        _compare(elf, address, memory, address + bias, f"{name} of {mapped.path}")
                    found[name] = address + bias
    except FileNotFoundError as error:
        raise NoInterpreter(f"{mapped.path} cannot be read from here") from error
    except ELFError as error:
        raise NoInterpreter(f"{mapped.path} is not what it seems: {error}") from error
    return found


def _first_address(elf: Any) -> int:
    for segment in elf.iter_segments("PT_LOAD"):
        if segment["p_offset"] == 0:
            return int(segment["p_vaddr"])
    raise NoInterpreter("its file is laid out in an unknown way")


def _compare(elf: Any, address: int, memory: Any, there: int, what: str) -> None:
    """A function must lie in memory as it lies in the file, or the address is wrong."""
    for offset in elf.address_offsets(address, _COMPARED):
        elf.stream.seek(offset)
        expected = elf.stream.read(_COMPARED)
        seen = b""
        with suppress(OSError, ValueError):
            memory.seek(there)
            seen = memory.read(_COMPARED)
        if seen != expected:
            raise NoInterpreter(f"{what} is not where its file says")
