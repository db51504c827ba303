"""Checks whose counts are in Redis, beside redis-benchmark calling the same script on the same Redis."""

from __future__ import annotations

import csv
import os
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .figures import Figure, Options, say
from .load import LoadFailed, generate
from .script import PACKED, REDIS, ask
from .servers import POLICIES, Missing, Place, Running, Subject, free_port, installed, started, stop, wait_until_ready
from .tables import Target, number, table

CONNECTIONS = 50
DEPTH = 64
KEYS = 100_000
CALLS_PER_SEC = 100_000
"""About what Redis does: turns a duration into a number of calls, which is what redis-benchmark takes."""
DISTINCT_TARGET = 1.0
HOT_TARGET = 5.0
LIMIT = ["1000000000", "1000000000", "3600000", "1"]
CONFIG = """
[redis]
urls = ["redis://127.0.0.1:{port}"]
# Redis is kept busy beyond what it can answer within the usual deadline: what is measured is how much it answers.
deadline_ms = 1000
"""


@dataclass(frozen=True)
class Sluice:
    """A server in front of a Redis."""

    running: Running
    ops_port: int

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}/metrics", timeout=5) as page:
            return page.read().decode()

    def sum_of(self, pattern: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", self.metrics(), re.MULTILINE))


@contextmanager
def sluice_before(options: Options, redis_port: int, core: int) -> Iterator[Sluice]:
    """Runs the server on a core that it shares: with the load generator where Redis is to be the limit, with Redis where
    latency is measured, since an open loop spins until its next request is due."""
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as folder:
        place = Place(options.setup.binaries, core, free_port(), free_port())
        config, log = Path(folder) / "sluice.toml", Path(folder) / "log"
        config.write_text(CONFIG.format(port=redis_port))
        line = [str(place.binaries / "sluice"), "--config", str(config), "--policy", str(POLICIES / "redis.toml")]
        line += ["--cpus", str(core), "--listen-resp", f"127.0.0.1:{place.port}"]
        line += ["--listen-ops", f"127.0.0.1:{place.ops_port}", "--listen-http", "off", "--listen-grpc", "off", "--log-level", "warn"]
        with log.open("wb") as output:
            process = subprocess.Popen(line, stdout=output, stderr=output, cwd=folder)
        try:
            wait_until_ready(process, place, log)
            sluice = Sluice(Running(process.pid, ["--target", f"127.0.0.1:{place.port}"]), place.ops_port)
            deadline = time.monotonic() + 10
            while sluice.sum_of(r'sluice_redis_events_total\{event="connected"\}') < 1:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no connection to Redis:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield sluice
        finally:
            stop(process)


@dataclass(frozen=True)
class Round:
    """What one round came to."""

    direct_distinct: float
    ours_distinct: float
    direct_hot: float
    ours_hot: float
    calls_per_hot_check: float
    half_p50_us: float
    half_p99_us: float
    half_round_trip_us: float
    """Mean time of a call at half load, from its sending to its reply."""
    half_p50_direct_us: float


def direct(options: Options, port: int, sha: str, key: str, depth: int = DEPTH, connections: int = CONNECTIONS) -> str:
    calls = int(CALLS_PER_SEC * options.setup.duration_secs * (1 if depth > 1 else 0.3))
    command = [installed("redis-benchmark"), "-p", str(port), "-c", str(connections), "-P", str(depth), "--csv"]
    command += ["-n", str(calls), "-r", str(KEYS), "EVALSHA", sha, "1", key, "exact", *LIMIT]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {options.setup.load_core}),
    ).stdout


def row(text: str) -> list[str]:
    """redis-benchmark's result: its last line. Progress, with carriage returns, comes before it."""
    return next(csv.reader([text.splitlines()[-1]]))


def load(options: Options, sluice: Sluice, identities: int, *more: str) -> dict:
    """Runs the load generator against the server. Fails where Redis did not decide everything."""
    fallbacks = r"sluice_rule_fallbacks_total\{[^}]*\}"
    before = sluice.sum_of(fallbacks)
    line = ["--identities", str(identities), "--connections", str(CONNECTIONS), "--verify-every", "1000"]
    line += ["--warmup-secs", "0.5", "--duration-secs", str(options.setup.duration_secs), *more]
    subject = Subject("sluice", "check", lambda _: [])
    report = generate(options.setup, sluice.running, subject, line)
    if sluice.sum_of(fallbacks) > before or report["denied"]:
        raise LoadFailed("not every check was decided by Redis and allowed")
    return report


