"""One run of the load generator against one server, with the CPU that both and everybody else used meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .servers import Running, Subject

PROBE_EVERY = 1000
"""One request in so many is an ECHO that proves the order: few enough not to show in the figures."""
NOISE_MAX = 0.05
"""A run during which something else used more of the two cores is measured again."""
BUSY = 0.9
"""What uses more of its core has none left."""


@dataclass(frozen=True)
class Setup:
    """What all runs share."""

    binaries: Path
    server_core: int
    load_core: int
    warmup_secs: float
    duration_secs: float
    tries: int
    """How often a run is measured at most, to get a quiet one."""


@dataclass(frozen=True)
class Run:
    """What one run came to."""

    subject: str
    depth: int
    connections: int
    checks_per_sec: float
    checks: int
    allowed: int
    denied: int
    p50_us: float
    p99_us: float
    p99_9_us: float
    server_cpu_us: float
    """CPU of the server for each request; a server that polls without work counts that too."""
    server_busy: float
    """Share of its core that the server used."""
    load_busy: float
    """Share of the time that the load generator was at work."""
    others_busy: float
    """Share of the two cores that neither of the two used but something else did: noise."""

    def is_load_bound(self) -> bool:
        """Whether the load generator was the limit, so that the server could do more."""
        return self.load_busy > BUSY and self.server_busy < BUSY

    def is_quiet(self) -> bool:
        """Whether nothing else disturbed it."""
        return self.others_busy <= NOISE_MAX

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class LoadFailed(Exception):
    """A reply was wrong or did not come."""


def core_busy_secs(cores: list[int]) -> float:
    """Time that these cores have not been idle."""
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in {f"cpu{core}" for core in cores}:
            # user, nice, system, idle, iowait, irq, softirq, steal
            busy += sum(int(tick) for index, tick in enumerate(ticks[:8]) if index not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK")


def generate(setup: Setup, server: Running, subject: Subject, args: list[str]) -> dict:
    """Runs the load generator; returns its report."""
    command = [str(setup.binaries / "sluice-load"), *server.target, "--protocol", subject.protocol]
    command += ["--cpus", str(setup.load_core), "--quiet", "--json", *subject.load_args, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(f"{subject.name}: {done.stderr.strip() or done.returncode}")
    return json.loads(done.stdout)


def measure(setup: Setup, server: Running, subject: Subject, depth: int, connections: int) -> Run:
    """Loads a server for a while: once, or until nothing else disturbed it. Of several tries the quietest counts,
    whatever it came to."""
    tried: list[Run] = []
    while not (tried and tried[-1].is_quiet()) and len(tried) < setup.tries:
        tried.append(measure_once(setup, server, subject, depth, connections))
    return min(tried, key=lambda run: run.others_busy)


def measure_once(setup: Setup, server: Running, subject: Subject, depth: int, connections: int) -> Run:
    cores = sorted({setup.server_core, setup.load_core})
    line = ["--depth", str(depth), "--connections", str(connections), "--verify-every", str(PROBE_EVERY)]
    line += ["--warmup-secs", str(setup.warmup_secs), "--duration-secs", str(setup.duration_secs)]
    began, cpu_began, busy_began = time.monotonic(), server.cpu_secs(), core_busy_secs(cores)
    report = generate(setup, server, subject, line)
    seconds, cpu = time.monotonic() - began, server.cpu_secs() - cpu_began
    busy = core_busy_secs(cores) - busy_began
    load = report["load_cpu"]
    load_cpu = (load["user_secs"] + load["system_secs"]) * seconds / max(report["seconds"], 0.001)
    requests = report["requests_per_sec"] * seconds
    return Run(
        subject=subject.name,
        depth=depth,
        connections=connections,
        checks_per_sec=report["checks_per_sec"],
        checks=report["checks"],
        allowed=report["allowed"],
        denied=report["denied"],
        p50_us=report["latency_us"]["p50"],
        p99_us=report["latency_us"]["p99"],
        p99_9_us=report["latency_us"]["p99_9"],
        server_cpu_us=cpu * 1e6 / max(requests, 1.0),
        server_busy=cpu / seconds,
        load_busy=load["busy_share"],
        others_busy=max(0.0, (busy - cpu - load_cpu) / (seconds * len(cores))),
    )


@contextmanager
def counted_system_calls(pid: int, into: Path) -> Iterator[None]:
    """Counts the system calls of a process and its threads with perf; `system_calls` reads the count."""
    command = ["perf", "stat", "-x", ";", "-o", str(into), "-e", "raw_syscalls:sys_enter", "-p", str(pid)]
    counter = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # perf says nothing when it has attached; this is far longer than it takes.
        time.sleep(0.5)
        yield
    finally:
        counter.send_signal(signal.SIGINT)
        counter.wait()


def system_calls(counts: Path) -> int:
    for line in counts.read_text().splitlines():
        if "raw_syscalls:sys_enter" in line:
            count = line.split(";")[0]
            # perf's way of saying that a process that only sleeps made none.
            return 0 if count == "<not counted>" else int(count)
    raise RuntimeError("perf counted nothing")
