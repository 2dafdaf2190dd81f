"""Where threads run and memory comes from: what variables and flags ask for, and what is refused."""

import os
import threading
from pathlib import Path

import pytest

from vllm_clone.config import ParallelConfig
from vllm_clone.errors import ConfigError
from vllm_clone.platforms import cpu, placement
from vllm_clone.platforms.placement import Placement, plan

BIND, RESERVED, THREADS = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_THREADS"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Cores 0-7 on NUMA nodes 0 (0-3) and 1 (4-7), and a node 2 of memory only; this process may use 1-7."""
    for name in (BIND, RESERVED, THREADS):
        monkeypatch.delenv(name, raising=False)
    for node, cores in enumerate(("0-3", "4-7", "")):
        directory = tmp_path / f"node{node}"
        directory.mkdir()
        (directory / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(placement, "_NODES", tmp_path)
    monkeypatch.setattr(cpu, "usable_cores", lambda: set(range(1, 8)))
    monkeypatch.setattr(cpu, "num_usable_cores", lambda: 7)
    return monkeypatch


def refused(match):
    return pytest.raises(ConfigError, match=match)


def test_by_default_every_core_has_a_thread_that_may_move():
    assert plan(ParallelConfig()) == Placement(7)


@pytest.mark.parametrize("word", ["auto", "nobind"])
def test_auto_and_nobind_bind_nothing(machine, word):
    machine.setenv(BIND, word)
    assert plan(ParallelConfig()) == Placement(7)
    machine.setenv(THREADS, "3")
    assert plan(ParallelConfig()) == Placement(3)


def test_a_list_pins_one_thread_to_each_core(machine):
    machine.setenv(BIND, "5,1-2")
    assert plan(ParallelConfig()) == Placement(3, (5, 1, 2), pinned=True)


def test_fewer_threads_leave_the_last_cores_of_the_list_free(machine):
    machine.setenv(BIND, "1-4")
    machine.setenv(THREADS, "2")
    assert plan(ParallelConfig()) == Placement(2, (1, 2), pinned=True)


def test_each_rank_has_its_list(machine):
    machine.setenv(BIND, "1-3|4-7")
    parallel = ParallelConfig(tensor_parallel_size=2)
    assert [plan(parallel, rank).cores for rank in range(2)] == [(1, 2, 3), (4, 5, 6, 7)]


def test_reserved_cores_are_the_last_ones(machine):
    machine.setenv(RESERVED, "2")
    assert plan(ParallelConfig()) == Placement(5, (1, 2, 3, 4, 5))


def test_a_quota_below_the_cores_bounds_the_threads(machine):
    machine.setattr(cpu, "num_usable_cores", lambda: 2)
    assert plan(ParallelConfig()) == Placement(2)
    assert plan(ParallelConfig(numa_bind=True)).num_threads == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({BIND: "0-3"}, "BIND=0-3: core 0 is not among those the engine may use .1,2,3,4,5,6,7."),
        ({BIND: "1|2"}, "BIND=1.2: found 2 lists of cores for 1 ranks"),
        ({BIND: "1-2", THREADS: "3"}, "VLLM_CPU_THREADS=3: .*BIND=1-2 has 2 cores"),
        ({BIND: "1-2", RESERVED: "1"}, "RESERVED_CPU=1: .*BIND=auto only, not 1-2"),
        ({BIND: "nobind", RESERVED: "1"}, "RESERVED_CPU=1: .*BIND=auto only, not nobind"),
        ({RESERVED: "7"}, "RESERVED_CPU=7: the engine may use 7 cores, so none would be left"),
    ],
)
def test_what_cannot_be_is_refused(machine, variables, message):
    for name, value in variables.items():
        machine.setenv(name, value)
    with refused(message):
        plan(ParallelConfig())


def test_numa_bind_takes_the_node_with_most_usable_cores():
    assert plan(ParallelConfig(numa_bind=True)) == Placement(4, (4, 5, 6, 7), nodes=(1,))


def test_numa_bind_nodes_name_the_node():
    chosen = ParallelConfig(numa_bind=True, numa_bind_nodes=[0])
    assert plan(chosen) == Placement(3, (1, 2, 3), nodes=(0,))


