"""Hot keys against real Redis: how fast a key over its limit is answered, and what each way of meeting hot keys spares.

Redis runs on the server's core and the load on the load's; gateways share a core with the load where Redis is what is
watched, and have the server's core where they are.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .figures import Figure, Options, say
from .load import LoadFailed
from .servers import Missing, Place, free_port, installed, stop, wait_until_ready
from .tables import Target, number, table

CONFIG = """
[redis]
urls = {urls}
# A machine that is kept busy is late now and then, and what is measured is what Redis decides.
deadline_ms = 1000
breaker = {{ calls_min = 1000000 }}
[hot]
lease_quiet_ms = 3600000
"""
HOT = "ak_00000000"
"""The load generator's identity 0."""
RULE = """
[[rule]]
name = "login-per-key"
match = {{ path = "/v1/login", method = "POST" }}
per = ["key"]
limit = {{ capacity = {capacity}, refill = {refill}, period = "{period}" }}
hot = {{ {hot} }}
"""
ZIPF_IDENTITIES = 100_000
ONE_CORE_TARGET = 1_000_000


def rule(capacity: int, refill: int, period: str, hot: str) -> str:
    return RULE.format(capacity=capacity, refill=refill, period=period, hot=hot)


@dataclass(frozen=True)
class Redis:
    """A Redis that runs."""

    port: int

    def calls(self) -> int:
        """Calls of the script so far."""
        command = [installed("redis-cli"), "-p", str(self.port), "INFO", "commandstats"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"cmdstat_evalsha:calls=(\d+)", text)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Gateway:
    """A Sluice that runs."""

    port: int
    ops_port: int

    def sum_of(self, pattern: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ops_port}/metrics", timeout=5) as page:
            text = page.read().decode()
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


@contextmanager
def redis(core: int, cluster: bool = False) -> Iterator[Redis]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as folder:
        line = [installed("redis-server"), "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder]
        line += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())] if cluster else []
        process = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )
        try:
            wait_until_ready(process, Place(Path(), core, port, 0), Path(os.devnull))
            yield Redis(port)
        finally:
            stop(process)


@contextmanager
def gateway(options: Options, ports: list[int], policy: str, core: int, scheme: str = "redis") -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="sluice-perf-") as folder:
        config, rules, log = (Path(folder) / name for name in ("sluice.toml", "policy.toml", "log"))
        config.write_text(CONFIG.format(urls=json.dumps([f"{scheme}://127.0.0.1:{port}" for port in ports])))
        rules.write_text(policy)
        place = Place(options.setup.binaries, core, free_port(), free_port())
        line = [str(place.binaries / "sluice"), "--config", str(config), "--policy", str(rules), "--cpus", str(core)]
        line += ["--listen-resp", f"127.0.0.1:{place.port}", "--listen-ops", f"127.0.0.1:{place.ops_port}",
                 "--listen-http", "off", "--listen-grpc", "off"]
        with log.open("wb") as output:
            process = subprocess.Popen([*line, "--log-level", "warn"], stdout=output, stderr=output, cwd=folder)
        try:
            wait_until_ready(process, place, log)
            started = Gateway(place.port, place.ops_port)
            deadline = time.monotonic() + 10
            while started.sum_of(r'sluice_redis_events_total\{event="connected"\}') < len(ports):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no connection to Redis:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield started
        finally:
            stop(process)


def load(options: Options, gateways: list[Gateway], *args: object, spin_us: int = 0) -> list[dict]:
    """Runs a load generator against each gateway, all at once. One that looks for replies without sleeping would take
    the core from gateways that share it."""
    processes = []
    for at, one in enumerate(gateways):
        line = [str(options.setup.binaries / "sluice-load"), "--target", f"127.0.0.1:{one.port}", "--quiet", "--json"]
        line += ["--cpus", str(options.setup.load_core), "--warmup-secs", "0", "--seed", str(at + 1)]
        line += ["--spin-us", str(spin_us)]
        line += [str(word) for word in args]
        processes.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    reports = []
    for process in processes:
        out, problem = process.communicate()
        if process.returncode != 0:
            raise LoadFailed(problem.strip() or str(process.returncode))
        reports.append(json.loads(out))
    return reports


