"""Keeps Ray's replicas off the public addresses of their node.

Each replica of a deployment opens a port for requests of other deployments, on all addresses, and unpickles
what it receives. Ray connects to it at its node's address only, so it need not listen elsewhere.

Seam, read and run on Ray 2.60.0: ray.serve._private.replica.add_port_to_grpc_server, called after the
deployment's class was made; no setting names the address.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

import ray
from ray.serve._private import replica

logger = logging.getLogger("ray.serve")
EVERYWHERE = "[::]"
stock = replica.add_port_to_grpc_server


def listen_on_node_address_only() -> None:
    """In the process of a replica, from its deployment's `__init__`."""
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_global:
        logger.warning(
            "This node's address %s is public: put Ray and LMCache on loopback or a private network, since "
            "LMCache has no authentication",
            address,
        )

    def add_port(server: Any, place: str) -> int:
        return int(stock(server, place.replace(EVERYWHERE, f"[{address}]" if ":" in address else address)))

    replica.add_port_to_grpc_server = add_port
