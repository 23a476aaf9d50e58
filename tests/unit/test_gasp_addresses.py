"""The address of this host."""

from __future__ import annotations

import subprocess
import sys

from lastgasp.gasp.addresses import loopback
from support.hosts import needs_hosts

WITHOUT_IPV4 = """
import socket
from lastgasp.gasp.addresses import loopback
from lastgasp.gasp.serve import ControllerThread, new_token

with socket.socket() as probe:
    try:
        probe.bind(("127.0.0.1", 0))
    except OSError:
        pass
    else:
        raise SystemExit("there is IPv4")
controller = ControllerThread(new_token(), loopback())
host, _, port = controller.endpoint.address.rpartition(":")
socket.create_connection((host, int(port))).close()
controller.stop()
print(host)
"""


def test_it_is_ipv4s_where_there_is_one() -> None:
    assert loopback() == "127.0.0.1"


@needs_hosts
def test_a_host_that_has_ipv6_alone_reaches_itself_by_it() -> None:
    """As a pod of a cluster with IPv6 alone."""
    alone = 'ip link set lo up && ip address del 127.0.0.1/8 dev lo; exec "$@"'
    command = ["unshare", "--net", "sh", "-c", alone, "sh", sys.executable, "-c", WITHOUT_IPV4]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "::1\n", done.stdout + done.stderr
