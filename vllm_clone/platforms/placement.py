"""Which cores the engine's threads run on and which NUMA nodes its memory comes from. No torch.

By default every core this process may use gets a thread and the operating system places them: the API server has no
cores of its own, and a thread that cannot move waits whenever the server needs its core.
"""

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from vllm_clone import envs
from vllm_clone.config.groups import ParallelConfig
from vllm_clone.errors import ConfigError
from vllm_clone.platforms import cpu

_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call; the C library has no function for it."""
_MPOL_BIND = 2
_MAX_NODES = 1024


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one engine process works."""

    num_threads: int
    cores: tuple[int, ...] = ()
    """Cores to stay on; () for all that this process has."""
    pinned: bool = False
    """Thread i of the kernels stays on the i-th core."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes to take memory from; () for any."""


def plan(parallel: ParallelConfig, rank: int = 0) -> Placement:
    """What VLLM_CPU_OMP_THREADS_BIND, VLLM_CPU_THREADS and the ``--numa-bind`` flags say for one rank.

    Raises:
        ConfigError: they contradict each other, or name cores or nodes that this process does not have.
    """
    bound, nodes = _numa(parallel, rank)
    bind, reserved = envs.VLLM_CPU_OMP_THREADS_BIND, envs.VLLM_CPU_NUM_OF_RESERVED_CPU
    if reserved and bind != "auto":
        raise ConfigError(
            f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved}: cores can be reserved with VLLM_CPU_OMP_THREADS_BIND=auto only, "
            f"not {envs.raw('VLLM_CPU_OMP_THREADS_BIND')}; unset one of the two."
        )
    if isinstance(bind, str):
        return _floating(_without_reserved(bound, reserved), nodes)
    return _pinned(bind, rank, parallel.tensor_parallel_size, set(bound) or cpu.usable_cores(), nodes)


def _floating(cores: tuple[int, ...], nodes: tuple[int, ...]) -> Placement:
    """As many threads as can run at once; the operating system moves them within ``cores``, () for all."""
    at_once = cpu.num_usable_cores()
    return Placement(envs.VLLM_CPU_THREADS or min(at_once, len(cores) or at_once), cores, False, nodes)


def _without_reserved(bound: tuple[int, ...], reserved: int) -> tuple[int, ...]:
    """The cores but the last ``reserved``, which stay free for other programs."""
    if not reserved:
        return bound
    cores = bound or tuple(sorted(cpu.usable_cores()))
    if reserved >= len(cores):
        raise ConfigError(
            f"VLLM_CPU_NUM_OF_RESERVED_CPU={reserved}: the engine may use {len(cores)} cores, so none would be left."
        )
    return cores[:-reserved]


def _pinned(lists: list[list[int]], rank: int, ranks: int, usable: set[int], nodes: tuple[int, ...]) -> Placement:
    """One thread on each core of the rank's list."""
    name = f"VLLM_CPU_OMP_THREADS_BIND={envs.raw('VLLM_CPU_OMP_THREADS_BIND')}"
    if len(lists) != ranks:
        raise ConfigError(f"{name}: found {len(lists)} lists of cores for {ranks} ranks; give each rank one.")
    cores = tuple(lists[rank])
    _check_cores(name, cores, usable)
    count = envs.VLLM_CPU_THREADS or len(cores)
    if count > len(cores):
        raise ConfigError(f"VLLM_CPU_THREADS={count}: {name} has {len(cores)} cores; give each thread one.")
    return Placement(count, cores[:count], True, nodes)


def apply(placement: Placement) -> None:
    """Move the calling thread, and all threads and memory that it will create, to where they belong.

    Raises:
        ConfigError: the operating system does not allow it.
    """
    if placement.cores:
        try:
            os.sched_setaffinity(0, placement.cores)
        except OSError as error:
            cores = ",".join(map(str, placement.cores))
            raise ConfigError(f"The engine cannot stay on cores {cores}: {error.strerror}.") from error
    if placement.nodes:
        _bind_memory(placement.nodes)


def numa_nodes() -> dict[int, list[int]]:
    """Cores of each NUMA node of this machine; empty where the system does not say."""
    found = {}
    for directory in _NODES.glob("node[0-9]*"):
        text = (directory / "cpulist").read_text().strip()
        found[int(directory.name.removeprefix("node"))] = envs.core_list(text) if text else []
    return dict(sorted(found.items()))


def _numa(parallel: ParallelConfig, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores and nodes to bind to; both empty without ``--numa-bind``."""
    _check_numa_flags(parallel)
    if not parallel.numa_bind:
        return (), ()
    topology, usable = numa_nodes(), cpu.usable_cores()
    if not topology:
        raise ConfigError("--numa-bind: this system does not tell its NUMA nodes; leave the flag out.")
    node = parallel.numa_bind_nodes[rank] if parallel.numa_bind_nodes else None
    if node is not None and node not in topology:
        known = ", ".join(map(str, topology))
        raise ConfigError(f"--numa-bind-nodes {node}: this machine has no such NUMA node; it has {known}.")
    if parallel.numa_bind_cpus:
        cores = _numa_cores(parallel.numa_bind_cpus[rank], usable)
        near = tuple(n for n, its_cores in topology.items() if set(its_cores) & set(cores))
        return cores, near if node is None else (node,)
    if node is None:
        node = max(topology, key=lambda n: (len(usable & set(topology[n])), -n))
    cores = tuple(core for core in topology[node] if core in usable)
    if not cores:
        raise ConfigError(f"--numa-bind: this process may use none of the cores of NUMA node {node}.")
    return cores, (node,)


def _check_numa_flags(parallel: ParallelConfig) -> None:
    given = {"--numa-bind-nodes": parallel.numa_bind_nodes, "--numa-bind-cpus": parallel.numa_bind_cpus}
    ranks = parallel.tensor_parallel_size
    for name, values in given.items():
        if values is None:
            continue
        if not parallel.numa_bind:
            raise ConfigError(f"{name} needs --numa-bind.")
        if len(values) != ranks:
            raise ConfigError(f"{name}: found {len(values)} entries for {ranks} ranks; give each rank one.")


def _numa_cores(text: str, usable: set[int]) -> tuple[int, ...]:
    try:
        cores = tuple(envs.core_list(text))
    except ValueError as error:
        raise ConfigError(f"--numa-bind-cpus {text}: {error}.") from error
    _check_cores(f"--numa-bind-cpus {text}", cores, usable)
    return cores


def _check_cores(name: str, cores: tuple[int, ...], usable: set[int]) -> None:
    absent = [core for core in cores if core not in usable]
    if absent:
        have = ",".join(map(str, sorted(usable)))
        raise ConfigError(f"{name}: core {absent[0]} is not among those the engine may use ({have}).")


def _bind_memory(nodes: tuple[int, ...]) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError(f"--numa-bind: memory cannot be bound on {platform.machine()}; leave the flag out.")
    bits = sum(1 << node for node in nodes)
    mask = (ctypes.c_ubyte * (_MAX_NODES // 8)).from_buffer_copy(bits.to_bytes(_MAX_NODES // 8, "little"))
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel looks at one bit less than it is told of.
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_BIND), mask, ctypes.c_ulong(_MAX_NODES + 1)):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"--numa-bind: the system does not bind memory to NUMA nodes ({reason}); a container needs CAP_SYS_NICE, "
            "or leave the flag out."
        )
