"""A PostgreSQL server for tests: the one that TEST_POSTGRES_URL names, or one of our own from installed binaries."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
from sqlalchemy import make_url

from tests.harness.debian import postgres_binaries
from tests.harness.server_process import free_port

START_S = 120
NO_SYNC = "-c fsync=off"


def _unprivileged() -> pwd.struct_passwd | None:
    """Whom the server runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {user.pw_name: user for user in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


class Server:
    """A PostgreSQL server that can be stopped and started; `url` is of a database to make others from."""

    def __init__(self, binaries: Path, folder: Path, options: str = NO_SYNC) -> None:
        """`options` are those of `postgres`; without `NO_SYNC` it writes as durably as by default."""
        self._binaries = binaries
        self._options = options
        self._data = folder / "data"
        self._pid_path = self._data / "postmaster.pid"
        self.log_path = folder / "log"
        self._user = _unprivileged()
        if self._user is not None:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)
        self._port = free_port()
        self._run("initdb", "-D", str(self._data), "-U", "kvferry", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.url = f"postgresql://kvferry@127.0.0.1:{self._port}/postgres"
        self.start()

    def start(self) -> None:
        """Nothing happens if it runs."""
        if self._pid_path.exists():
            return
        options = f"-p {self._port} -h 127.0.0.1 -k '' {self._options}"
        log = str(self.log_path)
        self._run("pg_ctl", "-D", str(self._data), "-l", log, "-w", "-t", str(START_S), "-o", options, "start")

    @property
    def pid(self) -> int:
        """The process whose children serve the connections."""
        return int(self._pid_path.read_text().split()[0])

    def stop(self) -> None:
        """As a crash does: nobody is told. Nothing happens if it is stopped."""
        if self._pid_path.exists():
            self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        user, group = (None, None) if self._user is None else (self._user.pw_uid, self._user.pw_gid)
        groups = None if self._user is None else []
        done = subprocess.run(
            [str(self._binaries / program), *arguments],
            user=user,
            group=group,
            extra_groups=groups,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}")


@contextmanager
def own_server(options: str = NO_SYNC) -> Iterator[Server]:
    """A server that a test may stop; skips where none is installed."""
    binaries = postgres_binaries()
    # Not among pytest's own folders, into which no other user can walk.
    with TemporaryDirectory(prefix="kvferry-postgres-") as folder:
        server = Server(binaries, Path(folder), options)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def new_database(server_url: str) -> Iterator[str]:
    """The URL of an empty database, dropped in the end."""
    name = f"kvferry_test_{uuid.uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


class LosingProxy:
    """A proxy that forwards connections to a server; with `loses_commit` it loses the answer to the next commit."""

    def __init__(self, server_url: str) -> None:
        server = make_url(server_url)
        self._server_port = server.port or 5432
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = server.set(port=self._listener.getsockname()[1]).render_as_string(hide_password=False)
        self.loses_commit = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                lost = threading.Event()
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._forward, args=(*pair, lost), daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, is_client: bool, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_client and self.loses_commit and b"COMMIT" in data:
                    self.loses_commit = False
                    lost.set()
                if not is_client and lost.is_set():
                    break
                to.sendall(data)
        for one in (source, to):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
