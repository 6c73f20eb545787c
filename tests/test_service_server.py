"""What reaches an agent service, and what it makes of it: nothing but an answer or a clear refusal."""

from __future__ import annotations

import base64
import copy
import http.client
import json
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes import FakeLoop
from hypothesis import given, settings
from hypothesis import strategies as some
from policy_runs import five_stages
from service_runs import jobs, remote, serving

from intune_callbacks.decide.policies import make_policy
from intune_callbacks.errors import ConfigError
from intune_callbacks.service.jobs import BURST, Busy, Gone, Jobs, Malformed
from intune_callbacks.service.server import Service
from intune_callbacks.service.wire import LARGEST_BYTES, Event, Question, encode, parse

pytestmark = pytest.mark.usefixtures("patient")

TOKEN = "a token of many letters"


@pytest.fixture(scope="module")
def question() -> dict[str, Any]:
    state = json.dumps(make_policy("dqn").state_dict())
    return json.loads(encode(Question("run", "here", 0.9, 0, (Event(FakeLoop(five_stages(8.0)).observe()),), state)))


def ask(
    service: Service, path: str, body: bytes = b"", method: str = "POST", **headers: str
) -> tuple[int, str, dict[str, str]]:
    at = urlsplit(service.address)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=20)
    try:
        given = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        connection.request(method, path, body, given)
        with connection.getresponse() as response:
            return response.status, response.read().decode(), dict(response.headers)
    finally:
        connection.close()


def test_who_is_not_welcome_is_told_why(question: dict[str, Any]) -> None:
    body = encode(question)
    with serving() as service:
        assert ask(service, "/v1/decide", body)[0] == 200
        assert ask(service, "/v1/else", body)[0] == 404
        assert ask(service, "/v1/decide", method="GET")[0] == 404
        assert ask(service, "/v1/decide", method="PUT")[0] == 501
        assert ask(service, "/v1/decide", body, Content_Type="text/plain")[0] == 415
        assert ask(service, "/v1/decide", body, Host="elsewhere.example")[0] == 403
        assert ask(service, "/", method="GET", Host="elsewhere.example:80")[0] == 403
        assert ask(service, "/v1/decide", body, Content_Length=str(LARGEST_BYTES + 1))[0] == 413
        assert ask(service, "/v1/decide", body, Content_Length="9" * 50)[0] == 413
        assert ask(service, "/v1/decide", body, Content_Length="-1")[0] == 411
        assert ask(service, "/v1/decide", body, Transfer_Encoding="chunked", Content_Length="2")[0] == 411
        assert json.loads(ask(service, "/v1/health", method="GET")[1])["jobs"] == 1


def test_a_token_is_asked_for_where_there_is_one(
    question: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = encode(question)
    with serving(token=TOKEN) as service:
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": TOKEN}, {"Authorization": "Basic %%%"}):
            status, told, headers = ask(service, "/v1/decide", body, **wrong)
            assert (status, headers["WWW-Authenticate"][:5]) == (401, "Basic") and TOKEN not in told
        assert ask(service, "/v1/decide", body, Authorization=f"Bearer {TOKEN}")[0] == 200
        password = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        assert ask(service, "/", method="GET", Authorization=f"Basic {password}")[0] == 200
        seen = FakeLoop(five_stages(8.0)).observe()
        policy = remote(service.address)
        with pytest.warns(RuntimeWarning, match="status 401 the token is missing or wrong"):
            policy.decide(seen)
        monkeypatch.setenv("INTUNE_AGENT_TOKEN", TOKEN)
        policy.decide(seen)
        monkeypatch.delenv("INTUNE_AGENT_TOKEN")
        (tmp_path / "token").write_text(TOKEN + "\n")
        monkeypatch.setenv("INTUNE_AGENT_TOKEN_FILE", str(tmp_path / "token"))
        policy.decide(seen)
        assert policy.answered == 2
    with pytest.raises(ConfigError, match="give a token"):
        Service("0.0.0.0")


CHANGE = some.one_of(
    some.none(), some.booleans(), some.integers(-(10**30), 10**400), some.floats(), some.text(max_size=5), some.just([])
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, part in parts for place in places(part, (*path, name)))]


