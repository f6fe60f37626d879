"""A loopback Hub that speaks what `kernels` asks: organisations, refs, revisions, trees and files of repositories."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

Files = Mapping[str, Path]


class StubHub:
    """`with StubHub({"org/name": {1: folder}}, trusted={"org"}) as hub:` and `HF_ENDPOINT=hub.url`."""

    def __init__(self, repos: Mapping[str, Mapping[int, Path]], trusted: Collection[str] = ()) -> None:
        self.trusted = frozenset(trusted)
        self.fetched: Counter[str] = Counter()
        """Files that were downloaded, `org/name/build/…`, and how often."""
        self.asked: Counter[str] = Counter()
        """Requests of the API, by kind."""
        self.repos = {repo: {v: _content(folder) for v, folder in by.items()} for repo, by in repos.items()}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> StubHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def find(self, repo: str, revision: str) -> tuple[str, Files] | None:
        versions = self.repos[repo]
        for version, (commit, files) in versions.items():
            if revision in {commit, f"v{version}", f"refs/heads/v{version}"}:
                return commit, files
        return versions[max(versions)] if revision == "main" else None


def _content(folder: Path) -> tuple[str, Files]:
    files = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    digest = hashlib.sha1()
    for name, path in files.items():
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest(), files


def _handler(hub: StubHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def send(self, code: int, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(code)
            for header in (*headers, ("Content-Length", str(len(body)))):
                self.send_header(*header)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def send_json(self, value: object, code: int = 200, *headers: tuple[str, str]) -> None:
            self.send(code, json.dumps(value).encode(), ("Content-Type", "application/json"), *headers)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            url = urlparse(self.path)
            parts = [unquote(part) for part in url.path.strip("/").split("/")]
            if parts[:2] == ["api", "organizations"]:
                hub.asked["organization"] += 1
                return self.send_json({"name": parts[2], "trustedKernelPublisher": parts[2] in hub.trusted})
            rest = parts[2:] if parts[:2] == ["api", "kernels"] else parts[1:] if parts[0] == "kernels" else []
            repo, rest = "/".join(rest[:2]), rest[2:]
            if repo not in hub.repos:
                error = ("X-Error-Code", "RepoNotFound")
                return self.send_json({"error": "Repository not found"}, 404, error)
            hub.asked[rest[0] if rest else "repo"] += 1
            if rest == ["refs"]:
                branches = [
                    {"name": f"v{v}", "ref": f"refs/heads/v{v}", "targetCommit": commit}
                    for v, (commit, _) in hub.repos[repo].items()
                ]
                return self.send_json({"branches": branches, "converts": [], "tags": []})
            found = hub.find(repo, rest[1]) if len(rest) > 1 else None
            if found is None:
                return self.send_json({"error": "Invalid rev id"}, 404, ("X-Error-Code", "RevisionNotFound"))
            commit, files = found
            if rest[0] == "revision":
                siblings = [{"rfilename": name} for name in files]
                return self.send_json({"id": repo, "sha": commit, "private": False, "siblings": siblings})
            if rest[0] == "tree":
                recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true"
                return self.send_json(_tree(files, "/".join(rest[2:]), recursive))
            return self.send_file(repo, "/".join(rest[2:]), commit, files)

        def send_file(self, repo: str, name: str, commit: str, files: Files) -> None:
            if name not in files:
                headers = ("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", commit)
                return self.send_json({"error": "Entry not found"}, 404, *headers)
            body = files[name].read_bytes()
            if self.command == "GET":
                hub.fetched[f"{repo}/{name}"] += 1
            etag = ("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            return self.send(200, body, etag, ("X-Repo-Commit", commit), ("Accept-Ranges", "bytes"))

    return Handler


def _tree(files: Files, base: str, recursive: bool) -> list[dict[str, Any]]:
    base = f"{base}/" if base else ""
    entries: list[dict[str, Any]] = []
    folders: set[str] = set()
    for name, path in files.items():
        if not name.startswith(base):
            continue
        tail = name[len(base) :]
        if recursive or "/" not in tail:
            oid = hashlib.sha1(path.read_bytes()).hexdigest()
            entries.append({"type": "file", "path": name, "size": path.stat().st_size, "oid": oid})
        parts = tail.split("/")[:-1]
        deep = len(parts) if recursive else min(1, len(parts))
        folders |= {base + "/".join(parts[:depth]) for depth in range(1, deep + 1)}
    return entries + [
        {"type": "directory", "path": f, "size": 0, "oid": hashlib.sha1(f.encode()).hexdigest()}
        for f in sorted(folders)
    ]
