"""Addresses of callers, as rate limits count them, networks of proxies, and what lies behind none."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import TypeAlias
from urllib.parse import urlsplit

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(text: str) -> tuple[Network, ...]:
    """The networks of a text, such as `10.0.0.1, 10.1.0.0/16`. Raises ValueError naming the invalid part."""
    return tuple(ipaddress.ip_network(part) for part in filter(None, map(str.strip, text.split(","))))


def is_this_machine(host: str) -> bool:
    """Whether a host, by name or address, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def past_proxies(url: str) -> dict[str, None]:
    """The `mounts` of an httpx2 client for `url`: no proxy that the environment names leads to this machine."""
    place = urlsplit(url).netloc.rpartition("@")[2]
    return {f"all://{place}": None} if is_this_machine(urlsplit(url).hostname or "") else {}


@lru_cache(maxsize=1 << 14)
def caller_of(address: str) -> str | None:
    """The caller for an address: itself, or the /64 network of an IPv6 subscriber. None for loopback: no limit.

    Loopback is this machine: a fleet of emulated devices, or a proxy in front of all devices.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return None if ip.is_loopback else ip.exploded[:19]
        ip = ip.ipv4_mapped
    return None if ip.is_loopback else str(ip)
