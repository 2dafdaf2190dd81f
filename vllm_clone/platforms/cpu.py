"""What the operating system grants this process: cores and memory. No torch."""

import ctypes
import functools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Control groups without a limit report values around 2**63, or "max"."""


def usable_cores() -> set[int]:
    """Numbers of the cores in this thread's affinity mask."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def num_usable_cores() -> int:
    """How many threads can run at once: the cores of the affinity mask, cut to the control group's CPU quota."""
    cores = len(usable_cores())
    for group in _cgroup_directories():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def total_memory() -> int:
    """Bytes of memory of the machine, or of the tightest enclosing control group."""
    limits = [limit for limit, _, _ in _memory_limits()]
    return min([_meminfo("MemTotal"), *limits])


def available_memory() -> int:
    """Bytes this process could still allocate without swapping, within every enclosing control group."""
    rooms = [limit - usage + reclaimable for limit, usage, reclaimable in _memory_limits()]
    return max(min([_meminfo("MemAvailable"), *rooms]), 0)


def resident_memory() -> int:
    """Bytes of memory this process occupies."""
    pages = _read(Path("/proc/self/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def populate(address: int, num_bytes: int) -> bool:
    """Have the system provide memory as if it had been written; False where it cannot.

    The content stays as it is. ``address`` must be that of a page.
    """
    populate_write = 23  # MADV_POPULATE_WRITE, since Linux 5.14
    return _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(populate_write)) == 0


class MappedFile:
    """A file that a library maps into this process, to give back the memory of what was read.

    It must stay mapped, and nothing may write to the mapping, as long as this object is used.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.path.realpath(path)
        self._ranges: list[tuple[int, int]] = []

    def drop_pages(self) -> None:
        """Take the file's pages out of this process; they are read again when touched.

        Not those of one range alone: the system also maps some around each that is touched. If the library has copied
        the file instead of mapping it, nothing happens.
        """
        self._ranges = self._ranges or _mapped_ranges(self._path)
        for start, end in self._ranges:  # advice: what a system refuses costs only memory
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_DONTNEED))


def _mapped_ranges(path: str) -> list[tuple[int, int]]:
    """Addresses at which a file is mapped; none where the system does not tell."""
    ranges = []
    for line in _read(Path("/proc/self/maps")).splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == path:
            start, _, end = fields[0].partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _memory_limits() -> Iterator[tuple[int, int, int]]:
    """Limit, usage and reclaimable cache in bytes of each control group that limits memory."""
    for group in _cgroup_directories():
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(group / limit_name), _read(group / usage_name)
            if limit.isdecimal() and usage.isdecimal() and int(limit) < _UNLIMITED:
                yield int(limit), int(usage), _statistic(group / "memory.stat", "inactive_file")


def _cgroup_directories() -> list[Path]:
    """Directories of this process's control groups and their ancestors, version 2 and the memory one of version 1."""
    found = [_CGROUP_ROOT, _CGROUP_ROOT / "memory"]
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            directory = _CGROUP_ROOT / controllers / path.lstrip("/")
            found += [d for d in (directory, *directory.parents) if _CGROUP_ROOT in d.parents]
    return [d for d in dict.fromkeys(found) if d.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _meminfo(name: str) -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
