"""Object storage for tests: moto's S3 on loopback, and plain http, both of which can be made to fail.

A fault is taken by the next request that it fits, and then gone: an answer instead of the real one, a body
that ends early, or a wait at a gate that the test opens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pytest
from fsspec.config import conf

from padless.runtime import storage

BUCKET = "bucket"


@dataclass(kw_only=True)
class Fault:
    """What happens to requests whose method and path end fit."""

    end: str
    """The end of the request's path."""
    method: str = "GET"
    status: int | None = None
    """Answer with this status, and nothing of the file."""
    cut: int | None = None
    """Break the connection after so many bytes of the body."""
    gate: threading.Event | None = None
    """Answer when this is set."""
    times: int = 1
    skip: int = 0
    """Let so many fitting requests pass before."""


@dataclass
class Faults:
    """The faults that are waiting, and every request that came."""

    waiting: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path with the query."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, end: str, **more: Any) -> Fault:
        fault = Fault(end=end, **more)
        self.waiting.append(fault)
        return fault

    def of(self, method: str, path: str, query: str = "") -> Fault | None:
        """The fault that this request takes."""
        whole = f"{path}?{query}" if query else path
        with self.lock:
            self.requests.append((method, whole))
            for fault in self.waiting:
                if fault.method != method or not (path.endswith(fault.end) or fault.end in query):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self.waiting.remove(fault)
                return fault
        return None

    def asked(self, method: str, end: str) -> int:
        """How many requests of that kind came for a path."""
        return sum(1 for how, path in self.requests if how == method and urlsplit(path).path.endswith(end))


@dataclass(frozen=True, kw_only=True)
class S3:
    """A running server with one bucket."""

    endpoint: str
    faults: Faults
    system: Any
    """An s3fs file system for the test's own looks, which goes past the faults' counts only in name."""

    @property
    def options(self) -> dict[str, Any]:
        """What a user gives as storage_options."""
        return {"endpoint_url": self.endpoint, "key": "testing", "secret": "testing"}

    def upload(self, folder: Path, name: str) -> str:
        """Copy a folder into the bucket; its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.system.pipe_file(f"{BUCKET}/{name}/{file.relative_to(folder)}", file.read_bytes())
        return f"s3://{BUCKET}/{name}"

    def files(self, name: str) -> dict[str, bytes]:
        """Every object below a folder of the bucket."""
        self.system.invalidate_cache()
        root = f"{BUCKET}/{name}/"
        return {path[len(root) :]: self.system.cat_file(path) for path in self.system.find(root)}

    def open_uploads(self) -> int:
        """Multipart uploads that were neither completed nor aborted."""
        return len(self.system.list_multipart_uploads(BUCKET))


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """Moto's S3 on a free port of loopback, empty but for the bucket."""
    import s3fs
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    faults = Faults()
    real = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        fault = faults.of(method, path, environ.get("QUERY_STRING", ""))
        if fault is not None and fault.gate is not None:
            fault.gate.wait()
        if fault is not None and fault.status is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault.status} Fault", [("Content-Type", "application/xml")])
            if method == "HEAD":  # a body would be taken for the next answer on the connection
                return []
            code = {403: "AccessDenied", 503: "SlowDown"}.get(fault.status, "InternalError")
            return [f"<Error><Code>{code}</Code><Message>made to fail</Message></Error>".encode()]
        answer = real(environ, start_response)
        return answer if fault is None or fault.cut is None else _cut(answer, fault.cut)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    system = s3fs.S3FileSystem(
        endpoint_url=endpoint, key="testing", secret="testing", skip_instance_cache=True
    )
    try:
        # What an earlier server of this process held is still there.
        urlopen(Request(f"{endpoint}/moto-api/reset", method="POST")).close()
        system.mkdir(BUCKET)
        # Those that were opened by the environment's settings are kept for these, whatever they say now.
        s3fs.S3FileSystem.clear_instance_cache()
        yield S3(endpoint=endpoint, faults=faults, system=system)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _cut(answer: Iterable[bytes], size: int) -> Iterator[bytes]:
    left = size
    for block in answer:
        yield block[:left]
        left -= len(block)
        if left <= 0:
            raise ConnectionAbortedError("the connection is cut here, as asked")


class _Files(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, *, ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges, self.faults = folder, ranges, Faults()


class _Handler(BaseHTTPRequestHandler):
    server: _Files
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.server.faults.of(self.command, path) or Fault(end="")
        if fault.gate is not None:
            fault.gate.wait()
        file = self.server.folder / path.lstrip("/")
        data = file.read_bytes() if file.is_file() else b""
        status = fault.status or (200 if file.is_file() else 404)
        headers = {"ETag": f'"{hash(data)}"'}
        asked = self.headers.get("Range")
        if status != 200:
            data, headers = b"", {}
        elif asked and self.server.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            whole = len(data)
            data = data[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{whole}"
            status = 206
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # whoever asked has enough
                self.wfile.write(data if fault.cut is None else data[: fault.cut])
        if fault.cut is not None:
            self.close_connection = True

    do_HEAD = do_GET


@contextlib.contextmanager
def http_server(folder: Path, *, ranges: bool = True) -> Iterator[tuple[str, Faults]]:
    """The files of a folder by http; the address and the faults."""
    server = _Files(folder, ranges=ranges)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def environment_of(s3: S3, cache: Path) -> Iterator[None]:
    """The bucket as the environment names it, little patience, a cache of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("ENDPOINT_URL", s3.endpoint),
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
        ):
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("PADLESS_CACHE", str(cache))
        patch.setattr(storage, "FIRST_PAUSE", 0.001)
        # Drivers that do not try again themselves, with pauses of their own.
        patch.setattr("s3fs.S3FileSystem.retries", 1)
        patch.setitem(conf, "s3", {"config_kwargs": {"retries": {"max_attempts": 0}}})
        yield
    s3.faults.waiting.clear()
    s3.faults.requests.clear()


def spoil(system: Any, path: str, how: str) -> None:
    """Take an object away ("missing"), cut its end off ("cut"), or change a byte of it."""
    data = system.cat_file(path)
    if how == "missing":
        system.rm_file(path)
    else:
        system.pipe_file(path, data[:-8] if how == "cut" else data[:300] + b"!" + data[301:])
