import os
from pathlib import Path

import pytest

from vllm_clone.platforms import cpu

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A control group tree in which nothing is limited yet; the directory of this process's group."""
    root = tmp_path / "cgroup"
    own = root / "pod" / "container"
    own.mkdir(parents=True)
    read = cpu._read

    def fake_read(path: Path) -> str:
        if path == Path("/proc/self/cgroup"):
            return "0::/pod/container"
        if path == Path("/proc/meminfo"):
            return "MemTotal: 99 kB\nMemAvailable:   16777216 kB\n"
        return read(path)

    monkeypatch.setattr(cpu, "_CGROUP_ROOT", root)
    monkeypatch.setattr(cpu, "_read", fake_read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return own


def test_without_limits_the_machine_decides(cgroup):
    assert cpu.available_memory() == 16 * GIB
    assert cpu.num_usable_cores() == 8


def test_no_limit_is_spelled_max(cgroup):
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5\n")
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert cpu.available_memory() == 16 * GIB
    assert cpu.num_usable_cores() == 8


def test_the_tightest_group_on_the_way_up_decides(cgroup):
    for group, limit in ((cgroup, 8 * GIB), (cgroup.parent, 4 * GIB)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{GIB}\n")
    assert cpu.available_memory() == 3 * GIB


def test_file_cache_counts_as_available(cgroup):
    (cgroup / "memory.max").write_text(f"{4 * GIB}")
    (cgroup / "memory.current").write_text(f"{3 * GIB}")
    (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    assert cpu.available_memory() == 3 * GIB


def test_an_exhausted_group_leaves_nothing(cgroup):
    (cgroup / "memory.max").write_text("1000")
    (cgroup / "memory.current").write_text("2000")
    assert cpu.available_memory() == 0


def test_version_1_limits_are_seen(cgroup):
    memory = cgroup.parents[1] / "memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(f"{2 * GIB}")
    (memory / "memory.usage_in_bytes").write_text(f"{GIB}")
    assert cpu.available_memory() == GIB


@pytest.mark.parametrize(("quota", "cores"), [("350000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)])
def test_a_cpu_quota_cuts_the_cores(cgroup, quota, cores):
    (cgroup / "cpu.max").write_text(quota)
    assert cpu.num_usable_cores() == cores


def test_this_machine_answers():
    assert cpu.num_usable_cores() >= 1
    assert cpu.available_memory() > 0


def test_all_memory_is_the_smallest_of_machine_and_limits(cgroup):
    assert cpu.total_memory() == 99 * 1024
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("5\n")
    assert cpu.total_memory() == 1000


def test_this_process_occupies_memory():
    assert 1 << 20 < cpu.resident_memory() < 64 * GIB
