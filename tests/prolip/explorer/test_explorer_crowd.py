"""Many clients at once, slow ones, unread bodies, and large images: the explorer keeps answering."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image
from squares import picture

from prolip.explorer import server as served
from prolip.explorer import thumbnails
from prolip.explorer.server import make_server

BYTES, JSON = {"Content-Type": "application/octet-stream"}, {"Content-Type": "application/json"}
HOST = "Host: localhost\r\n"
ASKED = f"GET /api/about HTTP/1.1\r\n{HOST}\r\n"
LAST = f"GET /api/about HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n"


@pytest.fixture
def few(app, monkeypatch):
    """The explorer with few places, whose slow visitors soon give way."""
    monkeypatch.setattr(served, "CONNECTIONS", (8, 0.1))
    monkeypatch.setattr(served, "SENDERS", (2, 0.1))
    monkeypatch.setattr(served, "SMALL", 2**10)
    made = make_server(app, "127.0.0.1", 0)
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def post(server, path: str, body: bytes, headers: dict) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(*server.server_address, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def raw(server, data: str) -> list[tuple[int, bytes]]:
    """Send these bytes, and return (status, rest) of each answer."""
    with socket.create_connection(server.server_address, timeout=60) as connection:
        connection.sendall(data.encode())
        found = b""
        while part := connection.recv(2**16):
            found += part
    answers = re.split(rb"HTTP/1\.1 (\d+) ", found)[1:]
    return [(int(status), rest) for status, rest in zip(answers[::2], answers[1::2])]


@pytest.mark.parametrize(
    "head, status",
    [
        ("GET /api/about HTTP/1.1\r\n{host}Content-Length: {size}", 200),
        ("GET /api/about HTTP/1.1\r\n{host}Transfer-Encoding: chunked", 200),
        ("GET /api/about HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {size}", 421),
        ("GET /api/about HTTP/1.1\r\n{host}Content-Length : {size}", 400),
        ("GET /api/about HTTP/1.1\r\nno header\r\n{host}Content-Length: {size}", 400),
        ("POST /nowhere HTTP/1.1\r\n{host}Content-Length: {size}", 404),
        ("POST /api/search HTTP/1.1\r\n{host}Origin: http://evil.example\r\nContent-Length: {size}", 403),
        ("POST /api/search HTTP/1.1\r\n{host}Content-Type: text/plain\r\nContent-Length: {size}", 415),
        ("POST /api/search HTTP/1.1\r\n{host}Content-Length: 99999", 413),
        (
            "POST /api/search HTTP/1.1\r\n{host}Content-Type: application/json\r\nContent-Length: 0\r\n"
            "Content-Length: 2",
            411,
        ),
    ],
)
def test_a_body_that_is_not_read_is_no_request(server, head, status):
    for body in (ASKED, ASKED + "x" * 60_000):  # the rest is read away, or the answer would be lost
        found = raw(server, head.format(host=HOST, size=len(body)) + "\r\n\r\n" + body)
        assert [code for code, _ in found] == [status]
        assert b"Connection: close" in found[0][1] and found[0][1].endswith(b"}")


def test_all_who_come_at_once_are_answered(server, count=60):
    begin = threading.Barrier(count)

    def one(_: int) -> int:
        begin.wait()
        return post(server, "/api/search", b'{"row": 1, "count": 2}', JSON)[0]

    with ThreadPoolExecutor(count) as pool:
        assert Counter(pool.map(one, range(count))) == {200: count}


@pytest.mark.parametrize("sent", ["GET / HT", ASKED])
def test_those_who_keep_it_waiting_give_way(few, sent):
    slow = [socket.create_connection(few.server_address) for _ in range(30)]
    for connection in slow:
        connection.sendall(sent.encode())
    assert [status for status, _ in raw(few, LAST)] == [200]
    assert len(few.connections.since) <= 8
    for connection in slow:
        connection.close()


def test_a_request_that_drips_is_ended(few, monkeypatch):
    monkeypatch.setattr(served, "LONGEST", 0.3)
    with socket.create_connection(few.server_address, timeout=60) as connection, pytest.raises(OSError):
        for _ in range(600):
            connection.sendall(b"G")
            time.sleep(0.02)
    assert raw(few, LAST)[0][0] == 200


def test_whoever_is_answered_keeps_the_place():
    places, ends = served.Places(2, 0.0), [socket.socketpair() for _ in range(3)]
    first, second, third = (pair[0] for pair in ends)
    places.enter(first, "connections")
    places.enter(second, "connections")
    places.mark(first, waits=False)
    places.mark(second, waits=True)
    threading.Timer(0.1, places.leave, [second]).start()
    places.enter(third, "connections")
    ends[1][1].settimeout(9)
    assert set(places.since) == {first, third} and ends[1][1].recv(1) == b""
    for pair in ends:
        for end in pair:
            end.close()


def test_who_would_wait_too_long_is_told_so(server, monkeypatch):
    monkeypatch.setattr(thumbnails, "PATIENCE", 0.1)
    with server.app._model:
        status, answer = post(server, "/api/search", b'{"row": 1}', JSON)
        assert status == 503
        assert answer["error"] == "this machine is busy with queries of others. Try again in a moment"
    over = threading.Event()
    thumbnails.DECODER.submit(over.wait, 60)
    status, answer = post(server, "/api/upload", picture("red"), BYTES)
    over.set()
    assert status == 503 and "busy with images of others" in answer["error"]


def file_of(width: int, height: int) -> bytes:
    """A small file of many pixels."""
    data = io.BytesIO()
    Image.new("1", (width, height)).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(
    "width, height, words",
    [
        (8193, 8193, "8193 x 8193 pixels, the limit is 67108864"),
        (60_000, 3, "60000 x 3 pixels; the limit is 100 times as long as wide"),
        (3, 60_000, "3 x 60000 pixels; the limit is 100 times as long as wide"),
    ],
)
def test_pictures_that_would_take_much_memory_are_refused(server, width, height, words):
    status, answer = post(server, "/api/upload", file_of(width, height), BYTES)
    assert status == 415 and words in answer["error"]
