"""GET for addresses that come from data: each host, that of every redirect too, must have public addresses alone."""
from __future__ import annotations

import ipaddress
import socket
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from prolip.data.faults import ShardFault

#: IPv6 addresses that stand for IPv4 ones behind a translator.
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, loopback, link-local, multicast or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in TRANSLATED:
            inner = ipaddress.IPv4Address(int(found) & 2**32 - 1)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved)


def check_public(address: str, host: str) -> None:
    """ShardFault where a host has an address that is not public."""
    if not is_public(address):
        raise ShardFault("unreadable shard", f"{host} is at {address}, which is not public, and the address comes from"
                         " data: give --allow-private-hosts if you trust it")  # fmt: skip


class _Guarded:
    """A connection that looks at a host's addresses before it connects, and then at the one that it has connected to,
    so that a name that resolves differently the second time gets nothing."""

    def _new_conn(self: Any) -> socket.socket:
        for *_, (address, *_) in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            check_public(str(address), self.host)
        connection = super()._new_conn()  # type: ignore[misc]
        try:
            check_public(connection.getpeername()[0], self.host)
        except BaseException:
            connection.close()
            raise
        return connection


class _Http(_Guarded, HTTPConnection):
    pass


class _Https(_Guarded, HTTPSConnection):
    pass


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}


def get_public(url: str, **settings: Any) -> requests.Response:
    """`requests.get`; ShardFault for a host that is not public. It goes through no proxy, and knows no passwords."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy would look the name up itself; a .netrc is not for hosts that data names
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter())
        return session.get(url, **settings)
