"""S3 server for tests: moto behind a function that may refuse or delay requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NEEDED = "needs s3fs, moto, Flask and flask-cors of requirements-dev.txt"


class Server:
    """The server, in a thread of this process.

    Attributes:
        fault: Function that is called with the method and the path of each request. It may wait. If
            it returns a status such as "403 Forbidden", the request is refused with this status.
        requests: Methods and paths of all requests.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        # Requests are not logged, because tests read what a run prints.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _answer(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if status := self.fault(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Type", "application/xml")])
            name = "AccessDenied" if status.startswith("403") else status.replace(" ", "")
            return [f"<Error><Code>{name}</Code><Message>{status}</Message></Error>".encode()]
        return self._moto(environ, start_response)

    def close(self) -> None:
        self._server.shutdown()


@contextmanager
def running_server() -> Iterator[Server]:
    """Context manager that yields the server. Skips the test if a package is missing."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=NEEDED)
    server = Server()
    yield server
    server.close()
