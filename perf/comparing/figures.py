"""The measurements. Each returns its runs as data and a Markdown text."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import servers
from .load import LoadFailed, Run, Setup, counted_system_calls, generate, measure, system_calls
from .servers import Missing, Running, Subject, started
from .tables import Target, number, table

CONNECTIONS = 50
DEPTHS = [1, 16, 100]
IDLE_SECS = 2.0
SLUICE = servers.SLUICE_RING.name

CHECKS_PER_SEC_AT_100 = 2_000_000
"""DESIGN section 10."""
RATIO_TARGETS: dict[str, dict[int, float]] = {
    "echo": {1: 0.9, 16: 0.7, 100: 0.35},
    "redis-ping": {},
    "redis-incr": {1: 1.3, 16: 1.5, 100: 1.5},
    "throttlecrab": {1: 1.6, 16: 5.0, 100: 5.0},
}
RULES = [10, 10_000]
RULES_RATIO_TARGET = 1 / 1.3


@dataclass
class Figure:
    """One measurement's result."""

    markdown: str
    data: object
    failed: bool = False


@dataclass(frozen=True)
class Options:
    """What a measurement may vary."""

    setup: Setup
    rounds: int
    over_unix: bool
    subjects: list[Subject]
    identities: int
    quick: bool


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def described(run: Run) -> str:
    return (
        f"{run.subject:<20} depth {run.depth:<4}{run.checks_per_sec:>12,.0f}/s  p50 {run.p50_us:,.0f} µs  "
        f"busy: load generator {run.load_busy:.0%}, others {run.others_busy:.0%}"
    )


def median_run(runs: list[Run]) -> Run:
    """The median of each figure by itself."""
    values = {
        name: statistics.median(getattr(run, name) for run in runs)
        for name in Run.__dataclass_fields__
        if name != "subject"
    }
    return replace(runs[0], **values)


def in_rounds(
    options: Options, subjects: list[Subject], each: Callable[[Running, Subject], list[Run]]
) -> tuple[list[Run], list[str]]:
    """Measures all subjects one after the other, several times over, so that a slow minute hits all alike. One server
    runs at a time. Returns the runs, and what went wrong."""
    runs: list[Run] = []
    problems: dict[str, str] = {}
    for round_number in range(1, options.rounds + 1):
        for subject in subjects:
            if subject.name in problems:
                continue
            try:
                with started(subject, options.setup.binaries, options.setup.server_core, options.over_unix) as server:
                    for run in each(server, subject):
                        runs.append(run)
                        say(f"round {round_number}/{options.rounds}  {described(run)}")
            except (Missing, LoadFailed, RuntimeError) as problem:
                problems[subject.name] = str(problem)
                say(f"{subject.name}: {problem}")
    return runs, [f"{name}: {problem}" for name, problem in problems.items()]


def medians(runs: list[Run]) -> dict[tuple[str, int], Run]:
    grouped: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.subject, run.depth), []).append(run)
    return {key: median_run(group) for key, group in grouped.items()}


def notes(runs: dict[tuple[str, int], Run], problems: list[str]) -> str:
    """What a reader must know to trust the figures."""
    lines = [f"- not measured: {problem}" for problem in problems]
    bound = [f"{name} at {depth}" for (name, depth), run in runs.items() if run.is_load_bound()]
    if bound:
        lines.append(f"- the load generator was the limit, not the server: {', '.join(bound)}")
    noisy = [run for run in runs.values() if not run.is_quiet()]
    if noisy:
        noise = max(run.others_busy for run in noisy)
        lines.append(
            f"- something else used up to {noise:.0%} of the two cores in {len(noisy)} of {len(runs)} measurements:"
            " they are too low, some more than others, and targets that depend on them have a ?; server CPU is off least"
        )
    return "\n".join(lines)


def figure_of(text: list[str], runs: list[Run], problems: list[str]) -> Figure:
    best = medians(runs)
    data = {
        "runs": [run.as_dict() for run in runs],
        "medians": [run.as_dict() for run in best.values()],
        "problems": problems,
    }
    return Figure("\n\n".join(part for part in [*text, notes(best, problems)] if part), data, bool(problems))


def throughput(options: Options) -> Figure:
    """Checks a second, and ratios to the echo, Redis and throttlecrab."""

    def each(server: Running, subject: Subject) -> list[Run]:
        return [measure(options.setup, server, subject, depth, CONNECTIONS) for depth in DEPTHS]

    subjects = [one for one in options.subjects if one.unix or not options.over_unix]
    runs, problems = in_rounds(options, subjects, each)
    best = medians(runs)
    socket = "Unix socket" if options.over_unix else "TCP"
    title = f"## Throughput: one server core, {CONNECTIONS} connections, {socket}, median of {options.rounds}"
    return figure_of([title, throughput_table(best), target_table(best)], runs, problems)


