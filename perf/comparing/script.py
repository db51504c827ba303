"""The token bucket script beside the usual one on a hash, in the same Redis, under redis-benchmark."""

from __future__ import annotations

import csv
import os
import resource
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .figures import Figure, Options, say
from .load import NOISE_MAX, core_busy_secs
from .servers import PERF, Missing, Running, Subject, installed, redis_command, started
from .tables import Target, number, table

CONNECTIONS = 50
DEPTHS = [16, 64]
KEYS = 100_000
CALLS_PER_SEC = 80_000
"""About what Redis does: turns a duration into a number of calls, which is what redis-benchmark takes."""
RATIO_TARGET = 1.3

LIMITS = {
    # 3.6 seconds a token, and less than one call a second for each key: all are allowed, and the bucket is there.
    "allowed": ["1000", "1000", "3600000", "1"],
    "denied": ["1", "1", "2678400000", "1"],
}
"""Capacity, refill, period and cost by what becomes of the calls."""

PACKED = (PERF.parent / "lua" / "token_bucket.lua").read_text()
FUNCTION = f"#!lua name=sluice\nredis.register_function('token_bucket', function(KEYS, ARGV)\n{PACKED}\nend)\n"
HASH = (PERF / "scripts" / "token_bucket_hash.lua").read_text()
REDIS = Subject("redis", "evalsha", redis_command)


@dataclass(frozen=True)
class Script:
    """A way to ask Redis for a token."""

    name: str
    prefix: str
    """Of its keys, so that all scripts have their buckets in the same Redis."""
    text: str
    before: tuple[str, ...] = ()
    """Arguments before the limit."""
    after: tuple[str, ...] = ()
    """Arguments after the cost."""
    is_function: bool = False

    def load(self, port: int) -> list[str]:
        """Loads it; returns the words that call it."""
        if self.is_function:
            ask(port, [["FUNCTION", "LOAD", "REPLACE", self.text]])
            return ["FCALL", "token_bucket"]
        return ["EVALSHA", ask(port, [["SCRIPT", "LOAD", self.text]]).split()[1].decode()]

    def call(self, words: list[str], identity: str, case: str) -> list[str]:
        return [*words, "1", f"{self.prefix}:{{{identity}}}:rule", *self.before, *LIMITS[case], *self.after]


OURS = "token_bucket.lua"
BASELINES = ["hash", "hash, writes on a deny"]
SCRIPTS = [
    Script(OURS, "s", PACKED, before=("exact",)),
    Script(f"{OURS} as a function", "f", FUNCTION, before=("exact",), is_function=True),
    Script(BASELINES[0], "h", HASH, after=("taken",)),
    Script(BASELINES[1], "w", HASH, after=("always",)),
]


@dataclass(frozen=True)
class ScriptRun:
    """What one run came to."""

    script: str
    case: str
    depth: int
    calls_per_sec: float
    server_cpu_us: float
    """CPU of Redis for each call: the figure that other work on the machine disturbs least."""
    others_busy: float
    """Share of the two cores that neither Redis nor redis-benchmark used."""


def encoded(words: list[str]) -> bytes:
    return b"".join(
        [b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in map(str.encode, words))]
    )


