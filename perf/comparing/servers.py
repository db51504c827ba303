"""The servers that are compared: how each is started, pinned to one core, waited for and stopped."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PERF = Path(__file__).resolve().parent.parent
POLICIES = PERF / "policies"
READY_SECS_MAX = 20.0
STOP_SECS_MAX = 10.0


class Missing(Exception):
    """A server that is not installed."""


@dataclass(frozen=True)
class Place:
    """Where a server runs and listens."""

    binaries: Path
    core: int
    port: int
    ops_port: int
    unix: Path | None = None


@dataclass(frozen=True)
class Subject:
    """Something to measure: a server, and what it is asked."""

    name: str
    protocol: str
    command: Callable[[Place], list[str]]
    unix: bool = True
    load_args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    pid: int
    target: list[str]
    """What tells the load generator where it is."""

    def cpu_secs(self) -> float:
        """CPU time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0


def sluice(
    name: str, transport: str, policy: Path, protocol: str = "check", load_args: list[str] | None = None
) -> Subject:
    def command(place: Place) -> list[str]:
        line = [str(place.binaries / "sluice"), "--cpus", str(place.core), "--policy", str(policy)]
        line += ["--transport", transport, "--log-level", "warn"]
        line += ["--listen-resp", f"127.0.0.1:{place.port}", "--listen-ops", f"127.0.0.1:{place.ops_port}",
                 "--listen-http", "off", "--listen-grpc", "off"]
        return line + (["--listen-unix", str(place.unix)] if place.unix else [])

    return Subject(name, protocol, command, load_args=load_args or [])


def echo_command(place: Place) -> list[str]:
    line = [str(place.binaries / "sluice-echo"), "--core", str(place.core)]
    return line + (["--unix", str(place.unix)] if place.unix else ["--listen", f"127.0.0.1:{place.port}"])


def redis_command(place: Place) -> list[str]:
    line = [
        installed("redis-server"),
        "--port",
        str(place.port),
        "--save",
        "",
        "--appendonly",
        "no",
        "--logfile",
        "/dev/null",
    ]
    return line + (["--unixsocket", str(place.unix)] if place.unix else [])


def throttlecrab_command(place: Place) -> list[str]:
    line = [installed("throttlecrab-server"), "--redis", "--redis-host", "127.0.0.1", "--redis-port", str(place.port)]
    return line + ["--log-level", "error"]


ECHO = Subject("echo", "echo-bytes", echo_command)
REDIS_PING = Subject("redis-ping", "ping", redis_command)
REDIS_INCR = Subject("redis-incr", "incr", redis_command)
THROTTLECRAB = Subject("throttlecrab", "throttle", throttlecrab_command, unix=False)
SLUICE_RING = sluice("sluice-ring", "ring", POLICIES / "one-rule.toml")
SLUICE_PLAIN = sluice("sluice-plain", "plain", POLICIES / "one-rule.toml")
SLUICE_THREE_RULES = sluice("sluice-three-rules", "ring", POLICIES / "three-rules.toml")
SLUICE_CL_THROTTLE = sluice("sluice-cl-throttle", "ring", POLICIES / "one-rule.toml", "cl-throttle")
SUBJECTS = [
    SLUICE_RING,
    ECHO,
    SLUICE_PLAIN,
    SLUICE_THREE_RULES,
    SLUICE_CL_THROTTLE,
    REDIS_PING,
    REDIS_INCR,
    THROTTLECRAB,
]


def installed(program: str) -> str:
    """The path of a program, also where cargo installs."""
    found = shutil.which(program) or shutil.which(program, path=str(Path.home() / ".cargo" / "bin"))
    if not found:
        raise Missing(f"{program} is not installed")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(place: Place) -> socket.socket:
    if place.unix:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(place.unix))
        return client
    return socket.create_connection(("127.0.0.1", place.port), timeout=1)


def answers(place: Place) -> bool:
    """Whether a PING gets an answer (from the echo, itself)."""
    try:
        with connect(place) as client:
            client.settimeout(1)
            client.sendall(b"*1\r\n$4\r\nPING\r\n")
            return bool(client.recv(64))
    except OSError:
        return False


def wait_until_ready(process: subprocess.Popen[bytes], place: Place, log: Path) -> None:
    deadline = time.monotonic() + READY_SECS_MAX
    while not answers(place):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args[0]} does not answer:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.01)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def started(subject: Subject, binaries: Path, core: int, over_unix: bool = False) -> Iterator[Running]:
    """Runs a server on one core, and ends it."""
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as folder:
        unix = Path(folder) / "socket" if over_unix else None
        place = Place(binaries, core, free_port(), free_port(), unix)
        command = subject.command(place)
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=folder,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        try:
            wait_until_ready(process, place, log)
            yield Running(process.pid, ["--unix", str(unix)] if unix else ["--target", f"127.0.0.1:{place.port}"])
        finally:
            stop(process)
