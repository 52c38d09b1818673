"""A loopback server of answers: OpenAI's routes and llama.cpp's own, with the faults that servers have."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tiny import tiny_tokenizer

EOS = 2
Write = Callable[[list[int], int], list[int]]


def letters(prompt: list[int], count: int) -> list[int]:
    """An answer that depends on the prompt alone: 1 to 7 letters and the end, or what ``count`` leaves of it."""
    digest = hashlib.sha256(repr(prompt).encode()).digest()
    return [*(30 + byte % 20 for byte in digest[: 1 + digest[0] % 7]), EOS][:count]


class AnswerServer:
    """Answers prompts with ``write``. ``faults`` are used up by the requests after the first ``spared``, one each.

    A fault is a status, ``garbage``, ``cut``, ``never``, or None. knows: ids (prompts as token ids), extras (fields
    beyond OpenAI's own); others are refused. refuses, breaks: texts in prompts that are refused, or always fail.
    gather: requests after the first ``spared`` wait until so many are here at a time, once. hold_after: further ones are
    not answered before ``release`` is set. Both in the place of pauses, on which a busy machine would decide the test.
    """

    def __init__(self, write: Write = letters) -> None:
        self.write = write
        self.faults: list[Any] = []
        self.spared = 0
        self.knows = {"ids", "extras"}
        self.tells_prompt = True
        self.shift: list[int] = []
        self.refuses = self.breaks = "\0"
        self.key: str | None = None
        self.retry_after = "0.3"
        self.gather = 0
        self.hold_after: int | None = None
        self.release = threading.Event()
        self.models = ["tiny"]
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.served: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Condition()
        self.closing = threading.Event()
        self.tokenizer = tiny_tokenizer()
        self.http = _Http(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of": self}))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([token for token in ids if token != EOS], skip_special_tokens=False))


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests; what else goes wrong here, they see as a lost connection."""


@contextmanager
def answer_server(write: Write = letters) -> Iterator[AnswerServer]:
    server = AnswerServer(write)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.release.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_of: AnswerServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int = 0) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) - cut])
        if cut:
            self.close_connection = True

    def send(self, value: Any, status: int = 200) -> None:
        self.reply(status, json.dumps(value).encode())

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send({"object": "list", "data": [{"id": name} for name in self.server_of.models]})

    def do_POST(self) -> None:
        server = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.times.append(time.monotonic())
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            server.lock.notify_all()
            number = len(server.bodies)
            fault = server.faults.pop(0) if number > server.spared and server.faults else None
            if number > server.spared:
                server.lock.wait_for(lambda: server.most_in_flight >= server.gather, timeout=30)
        if server.hold_after is not None and number > server.hold_after:
            server.release.wait(60)
        with server.lock:  # before the reply: the next request may be here before this method ends
            server.in_flight -= 1
        self.answer(body, fault)

    def answer(self, body: dict[str, Any], fault: Any) -> None:
        server = self.server_of
        if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.send({"error": f"no such key: {self.headers.get('Authorization')}"}, 401)
        if fault == "never":
            server.closing.wait(60)
            self.close_connection = True
            return None
        if fault == "garbage":
            return self.reply(200, b"<html>busy</html>")
        if isinstance(fault, int):
            return self.reply(fault, b'{"error": "fault"}', {"Retry-After": server.retry_after} if fault == 429 else {})
        return self.whole(body, 7 if fault == "cut" else 0)

    def whole(self, body: dict[str, Any], cut: int) -> None:
        server = self.server_of
        chat, own = self.path == "/v1/chat/completions", self.path == "/completion"
        assert chat or own or self.path == "/v1/completions"
        if chat:
            text = server.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            prompt = server.tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(body["prompt"], str):
            prompt = server.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        else:
            prompt = body["prompt"]
            if "ids" not in server.knows:
                return self.send({"error": "prompt must be a text"}, 400)
        if "return_token_ids" in body and "extras" not in server.knows:
            return self.send({"error": "unknown field return_token_ids"}, 400)
        if server.refuses in server.text(prompt):
            return self.send({"error": "prompt refused"}, 400)
        if server.breaks in server.text(prompt):
            return self.send({"error": "broken"}, 500)
        prompt = [*server.shift, *prompt]
        ids = server.write(prompt, body["n_predict" if own else "max_tokens"])
        with server.lock:
            server.served[server.text(prompt)] += 1
        ended = ids[-1:] == [EOS]
        if own:
            value = {"content": server.text(ids), "tokens": ids[:-1] if ended else ids, "stop": True}
            value |= {"stop_type": "eos" if ended else "limit", "tokens_evaluated": len(prompt)}
        else:
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else "length"}
            choice |= (
                {"message": {"role": "assistant", "content": server.text(ids)}} if chat else {"text": server.text(ids)}
            )
            if body.get("return_token_ids"):
                choice |= {"token_ids": ids, **({"prompt_token_ids": prompt} if server.tells_prompt else {})}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
            value = {"object": "text_completion", "choices": [choice], "usage": usage}
        return self.reply(200, json.dumps(value).encode(), cut=cut)
