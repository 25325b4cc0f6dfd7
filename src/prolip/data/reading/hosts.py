"""GET for addresses that come from data: each host, that of every redirect too, must have public addresses alone."""
from __future__ import annotations

import ipaddress
import socket
from typing import Any

import requests
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from prolip.data.faults import ShardFault

#: IPv6 addresses of the internet, and those that stand for IPv4 ones at a translator.
GLOBAL, TRANSLATED = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, loopback, link-local, multicast or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not (found.is_multicast or found.is_reserved)
    inner = ipaddress.IPv4Address(int(found) % 2**32) if found in TRANSLATED else found.ipv4_mapped or found.sixtofour
    return is_public(str(inner)) if inner else found.is_global and found in GLOBAL


def check_public(address: str, host: str) -> None:
    """ShardFault where a host has an address that is not public."""
    if not is_public(address):
        raise ShardFault("unreadable shard", f"{host} is at {address}, which is not public, and the address comes from"
                         " data: give --allow-private-hosts if you trust it")  # fmt: skip


class Guarded:
    """A connection that checks a host's addresses before it connects, and the one that it has connected to: a name that
    resolves differently the second time gets nothing."""

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


POOLS = {
    pool.scheme: type(pool.__name__, (pool,), {"ConnectionCls": type("Connection", (Guarded, pool.ConnectionCls), {})})
    for pool in (HTTPConnectionPool, HTTPSConnectionPool)
}


def get_public(url: str, **settings: Any) -> requests.Response:
    """`requests.get`; ShardFault for a host that is not public. It goes through no proxy, and knows no passwords."""
    adapter: Any
    with requests.Session() as session:
        session.trust_env = False  # a proxy would look the name up itself; a .netrc is not for hosts that data names
        for adapter in session.adapters.values():
            adapter.poolmanager.pool_classes_by_scheme = POOLS
        return session.get(url, **settings)