def total(reports: list[dict], what: str) -> int:
    return sum(report[what] for report in reports)


def decided(one: Gateway, by: str) -> float:
    return one.sum_of(rf'sluice_rule_decisions_total\{{rule="login-per-key",by="{by}"\}}')


def fast(options: Options) -> Figure:
    """Checks a second of one core where keys are hot: one key at ten times its limit, and a Zipf stream."""
    secs, core = max(options.setup.duration_secs, 2.0), options.setup.server_core
    rounds = []
    for at in range(1, options.rounds + 1):
        # A bucket that does not refill meanwhile, and is asked for much more than it holds: the count is exact.
        policy = rule(100_000, 1, "24h", 'lease = "off"')
        with redis(options.setup.load_core) as store, gateway(options, [store.port], policy, core) as one:
            (report,) = load(
                options, [one], "--identities", 1, "--depth", 100, "--duration-secs", secs, "--verify-every", 1000, spin_us=50
            )
            rounds.append((report["checks_per_sec"], report["allowed"], store.calls(), report["checks"]))
            say(f"round {at}/{options.rounds}  one key: {report['checks_per_sec']:,.0f}/s, {report['allowed']} allowed")
    speed = statistics.median(one[0] for one in rounds)
    exact = all(one[1] == 100_000 for one in rounds)
    head = ["round", "checks", "checks/s", "allowed", "its limit", "calls"]
    rows = [
        [str(at + 1), number(one[3]), number(one[0]), number(one[1]), "100,000", number(one[2])]
        for at, one in enumerate(rounds)
    ]
    ways = []
    for hot in ('lease = "off"', 'lease = "auto"', "lease = 50", "split = 10", "sample = 10"):
        policy = rule(100, 100, "1m", hot)
        with redis(options.setup.load_core) as store, gateway(options, [store.port], policy, core) as one:
            args = ["--identities", ZIPF_IDENTITIES, "--distribution", "zipf", "--zipf-exponent", "1.1"]
            (report,) = load(options, [one], *args, "--depth", 64, "--duration-secs", secs, "--verify-every", 1000, spin_us=50)
            calls, share = store.calls(), report["denied"] / report["checks"]
            say(f"{hot}: {report['checks_per_sec']:,.0f}/s, {100 * share:.0f} % denied, {calls / secs:,.0f} calls/s")
            row = [f"`{hot}`", number(report["checks_per_sec"]), f"{100 * share:.0f} %", number(calls / secs)]
            by = [f"{100 * decided(one, by) / report['checks']:.0f} %" for by in ("redis", "rejection", "lease", "sample")]
            ways.append([*row, *by])
    targets = [
        Target("one key at ten times its limit and more, checks a second", speed, ONE_CORE_TARGET),
        Target("exactly its limit was allowed, in every round", float(exact), 1.0),
    ]
    zipf = ["way", "checks/s", "denied", "calls/s", "by Redis", "by rejection", "by lease", "by sample"]
    text = [
        f"## One hot key over its limit: one core, Redis on the other, {secs:g} s, depth 100",
        table(head, rows),
        Target.table(targets),
        f"## Zipf(1.1) over {ZIPF_IDENTITIES:,} identities, each may 100 a minute: one core, {secs:g} s, depth 64",
        table(zipf, ways),
    ]
    return Figure("\n\n".join(text), {"one_key": rounds, "zipf": ways}, failed=not exact)


def claims(options: Options) -> Figure:
    """What each way of meeting a hot key does, by real processes: the counterpart of `sluice-simulator measure`."""
    rows: list[list[str]] = []

    def row(what: str, *figures: str) -> None:
        say(f"{what}: {', '.join(figures)}")
        rows.append([what, "; ".join(figures)])

    over_its_limit(options, row)
    leased(options, row)
    split(options, row)
    sampled(options, row)
    coalesced(options, row)
    beside_cold_keys(options, row)
    text = ["## Hot keys, by real processes", table(["what", "measured"], rows)]
    return Figure("\n\n".join(text), {"rows": rows})