def one_round(options: Options, port: int) -> Round:
    sha = ask(port, [["SCRIPT", "LOAD", PACKED]]).split()[1].decode()
    direct(options, port, sha, "rl:{key=__rand_int__}:direct")
    setup = options.setup
    with sluice_before(options, port, setup.load_core) as sluice:
        load(options, sluice, KEYS, "--depth", str(DEPTH))
    # Both have their buckets now, and neither pays for the growth of Redis's tables.
    direct_distinct = float(row(direct(options, port, sha, "rl:{key=__rand_int__}:direct"))[1])
    direct_hot = float(row(direct(options, port, sha, "rl:{key=hot}:direct"))[1])
    half = row(direct(options, port, sha, "rl:{key=__rand_int__}:direct", depth=1, connections=1))
    direct_depth_1 = float(row(direct(options, port, sha, "rl:{key=__rand_int__}:direct", depth=1))[1])
    with sluice_before(options, port, setup.load_core) as sluice:
        distinct = load(options, sluice, KEYS, "--depth", str(DEPTH))["checks_per_sec"]
        calls = sluice.sum_of(r"sluice_redis_round_trip_seconds_count\{[^}]*\}")
        hot = load(options, sluice, 1, "--depth", str(DEPTH))
        calls = sluice.sum_of(r"sluice_redis_round_trip_seconds_count\{[^}]*\}") - calls
    with sluice_before(options, port, setup.server_core) as sluice:
        open_loop = load(options, sluice, KEYS, "--rate", str(int(direct_depth_1 / 2)))
        took = sluice.sum_of(r"sluice_redis_round_trip_seconds_sum\{[^}]*\}")
        count = sluice.sum_of(r"sluice_redis_round_trip_seconds_count\{[^}]*\}")
    return Round(
        direct_distinct,
        distinct,
        direct_hot,
        hot["checks_per_sec"],
        calls / max(hot["checks"], 1),
        open_loop["latency_us"]["p50"],
        open_loop["latency_us"]["p99"],
        took / max(count, 1) * 1e6,
        float(half[4]) * 1000,
    )


def redis_backed(options: Options) -> Figure:
    """Redis-backed checks a second against direct calls of the same script, and what they add to its latency."""
    rounds: list[Round] = []
    quick = replace(options, setup=replace(options.setup, duration_secs=max(options.setup.duration_secs, 2.0)))
    try:
        for at in range(1, options.rounds + 1):
            with started(REDIS, options.setup.binaries, options.setup.server_core) as server:
                done = one_round(quick, int(server.target[1].rpartition(":")[2]))
            rounds.append(done)
            say(
                f"round {at}/{options.rounds}  distinct {done.ours_distinct:,.0f}/s, direct {done.direct_distinct:,.0f}/s  "
                f"hot {done.ours_hot:,.0f}/s, direct {done.direct_hot:,.0f}/s"
            )
    except (Missing, LoadFailed) as problem:
        return Figure(f"## Redis-backed\n\n- not measured: {problem}", {"problems": [str(problem)]}, failed=True)

    def median(what: str) -> float:
        return statistics.median(getattr(one, what) for one in rounds)

    def ratio(one: str, other: str) -> float:
        """The median of the rounds' ratios: only what shares a moment can be compared."""
        return statistics.median(getattr(each, one) / getattr(each, other) for each in rounds)

    distinct, hot = ratio("ours_distinct", "direct_distinct"), ratio("ours_hot", "direct_hot")
    rows = [
        ["100,000 identities", number(median("direct_distinct")), number(median("ours_distinct")), f"{distinct:.2f}"],
        ["one identity", number(median("direct_hot")), number(median("ours_hot")), f"{hot:.2f}"],
    ]
    targets = [
        Target("100,000 identities: checks ÷ direct calls", distinct, DISTINCT_TARGET),
        Target("one identity far below its limit: checks ÷ direct calls", hot, HOT_TARGET),
    ]
    notes = [
        f"- script calls for each check of the one identity: {median('calls_per_hot_check'):.4f}",
        f"- at half of what direct calls reach at depth 1, open loop, Sluice on Redis's core: check p50 {number(median('half_p50_us'))} µs, p99 {number(median('half_p99_us'))} µs; "
        f"mean round trip to Redis within it {number(median('half_round_trip_us'))} µs; "
        f"a direct call on an idle Redis p50 {number(median('half_p50_direct_us'))} µs",
    ]
    title = (
        f"## Redis-backed: Redis on one core, Sluice and the load on another, {CONNECTIONS} connections, depth {DEPTH}, "
        f"median of {options.rounds}"
    )
    head = ["", "direct calls/s", "checks/s", "checks ÷ direct"]
    text = [title, table(head, rows), Target.table(targets), "\n".join(notes)]
    return Figure("\n\n".join(text), {"rounds": [one.__dict__ for one in rounds]})
