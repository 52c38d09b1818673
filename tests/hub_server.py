"""A loopback server that speaks the Hub endpoints which huggingface_hub calls to push and to download a model."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import yaml

LFS_SUFFIX = ".safetensors"


class FakeHub:
    """Repositories in memory. ``fail`` maps an endpoint's name to the status it answers with instead.

    repos: files of main, by repository. branches: of the others, by repository and branch.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.tokens: set[str | None] = set()
        self.fail: dict[str, int] = {}
        self.corrupt = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def sha(self, repo: str, branch: str = "main") -> str:
        """Commit id: a hash of the contents."""
        return _commit_id(self.files(repo, branch))

    def files(self, repo: str, revision: str | None) -> dict[str, bytes]:
        """Those of a branch or commit."""
        refs = {"main": self.repos[repo], **self.branches.get(repo, {})}
        if revision in (None, *refs):
            return refs[revision or "main"]
        return next(files for name, files in refs.items() if self.sha(repo, name) == revision)

    def has(self, repo: str, revision: str) -> bool:
        refs = ["main", *self.branches.get(repo, {})]
        return revision in refs or revision in [self.sha(repo, name) for name in refs]

    def info(self, repo: str, path: str, revision: str | None = None) -> dict[str, Any]:
        content = self.files(repo, revision)[path]
        found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
        if path.endswith(LFS_SUFFIX):
            found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 128}
        return found


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def _commit_id(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


_MODEL = r"/api/models/(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("validate", "POST", r"/api/validate-yaml"),
    ("create", "POST", r"/api/repos/create"),
    ("refs", "GET", rf"{_MODEL}/refs"),
    ("branch", "POST", rf"{_MODEL}/branch/{_REVISION}"),
    ("preupload", "POST", rf"{_MODEL}/preupload/{_REVISION}"),
    ("batch", "POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("put", "PUT", r"/lfs/(?P<oid>[0-9a-f]{64})"),
    ("commit", "POST", rf"{_MODEL}/commit/{_REVISION}"),
    ("paths", "POST", rf"{_MODEL}/paths-info/{_REVISION}"),
    ("info", "GET", rf"{_MODEL}(/revision/{_REVISION})?"),
    ("tree", "GET", rf"{_MODEL}/tree/{_REVISION}"),
    ("resolve", "HEAD", rf"/(?P<repo>[^/]+/[^/]+)/resolve/{_REVISION}/(?P<path>.+)"),
    ("resolve", "GET", rf"/(?P<repo>[^/]+/[^/]+)/resolve/{_REVISION}/(?P<path>.+)"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        for name, method, pattern in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                self.hub.calls.append(name)
                self.hub.tokens.add(self.headers.get("Authorization"))
                if name in self.hub.fail:
                    return self.reply(self.hub.fail[name], {"error": f"refused on purpose: {name}"})
                if "repo" in match.groupdict() and match["repo"] not in self.hub.repos:
                    return self.reply(404, {"error": "no such repo"}, {"X-Error-Code": "RepoNotFound"})
                revision = match.groupdict().get("revision")
                if revision and name != "branch" and not self.hub.has(match["repo"], revision):
                    return self.reply(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
                return getattr(self, name)(body, **match.groupdict())
        self.hub.calls.append(f"unknown {self.command} {path}")
        return self.reply(404, {"error": "no such endpoint"})

    do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815 - the names of http.server

    def reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def validate(self, body: bytes) -> None:
        errors = card_errors(json.loads(body)["content"])
        found = [{"message": message} for message in errors]
        self.reply(400 if found else 200, {"errors": found, "warnings": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.repos:
            return self.reply(409, {"url": f"{self.hub.endpoint}/{repo}"})
        self.hub.repos[repo] = {}
        self.hub.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return self.reply(200, {"url": f"{self.hub.endpoint}/{repo}"})

    def refs(self, body: bytes, repo: str) -> None:
        names = ["main", *self.hub.branches.get(repo, {})]
        found = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": self.hub.sha(repo, n)} for n in names]
        self.reply(200, {"branches": found, "converts": [], "tags": []})

    def branch(self, body: bytes, repo: str, revision: str) -> None:
        self.hub.branches.setdefault(repo, {})[revision] = dict(self.hub.repos[repo])
        self.reply(200, {})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIX) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self.reply(200, {"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        # What is there already is not asked for again.
        objects = [
            one
            if one["oid"] in self.hub.objects
            else {**one, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}"}}}
            for one in json.loads(body)["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.reply(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        files, changed = self.hub.files(repo, revision), {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
                continue
            content = self.hub.objects[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])
            changed[value["path"]] = content[:-1] if self.hub.corrupt else content
        files |= changed
        self.hub.commits.append({"repo": repo, "summary": lines[0]["value"]["summary"], "files": sorted(changed)})
        oid = self.hub.sha(repo, revision)
        url = f"{self.hub.endpoint}/{repo}/commit/{oid}"
        self.reply(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def paths(self, body: bytes, repo: str, revision: str) -> None:
        asked = parse_qs(body.decode())["paths"]
        files = self.hub.files(repo, revision)
        self.reply(200, [self.hub.info(repo, path, revision) for path in asked if path in files])

    def info(self, body: bytes, repo: str, revision: str | None) -> None:
        siblings = [{"rfilename": path} for path in sorted(self.hub.files(repo, revision))]
        sha = _commit_id(self.hub.files(repo, revision))
        self.reply(200, {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "tags": []})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        self.reply(200, [self.hub.info(repo, path, revision) for path in sorted(self.hub.files(repo, revision))])

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        files = self.hub.files(repo, revision)
        if path not in files:
            return self.reply(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        etag = f'"{_blob_id(files[path])}"'
        return self.reply(200, files[path], {"ETag": etag, "X-Repo-Commit": _commit_id(files)})


def card_errors(text: str) -> list[str]:
    """What the Hub would refuse in a model card's metadata; stricter than it in that unknown keys are refused too."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return ["no metadata block"]
    data = yaml.safe_load(match[1])
    kinds: dict[str, Any] = {
        "base_model": str,
        "datasets": list,
        "library_name": str,
        "license": str,
        "license_link": str,
        "license_name": str,
        "model-index": list,
        "pipeline_tag": str,
        "tags": list,
    }
    errors = [f"unknown key {key}" for key in data if key not in kinds]
    errors += [
        f"{key} is of the wrong type" for key, kind in kinds.items() if not isinstance(data.get(key, kind()), kind)
    ]
    for key in ("base_model", *(["datasets"] if "datasets" in data else [])):
        for name in [data[key]] if isinstance(data.get(key), str) else data.get(key, []):
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
                errors.append(f"{key} {name} is not a Hub id")
    for model in data.get("model-index", []):
        if not isinstance(model.get("name"), str):
            errors.append("a model of the index has no name")
        for result in model["results"]:
            if not {"task", "dataset", "metrics"} <= set(result) or not {"name", "type"} <= set(result["dataset"]):
                errors.append("a result lacks task, dataset or metrics")
            if any(not isinstance(metric.get("value"), (int, float)) for metric in result["metrics"]):
                errors.append("a metric is no number")
    return errors