def over_its_limit(options: Options, row) -> None:
    secs = 10
    for times in (10, 50):
        policy = rule(100, 100, "1s", 'lease = "off"')
        with redis(options.setup.server_core) as store, gateway(
            options, [store.port], policy, options.setup.load_core
        ) as one:
            (report,) = load(options, [one], "--identities", 1, "--rate", 100 * times, "--duration-secs", secs)
            limit, calls = 100 + 100 * report["seconds"], store.calls()
            row(
                f"a key at {times} times its limit",
                f"{report['allowed']:,} of {limit:,.0f} admitted",
                f"one call in {report['checks'] / calls:.1f} checks",
            )


def leased(options: Options, row) -> None:
    core = options.setup.load_core
    with redis(options.setup.server_core) as store, ExitStack() as stack:
        policy = rule(100, 1, "24h", "lease = 100")
        ten = [stack.enter_context(gateway(options, [store.port], policy, core)) for _ in range(10)]
        reports = load(options, ten, "--identities", 1, "--rate", 200, "--duration-secs", 5, "--connections", 2)
        row("10 gateways lease 100 from a bucket of 100", f"{total(reports, 'allowed')} admitted in all")
    for count in (1, 3, 10, 30):
        with redis(options.setup.server_core) as store, ExitStack() as stack:
            policy = rule(100_000, 1, "24h", "lease = 50")
            several = [stack.enter_context(gateway(options, [store.port], policy, core)) for _ in range(count)]
            args = ["--identities", 1, "--rate", max(6_000 // count, 1), "--connections", 2]
            reports = load(options, several, *args, "--duration-secs", 5)
            held = sum(one.sum_of("sluice_lease_tokens") for one in several)
            spared = total(reports, "checks") / store.calls()
        with redis(options.setup.server_core) as store, ExitStack() as stack:
            policy = rule(3_000, 1, "24h", "lease = 50")
            several = [stack.enter_context(gateway(options, [store.port], policy, core)) for _ in range(count)]
            reports = load(options, several, *args, "--duration-secs", 3)
            row(
                f"leases of 50, {count} gateways",
                f"one call in {spared:.1f} checks below the limit",
                f"{held:,.0f} tokens leased at the end",
                f"{total(reports, 'allowed'):,} of a bucket of 3,000 admitted in all",
            )


def split(options: Options, row) -> None:
    for capacity in (100, 1_000, 10_000):
        with ExitStack() as stack:
            nodes = [stack.enter_context(redis(options.setup.server_core, cluster=True)) for _ in range(10)]
            ports = [node.port for node in nodes]
            together = [f"127.0.0.1:{port}" for port in ports]
            command = [installed("redis-cli"), "--cluster", "create", *together, "--cluster-yes"]
            subprocess.run(command, check=True, capture_output=True)
            policy = rule(capacity, 1, "24h", "split = 10")
            one = stack.enter_context(gateway(options, ports, policy, options.setup.load_core))
            first = until_denied(one, capacity)
            calls = [node.calls() for node in nodes]
            row(
                f"split in 10, a limit of {capacity:,}, ten shards",
                f"{100 * first / capacity:.0f} % of it before the first deny",
                f"{sum(count > 0 for count in calls)} shards share the calls",
                f"the busiest has {100 * max(calls) / sum(calls):.0f} % of them",
            )


def until_denied(one: Gateway, most: int) -> int:
    """Asks for the hot key, one check after the other, until it is denied. Returns how many passed."""
    words = ["CHECK", "path", "/v1/login", "method", "POST", "key", HOT]
    request = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    with socket.create_connection(("127.0.0.1", one.port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replies = client.makefile("rb")
        for passed in range(most + 1):
            client.sendall(request.encode())
            # `*6`, five integers, and a name in two lines.
            lines = [replies.readline() for _ in range(8)]
            if lines[1] != b":1\r\n":
                return passed
    return most


def sampled(options: Options, row) -> None:
    secs = 10
    policy = rule(1_000, 1_000, "1s", "sample = 10")
    with redis(options.setup.server_core) as store, gateway(
        options, [store.port], policy, options.setup.load_core
    ) as one:
        (report,) = load(options, [one], "--identities", 1, "--rate", 10_000, "--duration-secs", secs)
        limit = 1_000 + 1_000 * report["seconds"]
        row(
            "sample 1 in 10 at 10 times the limit",
            f"{report['allowed'] / limit:.2f} times the limit admitted",
            f"one call in {report['checks'] / store.calls():.0f} checks",
        )


def coalesced(options: Options, row) -> None:
    policy = rule(1_000_000_000, 1_000_000_000, "1h", 'lease = "off"')
    with redis(options.setup.load_core) as store, gateway(
        options, [store.port], policy, options.setup.server_core
    ) as one:
        (report,) = load(options, [one], "--identities", 1, "--depth", 64, "--duration-secs", 5)
        row(
            "coalescing, one key, one core, as fast as it goes",
            f"{report['checks_per_sec']:,.0f} checks a second",
            f"{store.calls() / report['seconds']:,.0f} calls a second",
        )


def beside_cold_keys(options: Options, row) -> None:
    """p99 of 10,000 cold keys, next to a hot one that three gateways are asked for."""
    core, gateways = options.setup.load_core, 3
    far, over = (10_000_000, 10_000_000, "1s"), (100, 100, "1s")
    for what, limit, hot, depth in (
        ("no hot key", far, 'lease = "off"', 0),
        ("a hot key, coalescing alone", far, 'lease = "off"', 8),
        ('a hot key, `lease = "auto"`', far, 'lease = "auto"', 8),
        ("a hot key, `lease = 1000`", far, "lease = 1000", 8),
        ("a hot key, `sample = 10`", far, "sample = 10", 8),
        ("a hot key far over its limit", over, 'lease = "off"', 8),
    ):
        policy = rule(1_000, 1_000, "1s", 'lease = "off"')
        capacity, refill, period = limit
        policy += f'[[override]]\nrule = "login-per-key"\nidentity = ["hot_00000000"]\nhot = {{ {hot} }}\n'
        policy += f'limit = {{ capacity = {capacity}, refill = {refill}, period = "{period}" }}\n'
        with redis(options.setup.server_core) as store, ExitStack() as stack:
            several = [stack.enter_context(gateway(options, [store.port], policy, core)) for _ in range(gateways)]
            heaters = []
            for one in several if depth else []:
                line = [str(options.setup.binaries / "sluice-load"), "--target", f"127.0.0.1:{one.port}", "--quiet"]
                line += ["--cpus", str(core), "--identities", "1", "--identity-prefix", "hot_", "--json"]
                line += ["--rate", "20000", "--connections", str(depth), "--warmup-secs", "2", "--duration-secs", "6"]
                heaters.append(subprocess.Popen([*line, "--spin-us", "0"], stdout=subprocess.PIPE, text=True))
            # Leases that begin by themselves have begun by then.
            time.sleep(3)
            before = store.calls()
            args = ["--identities", 10_000, "--rate", 300, "--connections", 4]
            reports = load(options, several, *args, "--duration-secs", 4)
            calls = store.calls() - before - total(reports, "checks")
            checks = sum(json.loads(heater.communicate()[0])["checks_per_sec"] for heater in heaters)
            p99 = statistics.median(report["latency_us"]["p99"] for report in reports)
            p50 = statistics.median(report["latency_us"]["p50"] for report in reports)
            row(
                f"10,000 cold keys beside {what}",
                f"p50 {p50:,.0f} µs, p99 {p99:,.0f} µs",
                f"{checks:,.0f} hot checks a second, {max(calls, 0) / 4:,.0f} calls a second for them",
            )


def hot(options: Options) -> Figure:
    """How fast hot keys are answered."""
    try:
        return fast(options)
    except (Missing, LoadFailed, RuntimeError) as problem:
        return Figure(f"## Hot keys\n\n- not measured: {problem}", {"problems": [str(problem)]}, failed=True)


def hot_claims(options: Options) -> Figure:
    """What each way of meeting hot keys does."""
    try:
        return claims(options)
    except (Missing, LoadFailed, RuntimeError) as problem:
        return Figure(f"## Hot keys\n\n- not measured: {problem}", {"problems": [str(problem)]}, failed=True)