def throughput_table(best: dict[tuple[str, int], Run]) -> str:
    head = [
        "server",
        "depth",
        "checks/s",
        "p50 µs",
        "p99 µs",
        "p99.9 µs",
        "server µs CPU",
        "server busy",
        "load busy",
        "others busy",
        "÷ echo by CPU",
        "÷ echo",
        "÷ PING",
        "÷ INCR",
        "÷ throttlecrab",
    ]
    rows = []
    for (name, depth), run in sorted(best.items(), key=lambda item: item[0][1]):
        ratios = [cpu_ratio(best, name, depth), *(ratio(best, name, other, depth) for other in RATIO_TARGETS)]
        rows.append(
            [name, str(depth), number(run.checks_per_sec), number(run.p50_us), number(run.p99_us), number(run.p99_9_us)]
            + [f"{run.server_cpu_us:.3f}", f"{run.server_busy:.0%}", f"{run.load_busy:.0%}", f"{run.others_busy:.0%}"]
            + ["" if value is None else f"{value:.2f}" for value in ratios]
        )
    return table(head, rows)


def ratio(best: dict[tuple[str, int], Run], name: str, other: str, depth: int) -> float | None:
    one, two = best.get((name, depth)), best.get((other, depth))
    if name == other or not one or not two or not two.checks_per_sec:
        return None
    return one.checks_per_sec / two.checks_per_sec


def cpu_ratio(best: dict[tuple[str, int], Run], name: str, depth: int) -> float | None:
    """Requests for each second of server CPU, against the echo. Hardly depends on what else runs; polling without work
    counts, though."""
    one, echo = best.get((name, depth)), best.get(("echo", depth))
    if name == "echo" or not one or not echo or not one.server_cpu_us:
        return None
    return echo.server_cpu_us / one.server_cpu_us


def certain(best: dict[tuple[str, int], Run], *names: str, depth: int) -> bool:
    """Whether these were neither disturbed nor held up by the load generator."""
    return all(best[name, depth].is_quiet() and not best[name, depth].is_load_bound() for name in names)


def target_table(best: dict[tuple[str, int], Run]) -> str:
    targets = []
    if run := best.get((SLUICE, 100)):
        targets.append(
            Target(f"{SLUICE}, depth 100, checks/s", run.checks_per_sec, CHECKS_PER_SEC_AT_100, certain=run.is_quiet())
        )
    for other, wanted in RATIO_TARGETS.items():
        for depth, at_least in wanted.items():
            value = ratio(best, SLUICE, other, depth)
            if value is not None:
                sure = certain(best, SLUICE, other, depth=depth)
                targets.append(Target(f"{SLUICE} ÷ {other}, depth {depth}", value, at_least, certain=sure))
    targets += echo_targets_by_cpu(best)
    return Target.table(targets)


def echo_targets_by_cpu(best: dict[tuple[str, int], Run]) -> list[Target]:
    """Where the load generator held up the echo, the echo is faster than it looks; its CPU says by how much."""
    targets = []
    for depth, at_least in RATIO_TARGETS["echo"].items():
        value = cpu_ratio(best, SLUICE, depth)
        if value is not None and best["echo", depth].is_load_bound():
            targets.append(Target(f"{SLUICE} ÷ echo by server CPU, depth {depth}", value, at_least))
    return targets


def latency(options: Options) -> Figure:
    """One connection, one request at a time."""
    subjects = [servers.SLUICE_RING, servers.SLUICE_PLAIN, servers.REDIS_PING, servers.ECHO]

    def each(server: Running, subject: Subject) -> list[Run]:
        return [measure(options.setup, server, subject, 1, 1)]

    runs, problems = in_rounds(options, subjects, each)
    best = medians(runs)
    rows = [
        [name, number(run.p50_us, 1), number(run.p99_us, 1), number(run.p99_9_us, 1), number(run.checks_per_sec)]
        for (name, _), run in best.items()
    ]
    targets = []
    if (one := best.get((SLUICE, 1))) and (ping := best.get(("redis-ping", 1))):
        targets.append(
            Target(
                f"p50 of {SLUICE} ÷ p50 of Redis PING",
                one.p50_us / ping.p50_us,
                at_most=1.0,
                certain=certain(best, SLUICE, "redis-ping", depth=1),
            )
        )
    socket = "Unix socket" if options.over_unix else "TCP"
    title = f"## Latency: one connection, depth 1, {socket}, median of {options.rounds}"
    return figure_of(
        [title, table(["server", "p50 µs", "p99 µs", "p99.9 µs", "requests/s"], rows), Target.table(targets)],
        runs,
        problems,
    )


def syscalls(options: Options) -> Figure:
    """System calls of the server for each request, and of one that has nothing to do."""
    subjects = [servers.SLUICE_RING, servers.SLUICE_PLAIN, servers.ECHO, servers.REDIS_PING]
    rows, data = [], []
    for subject in subjects:
        with started(subject, options.setup.binaries, options.setup.server_core, options.over_unix) as server:
            idle = count_system_calls(server, lambda: time.sleep(IDLE_SECS)) / IDLE_SECS
            each = [system_calls_each(options, server, subject, depth) for depth in DEPTHS]
        say(f"{subject.name:<20} {each} system calls a request at depth {DEPTHS}, idle {idle:.0f} a second")
        rows.append([subject.name, *(f"{value:.4f}" for value in each), number(idle)])
        data.append({"subject": subject.name, "each": dict(zip(DEPTHS, each, strict=True)), "idle_per_sec": idle})
    title = f"## System calls for each request: {CONNECTIONS} connections, all threads of the server"
    head = ["server", *(f"depth {depth}" for depth in DEPTHS), "idle, a second"]
    return Figure(f"{title}\n\n{table(head, rows)}", data)


