"""Addresses in data: no request goes to a host that is not public, by any way to reach it."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import pytest
import torch
from faulty_servers import FaultyServer
from PIL import Image
from tiny_tars import saved

import prolip
from prolip.cli.command import parser_of
from prolip.cli.curate import reader
from prolip.cli.main import find
from prolip.data.reading import remote as hosts
from prolip.gaussian import Gaussian
from prolip.search.query import embed, read_queries

PICTURE = saved(Image.new("RGB", (3, 2), "red"), "PNG")


@pytest.fixture
def server():
    with FaultyServer({"a.png": PICTURE}) as found:
        yield found


def test_public_addresses_are_those_of_the_internet_alone():
    for address in ("93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"):
        assert hosts.is_public(address), address
    private = "127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 239.1.1.1 "
    private += "240.0.0.1 255.255.255.255 ::1 :: fe80::1%eth0 fc00::1 fec0::1 ff02::1 ::ffff:127.0.0.1 ::ffff:a00:1 "
    private += "64:ff9b::7f00:1 2002:7f00:1::"
    assert not any(map(hosts.is_public, private.split()))


def test_a_host_that_is_not_public_is_asked_for_nothing_by_itself_or_a_proxy(server, monkeypatch):
    port = server.server_address[1]
    for host in ("127.0.0.1", "localhost", "2130706433", "127.1", "[::ffff:127.0.0.1]"):
        for scheme in ("http", "https"):
            with pytest.raises(OSError, match=f"{scheme}://.* is at .*127.* not public.*--allow-private-hosts"):
                prolip.open_image(f"{scheme}://{host}:{port}/ok/a.png", public_only=True)
    monkeypatch.setenv("http_proxy", server.url("ok", "a.png"))
    with pytest.raises(OSError, match="--allow-private-hosts"):
        prolip.open_image("http://127.0.0.2/a.png", public_only=True)
    assert not server.seen


def test_every_redirect_is_looked_at(server, monkeypatch):
    monkeypatch.setattr(hosts, "is_public", lambda address: address != "127.0.0.2")
    server.target = f"http://127.0.0.2:{server.server_address[1]}/ok/a.png"
    with pytest.raises(OSError, match="127.0.0.2 is at 127.0.0.2, which is not public"):
        prolip.open_image(server.url("moved", "a.png"), public_only=True)
    assert list(server.seen) == ["/moved/a.png"]
    for target in ("file:///etc/passwd", "pipe:touch x", "ftp://host/a.png"):
        server.target = target
        for public_only in (True, False):
            with pytest.raises(OSError, match="moved.*No connection adapters were found"):
                prolip.open_image(server.url("moved", "a.png"), public_only=public_only)
    server.target = server.url("ok", "a.png")
    assert prolip.open_image(server.url("moved", "a.png"), public_only=True).size == (3, 2)
    assert prolip.open_image(server.url("ok", "a.png")).size == (3, 2)


def test_a_name_that_resolves_to_another_address_the_second_time_is_sent_nothing(server, monkeypatch):
    port, real = server.server_address[1], socket.getaddrinfo
    answers = iter(["93.184.216.34", "127.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real(next(answers), *rest, **more))
    with pytest.raises(OSError, match="rebinding.test is at 127.0.0.1, which is not public"):
        prolip.open_image(f"http://rebinding.test:{port}/ok/a.png", public_only=True)
    assert not server.seen and next(answers, None) is None


def test_questions_of_a_file_name_public_hosts_unless_others_are_allowed(server, tmp_path):
    file = tmp_path / "questions.jsonl"
    line = json.dumps({"text": "a\u2028cat", "image": server.url("ok", "a.png"), "keys": ["a"]}, ensure_ascii=False)
    file.write_text(f"{line}\n", encoding="utf-8-sig")
    opened = []

    def embed_all(images, side, batch):
        opened.extend(image.size for image in images)
        return SimpleNamespace(z=Gaussian(torch.zeros(len(opened), 4), torch.zeros(len(opened), 4)), novelty={})

    embedder = SimpleNamespace(embed=embed_all)
    with pytest.raises(OSError, match="--allow-private-hosts"):
        embed([question._replace(text=None) for question in read_queries(str(file))[0]], embedder)
    assert not server.seen and not opened
    allowed = read_queries(str(file), allow_private_hosts=True)[0]
    embed([question._replace(text=None) for question in allowed], embedder)
    assert opened == [(3, 2)]


def test_shards_that_tables_of_scores_name_are_public_unless_others_are_allowed(tmp_path):
    for words in (["write", str(tmp_path), "--output", "x"], ["report", str(tmp_path)]):
        command, rest = find(["curate", *words])
        parse = parser_of(command).parse_strictly
        assert reader(parse(rest)).policy.public_only
        assert not reader(parse([*rest, "--allow-private-hosts"])).policy.public_only
