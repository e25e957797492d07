"""A web server on loopback that answers as a script says: it fails, stalls, cuts, closes and lies."""

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests
from requests.adapters import HTTPAdapter

import harness

SLEEP = time.sleep  # tests replace time.sleep


def fresh_session() -> requests.Session:
    """The project's session, without the connections of earlier tests."""
    session = requests.Session()
    for prefix in ("http://", "https://"):
        retries = harness.SESSION.get_adapter(prefix + "a.org").max_retries
        session.mount(prefix, HTTPAdapter(max_retries=retries, pool_maxsize=256))
    return session


@dataclass
class Reply:
    status: int = 200
    text: str | bytes = ""
    headers: dict = field(default_factory=dict)
    fault: str = (
        ""  # close: no answer; stall: none in time; cut: half of the body; hang: half, and then silence
    )


@dataclass
class Request:
    method: str
    path: str
    headers: dict  # names in lower case
    body: str

    def json(self) -> dict:
        return json.loads(self.body)


class Server:
    """`replies` are given in their order, the last one for ever; or `answer`, a function of the request."""

    def __init__(self):
        self.replies = [Reply()]
        self.requests = []
        self.answer = lambda request: self.replies[min(len(self.requests), len(self.replies)) - 1]
        self.stall = 1.0  # seconds
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.serve(self)

            do_POST = do_GET

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # a client that did not wait
        self.url = "http://127.0.0.1:{1}/".format(*self.http.server_address)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def serve(self, handler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0)).decode()
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = Request(handler.command, handler.path, headers, body)
        self.requests.append(request)
        reply = self.answer(request)
        handler.close_connection = True
        if reply.fault == "stall":
            SLEEP(self.stall)
        if reply.fault in ("stall", "close"):
            return
        data = reply.text if isinstance(reply.text, bytes) else reply.text.encode()
        handler.send_response(reply.status)
        handler.send_header("content-length", str(len(data)))
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.fault in ("cut", "hang"):
            data = data[: len(data) // 2]
        handler.wfile.write(data)
        if reply.fault == "hang":
            handler.wfile.flush()
            SLEEP(self.stall)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