def ask(port: int, requests: list[list[str]], lines_each: int | None = None) -> bytes:
    """Sends requests and returns the replies: the first bytes that come, or so many lines for each request."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"".join(map(encoded, requests)))
        replies = client.recv(65536)
        while lines_each is not None and replies.count(b"\r\n") < lines_each * len(requests):
            replies += client.recv(65536)
    if replies.startswith(b"-") or b"\r\n-ERR" in replies:
        raise RuntimeError(replies[:200].decode())
    return replies


def fill(port: int, script: Script, words: list[str], case: str) -> None:
    """Takes once from each bucket, so that all are there; then makes sure that the next call becomes what it should."""
    # redis-benchmark writes its random numbers with twelve digits.
    identities = [f"{index:012}" for index in range(KEYS)]
    for first in range(0, KEYS, 1000):
        ask(port, [script.call(words, one, case) for one in identities[first : first + 1000]], lines_each=5)
    granted = ask(port, [script.call(words, identities[0], case)], lines_each=5).split()[1]
    if granted != (b":1" if case == "allowed" else b":0"):
        raise RuntimeError(f"{script.name}: calls that should be {case} are not")


def benchmark(options: Options, port: int, depth: int, calls: int, line: list[str]) -> str:
    command = [installed("redis-benchmark"), "-p", str(port), "-c", str(CONNECTIONS), "-P", str(depth)]
    return subprocess.run(
        [*command, "-n", str(calls), "-r", str(KEYS), "--csv", *line],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {options.setup.load_core}),
    ).stdout


def settle(options: Options, port: int, line: list[str]) -> None:
    """Redis moves its keys to a larger table bit by bit, with each call, after it was filled: not at the cost of who is
    measured first."""
    benchmark(options, port, DEPTHS[0], len(SCRIPTS) * KEYS, line)


def measure(
    options: Options, server: Running, port: int, script: Script, line: list[str], case: str, depth: int
) -> ScriptRun:
    """Of several tries the quietest counts, whatever it came to."""
    tried: list[ScriptRun] = []
    while not (tried and tried[-1].others_busy <= NOISE_MAX) and len(tried) < options.setup.tries:
        tried.append(measure_once(options, server, port, script, line, case, depth))
    return min(tried, key=lambda run: run.others_busy)


def children_cpu_secs() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_once(
    options: Options, server: Running, port: int, script: Script, line: list[str], case: str, depth: int
) -> ScriptRun:
    setup = options.setup
    cores = sorted({setup.server_core, setup.load_core})
    calls = int(CALLS_PER_SEC * setup.duration_secs)
    began, cpu, busy, load = time.monotonic(), server.cpu_secs(), core_busy_secs(cores), children_cpu_secs()
    text = benchmark(options, port, depth, calls, line)
    seconds, cpu, load = time.monotonic() - began, server.cpu_secs() - cpu, children_cpu_secs() - load
    busy = core_busy_secs(cores) - busy
    # The last line is the result: the command, then calls a second. Progress, with carriage returns, comes before it.
    rate = float(next(csv.reader([text.splitlines()[-1]]))[1])
    return ScriptRun(
        script.name, case, depth, rate, cpu * 1e6 / calls, max(0.0, (busy - cpu - load) / (seconds * len(cores)))
    )


def described(run: ScriptRun) -> str:
    return (
        f"{run.script:<31} {run.case:<8} depth {run.depth:<3}{run.calls_per_sec:>10,.0f}/s  "
        f"{run.server_cpu_us:.2f} µs CPU  busy: others {run.others_busy:.0%}"
    )


def script(options: Options) -> Figure:
    """Calls a second of the token bucket script, and how many times those of the usual one that is."""
    runs: list[ScriptRun] = []
    try:
        for round_number in range(1, options.rounds + 1):
            # Back and forth, so that nobody always comes first.
            order = SCRIPTS if round_number % 2 else SCRIPTS[::-1]
            with started(REDIS, options.setup.binaries, options.setup.server_core) as server:
                for run in measured(options, server, order):
                    runs.append(run)
                    say(f"round {round_number}/{options.rounds}  {described(run)}")
    except Missing as problem:
        return Figure(f"## Scripts\n\n- not measured: {problem}", {"problems": [str(problem)]}, failed=True)
    return figure_of(options, runs)


def measured(options: Options, server: Running, scripts: list[Script]) -> Iterator[ScriptRun]:
    """One round. What is compared runs directly one after the other in one Redis: this machine's speed may change by
    half within a minute, and only what shares a moment can be compared."""
    port = int(server.target[1].rpartition(":")[2])
    words = {script.name: script.load(port) for script in scripts}
    for case in LIMITS:
        ask(port, [["FLUSHALL"]])
        for script in scripts:
            fill(port, script, words[script.name], case)
        settle(options, port, scripts[0].call(words[scripts[0].name], "__rand_int__", case))
        for depth in DEPTHS:
            for script in scripts:
                line = script.call(words[script.name], "__rand_int__", case)
                yield measure(options, server, port, script, line, case, depth)


def figure_of(options: Options, runs: list[ScriptRun]) -> Figure:
    grouped: dict[tuple[str, int, str], list[ScriptRun]] = {}
    for run in runs:
        grouped.setdefault((run.case, run.depth, run.script), []).append(run)

    def median(case: str, depth: int, name: str, what: str) -> float:
        return statistics.median(getattr(run, what) for run in grouped[case, depth, name])

    def ratio(case: str, depth: int, name: str, other: str, what: str) -> float:
        """The median of the rounds' ratios; each group has one run for each round, in order."""
        pairs = zip(grouped[case, depth, name], grouped[case, depth, other], strict=True)
        return statistics.median(getattr(one, what) / getattr(two, what) for one, two in pairs)

    rows, targets = [], []
    for case, depth, name in sorted(grouped, key=lambda key: key[:2]):
        rate, cpu = (median(case, depth, name, what) for what in ("calls_per_sec", "server_cpu_us"))
        noise = median(case, depth, name, "others_busy")
        ratios = [f"{ratio(case, depth, name, other, 'calls_per_sec'):.2f}" for other in BASELINES]
        by_cpu = [f"{ratio(case, depth, other, name, 'server_cpu_us'):.2f}" for other in BASELINES]
        rows.append([f"{name}, {case}", str(depth), number(rate), *ratios, number(cpu, 2), *by_cpu, f"{noise:.0%}"])
        if name == OURS:
            quiet = all(median(case, depth, one, "others_busy") <= NOISE_MAX for one in (OURS, *BASELINES))
            targets += [
                Target(f"{case}, depth {depth}: calls/s ÷ {other}", float(value), RATIO_TARGET, certain=quiet)
                for other, value in zip(BASELINES, ratios, strict=True)
                # Where nothing is denied the two do the same.
                if case == "denied" or other == BASELINES[0]
            ]
    head = ["script", "depth", "calls/s", "÷ hash", "÷ hash, writes", "Redis µs CPU", "hash ÷", "hash, writes ÷"]
    title = f"## Scripts: one Redis core, {CONNECTIONS} connections, {KEYS:,} keys, median of {options.rounds}"
    text = [title, table([*head, "others busy"], rows), Target.table(targets)]
    return Figure("\n\n".join(text), {"runs": [asdict(run) for run in runs]})
