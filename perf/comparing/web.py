"""HTTP beside nginx's limit_req, and gRPC beside throttlecrab's, all asked by h2load on another core.

Each answers the same: that a request passes, with the limit far away. nginx and Sluice answer GETs by a 200 (nginx with its empty GIF,
since `return` would skip the limit, Sluice's /v1/forward-auth with its RateLimit headers); over gRPC each has one bucket.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .figures import Figure, Options, say
from .servers import POLICIES, Missing, free_port, installed, stop
from .tables import Target, number, table

HTTP_CONNECTIONS = 64
HTTP_DEPTHS = [1, 16]
GRPC_CONNECTIONS = [1, 16]
GRPC_STREAMS = 100
HTTP_TARGET = 1.0
GRPC_TARGET = 2.0
READY_SECS_MAX = 10.0

NGINX = """
daemon off;
worker_processes 1;
worker_cpu_affinity {mask};
error_log stderr error;
pid {folder}/pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    limit_req_zone $binary_remote_addr zone=all:10m rate=1000000r/s;
    server {{
        listen 127.0.0.1:{port};
        location / {{ limit_req zone=all burst=1000000 nodelay; empty_gif; }}
    }}
}}
"""


@dataclass(frozen=True)
class Load:
    """How h2load asks."""

    connections: int
    depth: int
    arguments: list[str]


@dataclass(frozen=True)
class Subject:
    """A server, and how it is asked."""

    name: str
    command: Callable[[Path, int, Options], list[str]]
    arguments: Callable[[int, Path], list[str]]


def field(tag: int, value: bytes | str | int) -> bytes:
    """A protobuf field: a length and its bytes, or a small number."""
    if isinstance(value, int):
        out = bytes([tag << 3])
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])
    value = value.encode() if isinstance(value, str) else value
    return bytes([tag << 3 | 2, len(value)]) + value


def message(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4, "big") + body


def grpc(path: str, body: bytes) -> Callable[[int, Path], list[str]]:
    def arguments(port: int, folder: Path) -> list[str]:
        (folder / "body").write_bytes(message(body))
        headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        return ["-d", str(folder / "body"), *headers, f"http://127.0.0.1:{port}{path}"]

    return arguments


def sluice(face: str) -> Callable[[Path, int, Options], list[str]]:
    def command(folder: Path, port: int, options: Options) -> list[str]:
        faces = {name: "off" for name in ["http", "grpc"]} | {face: f"127.0.0.1:{port}"}
        line = [str(options.setup.binaries / "sluice"), "--cpus", str(options.setup.server_core), "--log-level", "warn"]
        line += ["--policy", str(POLICIES / "web.toml"), "--listen-resp", "127.0.0.1:0", "--listen-ops", "127.0.0.1:0"]
        return line + [word for name, address in faces.items() for word in (f"--listen-{name}", address)]

    return command


def nginx(folder: Path, port: int, options: Options) -> list[str]:
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(mask=f"{1 << options.setup.server_core:b}", folder=folder, port=port))
    return [installed("nginx"), "-c", str(config), "-p", str(folder)]


def throttlecrab(folder: Path, port: int, options: Options) -> list[str]:
    return [installed("throttlecrab-server"), "--grpc", "--grpc-host", "127.0.0.1", "--grpc-port", str(port), "--log-level", "error"]


def get(path: str, *headers: str) -> Callable[[int, Path], list[str]]:
    more = [word for header in headers for word in ("-H", header)]
    return lambda port, _: ["--h1", *more, f"http://127.0.0.1:{port}{path}"]


SLUICE_HTTP = Subject("sluice", sluice("http"), get("/v1/forward-auth", "x-forwarded-uri: /login", "x-forwarded-method: POST"))
NGINX_HTTP = Subject("nginx limit_req", nginx, get("/"))
DESCRIPTOR = field(1, field(1, "key") + field(2, "ak_1"))
SLUICE_GRPC = Subject(
    "sluice",
    sluice("grpc"),
    grpc("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", field(1, "web") + field(2, DESCRIPTOR)),
)
THROTTLECRAB_GRPC = Subject(
    "throttlecrab",
    throttlecrab,
    grpc(
        "/throttlecrab.RateLimiter/Throttle",
        field(1, "ak_1") + field(2, 1_000_000) + field(3, 1_000_000) + field(4, 1) + field(5, 1),
    ),
)


def h2load(options: Options, load: Load, *more: str) -> str:
    line = [installed("h2load"), "-t", "1", "-c", str(load.connections), "-m", str(load.depth), *more, *load.arguments]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {options.setup.load_core}),
    )
    counts = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", done.stdout)
    failed = re.search(r"(\d+) failed, (\d+) errored", done.stdout)
    if not counts or not int(counts[1]) or any(int(count) for count in (*counts.groups()[1:], *failed.groups())):
        raise RuntimeError(f"not every request was answered 200:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.stdout


def per_sec(options: Options, load: Load) -> float:
    text = h2load(options, load, "-D", str(max(2, round(options.setup.duration_secs))), "--warm-up-time", "1")
    return float(re.search(r"finished in [\d.]+s, ([\d.]+) req/s", text)[1]) if text else 0.0


def p99_us(options: Options, load: Load, rate: float, folder: Path) -> float:
    """The 99th percentile of what requests took at this rate, by h2load's own log."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    each = max(1, round(rate / load.connections))
    requests = each * load.connections * max(2, round(options.setup.duration_secs))
    h2load(options, load, "-n", str(requests), "--rps", str(each), f"--log-file={log}")
    took = sorted(int(line.rsplit("\t", 1)[1]) for line in log.read_text().splitlines())
    return float(took[int(len(took) * 0.99) - 1])


