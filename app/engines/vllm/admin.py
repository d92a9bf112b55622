"""Server of the admin API in vLLM's engine-core process."""

from __future__ import annotations

import logging
import socket
import threading

from kvferry.app.discovery import Announcement, announce_service
from kvferry.app.engines.vllm.options import ConnectorRefused
from kvferry.app.service.server import PortTaken, Served, Server, listen, make_server, url_of
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
MAX_PORT = 65535


class AdminServer:
    """Serves the admin API on a thread, and writes the discovery file by which clients on this host find it."""

    def __init__(
        self, settings: Settings, engine: Served, name: str, engine_name: str, data_parallel_rank: int
    ) -> None:
        """Listen on the port plus the data-parallel rank, or on a free port if that is taken.

        Raises:
            ConnectorRefused: The address cannot be listened on.
        """
        try:
            self._listener = _listen(settings, data_parallel_rank)
        except StartError as error:
            raise ConnectorRefused(settings.as_written(str(error))) from error
        self.url = url_of(self._listener)
        self._engine = engine
        self._state_dir = settings.state_dir
        self._name = name
        self._engine_name = engine_name
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._serve, name="kvferry-admin", daemon=True)
        self._announcement: Announcement | None = None

    def start(self) -> None:
        """Start to serve and write the discovery file."""
        self._server = make_server(self._engine)
        self._thread.start()
        self._announcement = announce_service(self._state_dir, self._name, self.url, self._engine_name)
        _log.info("admin API on %s: dashboard /ui/, API /docs", self.url)

    def close(self) -> None:
        """Stop the server; may be called again."""
        if self._announcement is not None:
            self._announcement.withdraw()
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._listener.close()

    def _serve(self) -> None:
        if self._server is None:
            return
        try:
            self._server.run(sockets=[self._listener])
        except Exception:  # noqa: BLE001 - the engine continues without the admin API
            _log.exception("the admin API has stopped; the engine continues")


def _listen(settings: Settings, data_parallel_rank: int) -> socket.socket:
    port = settings.port + data_parallel_rank if settings.port else 0
    if port <= MAX_PORT:
        try:
            return listen(settings.host, port)
        except PortTaken:
            pass
    listener = listen(settings.host, 0)
    _log.warning(
        "admin port %d is taken: listening on %s, where clients on this host find it; set port=0 to use a free port",
        port,
        url_of(listener),
    )
    return listener
