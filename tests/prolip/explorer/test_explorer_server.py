"""The explorer's server: what it answers, and what it refuses, in words."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest
from PIL import Image
from squares import picture

from prolip.cli.main import main
from prolip.explorer.server import is_loopback, make_server

BYTES, JSON = {"Content-Type": "application/octet-stream"}, {"Content-Type": "application/json"}


@pytest.fixture
def ask(server):
    """(method, path, body, headers) -> (status, headers, body)."""

    def run(method: str, path: str, body: bytes | str | None = None, headers: dict | None = None):
        connection = http.client.HTTPConnection(*server.server_address, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    return run


@pytest.fixture
def question(ask):
    """(name, values) -> (status, values)."""

    def run(name: str, values, headers: dict | None = None):
        status, _, body = ask("POST", f"/api/{name}", json.dumps(values), JSON | (headers or {}))
        return status, json.loads(body)

    return run


def test_the_page_runs_its_own_script_alone(ask, app, monkeypatch):
    monkeypatch.setattr(app, "title", "<b>mine")
    status, headers, body = ask("GET", "/")
    page, policy = body.decode(), headers["Content-Security-Policy"]
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', page))
    assert status == 200 and f"script-src 'nonce-{nonce}';" in policy and policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert not re.search(r"\son\w+\s*=", page) and not re.search(r"\sstyle\s*=", page)
    assert nonce not in ask("GET", "/")[2].decode()  # each page has another
    assert "<title>&lt;b&gt;mine" in page and "<b>mine" not in page


NOWHERE = """/static/../server.py /static/%2e%2e%2fserver.py /static/..%2f..%2f..%2fetc/passwd /../../etc/passwd
/thumbnail/item/..%2f..%2fetc%2fpasswd /thumbnail/item/-1 /thumbnail/..%2fitem/1 /static/explorer.js/x /nowhere
/api/nowhere /thumbnail/item/12 /thumbnail/sample/1 /thumbnail/item/99999999999999999"""


def test_what_is_not_there_is_not_found(ask):
    for path in NOWHERE.split():
        status, headers, body = ask("GET", path)
        assert status == 404 and headers["Content-Type"].startswith("application/json"), path
        assert json.loads(body)["error"]


def test_thumbnails_are_small_pictures_of_the_shard(ask):
    for row, colour in ((0, (255, 0, 0)), (11, (0, 255, 255))):
        status, headers, body = ask("GET", f"/thumbnail/item/{row}")
        image = Image.open(io.BytesIO(body)).convert("RGB")
        assert status == 200 and headers["Content-Type"] == "image/webp" and max(image.size) <= 224
        assert all(abs(a - b) < 12 for a, b in zip(image.getpixel((16, 16)), colour))


def test_only_this_machines_names_are_answered(ask):
    own = ["127.0.0.1:1234", "localhost", "[::1]:80", "LOCALHOST.:8"]
    foreign = ["evil.example", "evil.example:8571", "127.0.0.1.evil.example", "192.168.0.7", "", "["]
    for host in own + foreign:
        for path in ("/api/about", "/"):
            assert ask("GET", path, None, {"Host": host})[0] == (200 if host in own else 421), host


def test_pages_of_others_may_not_ask(question, server):
    own = f"127.0.0.1:{server.server_address[1]}"
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://{own}.evil.example"):
        status, answer = question("search", {"row": 1}, {"Origin": origin})
        assert status == 403 and "are not allowed" in answer["error"]
    assert question("search", {"row": 1}, {"Origin": f"http://{own}"})[0] == 200


def test_a_form_of_another_page_cannot_send_what_is_taken(ask):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for path in ("/api/search", "/api/upload"):
            assert ask("POST", path, b'{"row": 1}', {"Content-Type": kind})[0] == 415


def test_an_open_server_says_so_and_takes_addresses_but_no_foreign_names(app, capsys, monkeypatch):
    def served(server):
        server.server_close()
        raise ValueError("served")

    monkeypatch.setattr("prolip.explorer.server.serve", served)
    assert main(["explore", str(app.explored.index.store.folder), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert re.search(
        "opens this page to every machine .*without password.*error: served", capsys.readouterr().err, re.S
    )
    with make_server(app, "0.0.0.0", 0) as made:
        assert made.url.startswith("http://127.0.0.1:") and not made.is_private
        assert made.knows("192.168.0.7") and made.knows("fe80::1") and not made.knows("evil.example")
    assert is_loopback("127.0.0.5") and is_loopback("::1") and not is_loopback("10.0.0.1") and not is_loopback("x.org")


@pytest.mark.parametrize(
    "body, words",
    [
        (b"{", "not JSON"),
        (b"[1]", "a JSON object"),
        (b"[" * 60000, "not JSON"),
        (b"{}", "no query"),
        (b'{"text": 3}', "a string"),
        (json.dumps({"text": "x" * 2001}).encode(), "2,000 characters"),
        (b'{"row": 1, "count": "all"}', "a whole number"),
    ],
)
def test_bad_questions_are_told_what_is_wrong(ask, body, words):
    status, _, answer = ask("POST", "/api/search", body, JSON)
    assert status == 400 and words in json.loads(answer)["error"]


@pytest.mark.parametrize("row", [12, -1, "1", True])
def test_items_that_are_not_there_are_not_found(question, row):
    for name in ("search", "compare", "walk"):
        status, answer = question(name, {"row": row})
        assert status == 404 and "expected a number from 0 to below 12" in answer["error"]


def test_a_text_finds_items_with_probabilities_and_a_verdict(question):
    status, found = question("search", {"text": "a red square", "count": 5})
    assert status == 200 and len(found["answers"]) == 5 and found["question"]["label"] == "a red square"
    assert all(0 < item["probability"] < 1 for item in found["answers"])
    assert found["verdict"]["among"] == "items" and 0 < found["verdict"]["probability"] <= 1
    assert len(found["place"]) == 5 and found["said"] == [] and found["risk"] is None
    assert "path" not in found["answers"][0] and "shard" not in found["answers"][0]


def test_a_picture_is_asked_by_alone_and_with_a_text(ask, question):
    status, _, body = ask("POST", "/api/upload", picture("red"), BYTES)
    kept = json.loads(body)
    assert status == 200 and (kept["width"], kept["height"]) == (32, 32)
    status, found = question("search", {"upload": kept["upload"]})
    assert status == 200 and found["answers"][0]["captions"][1] == "a red square"
    assert found["answers"][0]["probability"] is None and len(found["said"]) == 5
    assert found["verdict"]["among"] == "captions"
    both = question("search", {"upload": kept["upload"], "text": "blue"})[1]
    assert both["question"]["sides"] == ["image", "text"] and both["verdict"]["probability"] is None
    assert question("search", {"upload": "0123456789abcdef"})[0] == 404  # kept no more


@pytest.mark.parametrize(
    "data, words", [(b"<svg onload=alert(1)>", "cannot identify"), (picture("red")[:60], "bad image")]
)
def test_what_is_no_picture_is_refused(ask, data, words):
    status, _, body = ask("POST", "/api/upload", data, BYTES)
    assert status == 415 and words in json.loads(body)["error"]


def test_a_huge_picture_is_refused_while_it_comes(ask):
    status, headers, body = ask("POST", "/api/upload", b"\0" * (2**24 + 1), BYTES)
    assert status == 413 and "the limit is 16,777,216" in json.loads(body)["error"]
    assert headers["Connection"] == "close"


def test_the_command_serves_until_it_is_ended_and_leaves_nothing(small_model, shard, tmp_path):
    words = [sys.executable, "-m", "prolip", "explore", small_model, "--data", shard, "--port", "0"]
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        said = process.stdout.readline()
        (url,) = re.findall(r"^12 items at (http://127\.0\.0\.1:\d+/)  \(stop with Ctrl-C\)$", said.rstrip())
        with urllib.request.urlopen(f"{url}api/about") as answer:
            assert json.load(answer)["items"] == 12
        assert [path.name for path in tmp_path.glob("prolip-explore-*/*")] == ["index"]
        process.terminate()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and errors.splitlines()[-2:] == ["12 added, 0 replaced, 0 removed", "stopped"]
    assert not list(tmp_path.glob("prolip-explore-*"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["MODEL"], "the data to explore is missing. Give --data"),
        (["runs/nowhere", "--data", "x.tar"], "no folder runs/nowhere"),
        (["EMPTY"], "not an index, saved features, a run or a model"),
        (["INDEX", "--data", "x.tar"], "is already an index"),
        (["INDEX", "--risk", "0.1"], "--risk and --calibrate need each other"),
        (["INDEX", "--port", "70000"], "--port 70000: give 0 to 65535"),
        (["INDEX", "--host", "256.1.1.1"], "cannot serve at"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_line(words, said, small_model, app, tmp_path, capsys):
    places = {"MODEL": small_model, "EMPTY": str(tmp_path), "INDEX": str(app.explored.index.store.folder)}
    assert main(["explore", *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