@contextmanager
def started(options: Options, subject: Subject) -> Iterator[tuple[list[str], Path, int]]:
    """Runs a server on its core; gives what h2load needs, and the process."""
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as name:
        folder, port = Path(name), free_port()
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                subject.command(folder, port, options),
                stdout=output,
                stderr=output,
                cwd=folder,
                preexec_fn=lambda: os.sched_setaffinity(0, {options.setup.server_core}),
            )
        arguments = subject.arguments(port, folder)
        try:
            deadline = time.monotonic() + READY_SECS_MAX
            while True:
                try:
                    h2load(options, Load(1, 1, arguments), "-n", "1")
                    break
                except (RuntimeError, subprocess.CalledProcessError) as problem:
                    if process.poll() is not None or time.monotonic() > deadline:
                        text = (folder / "output").read_text(errors="replace")
                        raise RuntimeError(f"{subject.name} does not answer: {problem}\n{text[-1000:]}") from problem
                    time.sleep(0.05)
            yield arguments, folder, process.pid
        finally:
            stop(process)


def compare(
    options: Options, title: str, ours: Subject, theirs: Subject, shapes: list[tuple[str, int, int]], wanted: float
) -> Figure:
    """Both servers in turns, each shape of load several times over; the median of the rounds' ratios counts."""
    found: dict[tuple[str, str], list[float]] = {}
    late: dict[tuple[str, str], list[float]] = {}
    try:
        for at in range(1, options.rounds + 1):
            for subject in [ours, theirs]:
                with started(options, subject) as (arguments, folder, _):
                    for shape, connections, depth in shapes:
                        load = Load(connections, depth, arguments)
                        rate = per_sec(options, load)
                        found.setdefault((subject.name, shape), []).append(rate)
                        half = p99_us(options, load, rate / 2, folder)
                        late.setdefault((subject.name, shape), []).append(half)
                        say(f"round {at}/{options.rounds}  {subject.name:<16} {shape:<28} {rate:>10,.0f}/s  p99 at half {half:,.0f} µs")
    except (Missing, RuntimeError, subprocess.CalledProcessError) as problem:
        return Figure(f"## {title}\n\n- not measured: {problem}", {"problems": [str(problem)]}, failed=True)
    rows, targets = [], []
    for shape, _, _ in shapes:
        pairs = zip(found[ours.name, shape], found[theirs.name, shape], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        rates = [statistics.median(found[subject.name, shape]) for subject in [ours, theirs]]
        halves = [statistics.median(late[subject.name, shape]) for subject in [ours, theirs]]
        rows.append([shape, *(number(rate) for rate in rates), f"{ratio:.2f}", *(number(half) for half in halves)])
        targets.append(Target(f"{shape}: {ours.name} ÷ {theirs.name}", ratio, wanted))
    head = ["", f"{ours.name}/s", f"{theirs.name}/s", "ratio", f"{ours.name} p99 µs at half load", f"{theirs.name} p99 µs at half load"]
    text = [f"## {title}, median of {options.rounds}", table(head, rows), Target.table(targets)]
    data = {f"{name}, {shape}": rates for (name, shape), rates in found.items()}
    return Figure("\n\n".join(text), data)


def http(options: Options) -> Figure:
    """HTTP/1.1 requests a second on one core."""
    shapes = [(f"{HTTP_CONNECTIONS} connections, depth {depth}", HTTP_CONNECTIONS, depth) for depth in HTTP_DEPTHS]
    return compare(options, "HTTP/1.1: one server core", SLUICE_HTTP, NGINX_HTTP, shapes, HTTP_TARGET)


def grpc_calls(options: Options) -> Figure:
    """gRPC calls a second on one core."""
    shapes = [(f"{count} × {GRPC_STREAMS} streams", count, GRPC_STREAMS) for count in GRPC_CONNECTIONS]
    return compare(options, "gRPC: one server core", SLUICE_GRPC, THROTTLECRAB_GRPC, shapes, GRPC_TARGET)