def system_calls_each(options: Options, server: Running, subject: Subject, depth: int) -> float:
    """The difference between many and few requests, so that what happens before and after them does not count."""
    few = (20_000 if options.quick else 100_000) * min(depth, 20)
    many = 4 * few
    line = ["--depth", str(depth), "--connections", str(CONNECTIONS), "--verify-every", "0", "--requests"]
    counts = [
        count_system_calls(
            server, lambda requests=requests: generate(options.setup, server, subject, [*line, str(requests)])
        )
        for requests in (few, many)
    ]
    return (counts[1] - counts[0]) / (many - few)


def count_system_calls(server: Running, work: Callable[[], object]) -> int:
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as folder:
        counts = Path(folder) / "counts"
        with counted_system_calls(server.pid, counts):
            work()
        return system_calls(counts)


def memory(options: Options) -> Figure:
    """Resident memory when ready, and after as many distinct identities."""
    line = [
        "--depth",
        "100",
        "--connections",
        str(CONNECTIONS),
        "--requests",
        str(options.identities),
        "--verify-every",
        "0",
    ]
    line += ["--distribution", "sequential", "--identities", str(options.identities)]
    rows, data = [], []
    for subject in [servers.SLUICE_RING, servers.REDIS_INCR, servers.THROTTLECRAB]:
        try:
            with started(subject, options.setup.binaries, options.setup.server_core) as server:
                before = server.memory_bytes()
                report = generate(options.setup, server, subject, line)
                after = server.memory_bytes()
        except (Missing, LoadFailed) as problem:
            say(str(problem))
            continue
        say(f"{subject.name:<20} {before / 1e6:,.1f} MB, then {after / 1e6:,.1f} MB")
        rows.append(
            [
                subject.name,
                number(before / 1e6, 1),
                number(after / 1e6, 1),
                f"{after / before:.2f}",
                number(report["checks_per_sec"]),
            ]
        )
        data.append({"subject": subject.name, "before_bytes": before, "after_bytes": after, "report": report})
    title = f"## Memory: when ready, and after {options.identities:,} distinct identities"
    return Figure(f"{title}\n\n{table(['server', 'ready MB', 'after MB', 'growth', 'checks/s'], rows)}", data)


RULE = """\
[[rule]]
name = "r{index}"
match = {{ path = "{path}", method = "POST" }}
per = ["key"]
limit = {{ capacity = 1000, refill = 1000, period = "1s" }}

"""


def write_rules(count: int, into: Path) -> None:
    """A policy in which each rule applies to a path of its own; every other one matches by prefix."""
    paths = (f"/v1/r{index}/*" if index % 2 else f"/v1/r{index}/login" for index in range(count))
    into.write_text("".join(RULE.format(index=index, path=path) for index, path in enumerate(paths)))


def rules(options: Options) -> Figure:
    """Few rules against many, of which one applies."""
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as folder:
        subjects = []
        for count in RULES:
            policy = Path(folder) / f"{count}-rules.toml"
            write_rules(count, policy)
            args = ["--attr", f"path=/v1/r{count - 1}/login", "--attr", "method=POST", "--expect-rule", f"r{count - 1}"]
            subjects.append(servers.sluice(f"{count}-rules", "ring", policy, load_args=args))

        def each(server: Running, subject: Subject) -> list[Run]:
            return [measure(options.setup, server, subject, depth, CONNECTIONS) for depth in DEPTHS]

        runs, problems = in_rounds(options, subjects, each)
    best = medians(runs)
    few, many = (f"{count}-rules" for count in RULES)
    rows = [
        [name, str(depth), number(run.checks_per_sec), number(run.p50_us), number(run.p99_us)]
        for (name, depth), run in sorted(best.items(), key=lambda item: item[0][1])
    ]
    targets = []
    for depth in DEPTHS:
        value = ratio(best, many, few, depth)
        if value is not None:
            targets.append(
                Target(
                    f"{RULES[1]:,} rules ÷ {RULES[0]} rules, depth {depth}",
                    value,
                    RULES_RATIO_TARGET,
                    certain=certain(best, many, few, depth=depth),
                )
            )
    title = f"## Rules: {RULES[0]} against {RULES[1]:,}, one of which applies, median of {options.rounds}"
    return figure_of(
        [title, table(["rules", "depth", "checks/s", "p50 µs", "p99 µs"], rows), Target.table(targets)], runs, problems
    )


FIGURES: dict[str, Callable[[Options], Figure]] = {
    "throughput": throughput,
    "latency": latency,
    "syscalls": syscalls,
    "memory": memory,
    "rules": rules,
}
