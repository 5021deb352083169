"""A stand-in of the Hub's HTTP interface: what `huggingface_hub` asks for, from a dict of files.

Listings, revisions, `resolve` with ETag, commit and byte ranges, a redirect to a storage host for large
files, and the Hub's own error codes for what is missing, private or gated.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 4096
"""Bytes from which a file is kept in large-file storage, as the Hub does from 10 MB on."""


def commit_of(word: str) -> str:
    """A commit's name, for any word."""
    return hashlib.sha1(word.encode()).hexdigest()


@dataclass(kw_only=True)
class Repository:
    """A data set or model: the files of each of its commits."""

    commits: dict[str, dict[str, bytes]]
    """Commit -> path -> content."""
    refs: dict[str, str] = field(default_factory=dict)
    """Branch or tag -> commit."""
    card: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    @classmethod
    def of(cls, files: dict[str, bytes], **more: Any) -> Repository:
        """One commit, on main."""
        return cls(commits={commit_of("main"): files}, refs={"main": commit_of("main")}, **more)

    def commit(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


class StandIn(ThreadingHTTPServer):
    """The server; `repositories` may be changed while it runs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        """ "datasets/ORG/NAME" or "models/ORG/NAME"."""
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path and Range of every request."""
        self.sent = 0
        """Bytes of files that went out."""
        self.cut_after: int | None = None
        """Break a connection after so many bytes of a file."""
        self.read_only = False
        """Refuse whatever would write."""
        self.large: dict[str, bytes] = {}
        """What lies in large-file storage, by its SHA-256."""
        self.cut_ranges_after: int | None = None
        """The same, where a part of a file was asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """A server that runs as long as the block."""
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _facts(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": digest, "sha256": digest, "size": len(content), "pointerSize": 130}
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/storage/(\w+)/(.+?)/((?:[^/]+/){2})/(.+)", path):
            kind, commit, name, file = match[1], match[2], match[3].strip("/"), match[4]
            return self._content(self.server.repositories[f"{kind}/{name}"].commits[commit][file], {})
        api = re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        resolve = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api:
            return self._listing(f"{api[1]}/{api[2]}", api[3] or "revision", api[4] or "main")
        if resolve:
            return self._resolve((resolve[1] or "models/") + resolve[2], resolve[3], resolve[4])
        self._error(404, "EntryNotFound", f"no route for {path}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.command, path, None))
        if self.server.read_only:
            return self._error(403, "Forbidden", "this token may not write")
        if path == "/api/validate-yaml":
            return self._send(b'{"errors": [], "warnings": []}', {"Content-Type": "application/json"})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._large(json.loads(body))
        match = re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path)
        if match is None:
            return self._error(404, "EntryNotFound", f"no route for {path}")
        found = self.server.repositories[f"{match[1]}/{match[2]}"]
        if match[3] == "preupload":
            files = [
                {"path": file["path"], "shouldIgnore": False}
                | {"uploadMode": "lfs" if file["size"] >= LARGE else "regular"}
                for file in json.loads(body)["files"]
            ]
            self._send(json.dumps({"files": files}).encode(), {"Content-Type": "application/json"})
        elif match[3] == "branch":
            found.refs[match[4]] = found.refs["main"]
            self._send(b"{}", {"Content-Type": "application/json"}, 201)
        else:
            self._commit(found, f"{match[1]}/{match[2]}", match[4], body)

    def do_PUT(self) -> None:
        digest = self.path.rpartition("/")[2]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == digest
        self.server.large[digest] = content
        self._send(b"", {})

    def _create(self, asked: dict[str, Any]) -> None:
        key = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        url = f"{self.server.url}/{key}"
        if key in self.server.repositories:
            body = json.dumps({"url": url, "error": "You already created this dataset repo"})
            return self._send(body.encode(), {"Content-Type": "application/json"}, 409)
        self.server.repositories[key] = Repository.of({})
        self._send(json.dumps({"url": url}).encode(), {"Content-Type": "application/json"})

    def _large(self, asked: dict[str, Any]) -> None:
        """Where to put large files, those that are known apart."""
        objects = []
        for item in asked["objects"]:
            known = item["oid"] in self.server.large
            href = f"{self.server.url}/large/{item['oid']}"
            actions = {} if known else {"actions": {"upload": {"href": href}}}
            objects.append({**item, **actions})
        body = json.dumps({"transfer": "basic", "objects": objects}).encode()
        self._send(body, {"Content-Type": "application/vnd.git-lfs+json"})

    def _commit(self, found: Repository, key: str, revision: str, body: bytes) -> None:
        files = dict(found.commits[found.refs[revision]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = commit_of(f"commit {len(found.commits)}")
        found.commits[commit], found.refs[revision] = files, commit
        answer = {
            "success": True,
            "commitOid": commit,
            "commitUrl": f"{self.server.url}/{key}/commit/{commit}",
        }
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _repository(self, key: str) -> Repository | None:
        found = self.server.repositories.get(key)
        if found is None or found.private:  # the Hub does not tell one from the other
            self._error(401, "RepoNotFound", "Repository not found")
            return None
        return found

    def _listing(self, key: str, what: str, place: str) -> None:
        found = self._repository(key)
        if found is None:
            return
        revision, _, folder = (place, "", "") if what == "revision" else place.partition("/")
        commit = found.commit(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = found.commits[commit]
        if what == "tree":
            inside = [path for path in files if path.rpartition("/")[0] == folder or not folder]
            entries = [{"type": "file", "path": path, **_facts(files[path])} for path in inside]
            folders = {path.rpartition("/")[0] for path in files if not folder} - {""}
            entries += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
            return self._send(json.dumps(entries).encode(), {"Content-Type": "application/json"})
        siblings = [
            {"rfilename": path, "size": facts["size"], "blobId": facts["oid"], "lfs": facts.get("lfs")}
            for path, facts in ((path, _facts(content)) for path, content in files.items())
        ]
        info = {
            "id": key.partition("/")[2],
            "sha": commit,
            "private": False,
            "gated": "manual" if found.gated else False,
            "disabled": False,
            "tags": [],
            "cardData": found.card,
            "siblings": siblings,
        }
        self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _resolve(self, key: str, revision: str, file: str) -> None:
        found = self._repository(key)
        if found is None:
            return
        if found.gated:
            return self._error(403, "GatedRepo", f"Access to {key} is restricted")
        commit = found.commit(revision)
        content = found.commits[commit].get(file) if commit else None
        if content is None:
            return self._error(404, "EntryNotFound", f"no {file}")
        facts = _facts(content)
        headers = {"X-Repo-Commit": str(commit), "ETag": f'"{facts["oid"]}"'}
        if "lfs" not in facts:
            return self._content(content, headers)
        kind, name = key.split("/", 1)
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{facts["lfs"]["oid"]}"'}
        headers["Location"] = (
            f"http://localhost:{self.server.server_address[1]}/storage/{kind}/{commit}/{name}//{file}"
        )
        self._send(b"", headers, 302)

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return self._send(content, {"Accept-Ranges": "bytes", **headers})
        start, stop = int(asked[1]), min(len(content), int(asked[2] or len(content) - 1) + 1)
        if start >= len(content):
            return self._send(b"", headers, 416)
        where = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._send(content[start:stop], {**where, **headers}, 206)

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": message}, status)

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.cut_ranges_after if status == 206 else self.server.cut_after
        if cut is not None and "json" not in headers.get("Content-Type", "") and len(body) > cut:
            self.wfile.write(body[:cut])
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):  # whoever asked has enough
            self.wfile.write(body)
            self.server.sent += len(body)