def test_numa_bind_cpus_take_memory_from_their_nodes_unless_one_is_named():
    cores = ParallelConfig(numa_bind=True, numa_bind_cpus=["3,4"])
    assert plan(cores) == Placement(2, (3, 4), nodes=(0, 1))
    both = ParallelConfig(numa_bind=True, numa_bind_cpus=["3"], numa_bind_nodes=[1])
    assert plan(both) == Placement(1, (3,), nodes=(1,))


def test_threads_are_pinned_and_cores_reserved_within_the_node(machine):
    parallel = ParallelConfig(numa_bind=True, numa_bind_nodes=[1])
    machine.setenv(RESERVED, "1")
    assert plan(parallel) == Placement(3, (4, 5, 6), nodes=(1,))
    machine.delenv(RESERVED)
    machine.setenv(BIND, "4-5")
    assert plan(parallel) == Placement(2, (4, 5), pinned=True, nodes=(1,))
    machine.setenv(BIND, "3-4")
    with refused("core 3 is not among those the engine may use .4,5,6,7."):
        plan(parallel)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"numa_bind": False, "numa_bind_nodes": [0]}, "--numa-bind-nodes needs --numa-bind"),
        ({"numa_bind": False, "numa_bind_cpus": ["1"]}, "--numa-bind-cpus needs --numa-bind"),
        ({"numa_bind_nodes": [0, 1]}, "--numa-bind-nodes: found 2 entries for 1 ranks"),
        ({"numa_bind_cpus": []}, "--numa-bind-cpus: found 0 entries for 1 ranks"),
        ({"numa_bind_nodes": [3]}, "--numa-bind-nodes 3: this machine has no such NUMA node; it has 0, 1, 2"),
        ({"numa_bind_nodes": [-1]}, "--numa-bind-nodes -1: this machine has no such NUMA node"),
        ({"numa_bind_nodes": [2]}, "none of the cores of NUMA node 2"),
        ({"numa_bind_cpus": ["0-1"]}, "--numa-bind-cpus 0-1: core 0 is not among"),
        ({"numa_bind_cpus": ["+0"]}, "--numa-bind-cpus .0: must be core numbers and ranges such as 0-3,8"),
        ({"numa_bind_cpus": ["2-1"]}, "--numa-bind-cpus 2-1: the range 2-1 descends"),
    ],
)
def test_numa_flags_that_make_no_sense_are_refused(flags, message):
    with refused(message):
        plan(ParallelConfig(**{"numa_bind": True} | flags))


def test_a_system_without_numa_nodes_says_so(machine, tmp_path):
    machine.setattr(placement, "_NODES", tmp_path / "none")
    with refused("does not tell its NUMA nodes"):
        plan(ParallelConfig(numa_bind=True))


def in_a_thread(function):
    """What ``function`` returns in a thread of its own, whose cores and memory policy end with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_applying_moves_the_thread():
    core = max(os.sched_getaffinity(0))

    def moved():
        placement.apply(Placement(1, (core,)))
        return os.sched_getaffinity(0)

    before = os.sched_getaffinity(0)
    assert in_a_thread(moved) == {core}
    assert os.sched_getaffinity(0) == before


def test_applying_binds_the_memory_that_the_thread_asks_for():
    def policies():
        try:
            placement.apply(Placement(1, nodes=(0,)))
        except ConfigError as error:
            return str(error)
        return Path("/proc/thread-self/numa_maps").read_text()

    found = in_a_thread(policies)
    if "does not bind memory" in found:
        pytest.skip(found)
    assert " bind:0 " in found


def test_a_core_that_is_gone_is_named():
    with refused("cannot stay on cores 65535: Invalid argument"):
        placement.apply(Placement(1, (65535,)))


def test_binding_memory_to_a_node_that_does_not_exist_is_refused_by_the_system():
    with refused("does not bind memory to NUMA nodes"):
        placement.apply(Placement(1, nodes=(1023,)))


def test_the_machine_that_runs_this_tells_its_nodes(machine):
    machine.undo()
    cores = [core for node in placement.numa_nodes().values() for core in node]
    assert not cores or os.sched_getaffinity(0) <= set(cores)