@settings(max_examples=150)
@given(data=some.data())
def test_what_is_malformed_is_refused_and_nothing_else_suffers(question: dict[str, Any], data: Any) -> None:
    changed = copy.deepcopy(question)
    changed["state"] = json.loads(changed["state"])
    for _ in range(data.draw(some.integers(1, 3))):
        place = data.draw(some.sampled_from(places(changed)[1:]))
        inner = changed
        for name in place[:-1]:
            inner = inner[name]
        if data.draw(some.booleans()) and isinstance(inner, dict):
            del inner[place[-1]]
        else:
            inner[place[-1]] = data.draw(CHANGE)
    if "state" in changed and not isinstance(changed["state"], str):
        changed["state"] = json.dumps(changed["state"])
    known, before = Jobs("dqn"), {**question, "run": "another training"}
    expected = known.decide(parse(before))
    try:
        found = known.decide(parse(json.loads(json.dumps(changed))))
        assert isinstance(found.reason, str)
    except (Malformed, Busy, Gone):
        pass
    again = {**before, "first": 0, "state": None}
    assert known.decide(parse(again)) == expected


NO_QUESTIONS = some.sampled_from([b"[" * 100_000, b'{"a": NaN}', b"1e999", b"{}", b"[]"])


@settings(max_examples=40)
@given(body=some.one_of(some.binary(max_size=50), NO_QUESTIONS))
def test_bytes_that_are_no_question_are_refused(body: bytes) -> None:
    with serving() as service:
        for path in ("/v1/decide", "/v1/found", "/v1/like"):
            status, told, _ = ask(service, path, body)
            assert status == 400 or (path == "/v1/like" and status == 200), told
            assert json.loads(told)["format"] == 1


def test_more_than_is_sensible_is_refused(question: dict[str, Any]) -> None:
    known = Jobs("even", clock=lambda: 0.0)
    asked = parse(question | {"state": "{}"})
    for _ in range(int(BURST)):
        known.decide(asked)
    with pytest.raises(Busy, match="decisions a second"):
        known.decide(asked)


def test_the_page_shows_trainings_and_is_no_way_in(question: dict[str, Any]) -> None:
    with serving() as service:
        name = "<script>alert(1)</script>"
        assert ask(service, "/v1/decide", encode({**question, "job": name}))[0] == 200
        status, text, headers = ask(service, "/", method="GET")
    assert status == 200 and "&lt;script&gt;" in text and "<script>" not in text
    assert "decode 1" in text and headers["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_over_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)
    seen = FakeLoop(five_stages(8.0)).observe()
    with serving(certificate=(chain, key), token=TOKEN) as service:
        monkeypatch.setenv("INTUNE_AGENT_TOKEN", TOKEN)
        policy = remote(service.address)
        with pytest.warns(RuntimeWarning, match="SSLCertVerificationError"):
            policy.decide(seen)
        monkeypatch.setenv("SSL_CERT_FILE", str(chain))
        policy.decide(seen)
        assert policy.answered == 1
        with pytest.warns(RuntimeWarning, match="gave no answer"):
            remote(service.address.replace("https", "http")).decide(seen)
    with pytest.raises(ConfigError, match="--cert"):
        Service(certificate=(key, key))
    assert ssl.OPENSSL_VERSION


def test_the_command_serves_until_interrupted(tmp_path: Path) -> None:
    # Where the tests run in the background of a shell, an interrupt is ignored unless somebody asks for it.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = "from intune_callbacks.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", heard + run, "serve-agent", "--port", "0", "--dir", str(tmp_path / "kept")]
    service = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        address = service.stdout.readline().split("'")[1]
        policy = remote(address)
        policy.decide(FakeLoop(five_stages(8.0)).observe())
        assert policy.answered == 1
        service.send_signal(signal.SIGINT)
        assert service.wait(20) == 130
        assert service.communicate()[1] == "intune: interrupted\n"
    finally:
        service.kill()
        service.communicate()


def test_a_command_line_that_cannot_be_served_is_told_all_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from intune_callbacks import cli

    (tmp_path / "short").write_text("secret")
    words = ["--policy", "dq", "--port", "70000", "--cert", "x", "--token-file", str(tmp_path / "short")]
    assert cli.main(["serve-agent", *words]) == 2
    said = capsys.readouterr().err
    for part in ("did you mean 'dqn'", "--port=70000", "--cert and --key", "at least 16", "4 problems"):
        assert part in said, said
    monkeypatch.setenv("INTUNE_AGENT_TOKEN", "short")
    assert cli.main(["serve-agent"]) == 2
    assert "INTUNE_AGENT_TOKEN: expected at least 16" in capsys.readouterr().err
    monkeypatch.delenv("INTUNE_AGENT_TOKEN")
    with serving(jobs=jobs()) as service:
        port = urlsplit(service.address).port
        assert cli.main(["serve-agent", "--port", str(port)]) == 2
    assert "Address already in use" in capsys.readouterr().err
