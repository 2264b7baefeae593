"""Addresses of callers, as rate limits count them, and networks of proxies."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import TypeAlias

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(text: str) -> tuple[Network, ...]:
    """The networks of a text, such as `10.0.0.1, 10.1.0.0/16`. Raises ValueError naming the invalid part."""
    return tuple(ipaddress.ip_network(part) for part in filter(None, map(str.strip, text.split(","))))


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
