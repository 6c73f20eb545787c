"""The agent service: HTTP and JSON, on this machine alone unless told otherwise."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from intune_callbacks.errors import ConfigError, first_line
from intune_callbacks.service.client import TOKEN
from intune_callbacks.service.jobs import Busy, Found, Gone, Jobs
from intune_callbacks.service.page import page
from intune_callbacks.service.wire import FORMAT, LARGEST_BYTES, Malformed, answer, decode, encode, parse

__all__ = ["Service", "serve", "token_in"]

MOST_CONNECTIONS = 256
"""At once, a choice; each has a thread for some milliseconds."""
LONGEST_S = 10.0
"""For what one side does not send or take, a choice: a question is one packet or a few."""
SHORTEST_TOKEN = 16
"""Characters, a choice: too many to be guessed over a network."""
PATHS = {"POST": ("/v1/decide", "/v1/found", "/v1/like"), "GET": ("/", "/v1/health")}


class Service(ThreadingHTTPServer):
    """Answers trainings; `serve_forever` runs it, `shutdown` ends it.

    Args:
        host: address to listen at.
        port: 0 takes a free one.
        token: what a question has to show; None asks for none.
        certificate: paths of a certificate chain and of its key; None speaks without TLS.
        jobs: the trainings.
        found: what they found.

    Raises:
        ConfigError: for an address of other machines without a token, or a certificate that cannot be used.
        OSError: for a port that is taken.
    """

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        certificate: tuple[Path, Path] | None = None,
        jobs: Jobs | None = None,
        found: Found | None = None,
    ) -> None:
        self.is_local = _is_loopback(host)
        if not self.is_local and not token:
            raise ConfigError([f"--host {host}: other machines reach it; give a token with --token-file"])
        self.token, self.jobs, self.found = token, jobs or Jobs(), found if found is not None else Found()
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        context = None if certificate is None else _context(*certificate)
        super().__init__((host, port), _Handler)
        if context is not None:
            # Shaking hands is for the connection's own thread, or one silent client would stop all others.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.scheme = "http" if context is None else "https"

    @property
    def address(self) -> str:
        """What a training gives as its policy."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, if there is one left."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the thread back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: what another side breaks off, or sends instead of TLS, is no fault of the service."""


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "intune", ""
    timeout = LONGEST_S

    def do_GET(self) -> None:
        if not self._is_welcome():
            return
        if self.path == "/v1/health":
            self._send(HTTPStatus.OK, {"format": FORMAT, "jobs": len(self.server.jobs.rows())})
        else:
            text = page(self.server.jobs.rows(), len(self.server.found)).encode()
            self._reply(HTTPStatus.OK, "text/html; charset=utf-8", text)

    def do_POST(self) -> None:
        if not self._is_welcome():
            return
        # A page of another site may send a form to this machine, but not of this type.
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected application/json")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        elif len(length) > 9 or int(length) > LARGEST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {LARGEST_BYTES} bytes")
        else:
            body = self.rfile.read(int(length))
            if len(body) == int(length):
                self._answer(body)
            else:
                self.close_connection = True

    def _answer(self, body: bytes) -> None:
        routes: dict[str, Callable[[Any], Any]] = {
            "/v1/decide": lambda state: answer(self.server.jobs.decide(parse(state))),
            "/v1/like": lambda state: {"format": FORMAT, "entry": self.server.found.like(state)},
            "/v1/found": self._keep,
        }
        try:
            self._send(HTTPStatus.OK, routes[self.path](decode(body)))
        except Gone:
            self._refuse(HTTPStatus.CONFLICT, "this training is not known: send the state of its policy")
        except Busy as error:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, str(error))
        except Malformed as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, str(error))
        except Exception as error:  # of ours: whoever asked goes on by itself
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, first_line(error))

    def _keep(self, state: Any) -> dict[str, Any]:
        self.server.found.keep(state)
        return {"format": FORMAT}

    def _is_welcome(self) -> bool:
        """Check path, host and token; answer who is not welcome."""
        if self.path not in PATHS[self.command]:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such path")
        elif self.server.token is not None and not self._shows_token(self.server.token):
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        # By a name of its own that leads here, a page of another site could read what only this machine may.
        elif self.server.token is None and not _is_loopback(_name_of(self.headers.get("Host", ""))):
            self._refuse(HTTPStatus.FORBIDDEN, "expected a name of this machine")
        else:
            return True
        return False

    def _shows_token(self, token: str) -> bool:
        kind, _, shown = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "basic":  # a browser asks for it as a password
            try:
                shown = base64.b64decode(shown, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        return kind.lower() in ("basic", "bearer") and hmac.compare_digest(shown.encode(), token.encode())

    def _send(self, status: HTTPStatus, value: Any) -> None:
        self._reply(status, "application/json", encode(value))

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # what else was sent is not read
        self._send(status, {"format": FORMAT, "error": why})

    def _reply(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="intune"')
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a line for each decision of each training would be too much."""


def serve(
    host: str, port: int, token: str | None, certificate: tuple[Path, Path] | None, policy: str, folder: Path | None
) -> int:
    """Answer until interrupted, and return the exit code.

    Raises:
        ConfigError: for what cannot be served so, all problems at once where they can be seen at once.
    """
    try:
        service = Service(host, port, token=token, certificate=certificate, jobs=Jobs(policy), found=Found(folder))
    except (OSError, OverflowError) as error:
        raise ConfigError([f"--host {host} --port {port}: {error}"]) from None
    with service:
        print(f"policy={service.address!r}  jobs: {service.address}/  (Ctrl-C ends it)", flush=True)
        service.serve_forever()
    return 0


def token_in(file: Path | None, problems: list[str]) -> str | None:
    """Return the token of a file, or else of the environment; None without one. Why it is none goes to `problems`."""
    where = TOKEN if file is None else f"--token-file {file}"
    try:
        token = os.environ.get(TOKEN, "") if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        problems.append(f"{where}: {error}")
        return None
    if file is None and not token:
        return None
    if not token.isascii() or not token.isprintable() or len(token) < SHORTEST_TOKEN or " " in token:
        problems.append(f"{where}: expected at least {SHORTEST_TOKEN} letters, digits and signs in a row")
    return token


def _context(chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(chain, key)
    except OSError as error:  # an SSLError is one
        raise ConfigError([f"--cert {chain} --key {key}: {error}"]) from None
    return context


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
