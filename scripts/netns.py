"""Network namespaces with one bridge between them, for checks that cut wires. Needs root and iproute2.

Each place has a namespace and an address of its own. The bridge has a namespace as well, where no packet filter of this
machine reaches; this process has one more wire to it and reaches all places. All names carry the id of this process, so that
runs do not disturb each other, and everything is gone after `remove`.

A place that is `cut` has no carrier, as without its cable. Packets from one place to another that are dropped vanish on the
way, and nobody is told.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess

from mesh_nodes import Failure

# Set aside for tests between devices (RFC 2544): no network of this machine, or behind it, has these addresses.
RANGE = ipaddress.ip_network("198.18.0.0/15")
# This process's own address in the network; places have those from 1 on.
OWN = 254
# Nobody has this hardware address: what is sent to it gets lost.
NOWHERE = "02:00:00:00:00:01"


class NoNetwork(Failure):
    """Why there are no namespaces, or not the right ones."""


class Place:
    """Where a node can be put."""

    def __init__(self, namespace, address, port):
        self.namespace, self.address, self.port = namespace, address, port
        # Words before a command that is to run there. They are replaced by it, so its process id is that of the command.
        self.inside = ["ip", "netns", "exec", namespace]


def ip(*words):
    """Runs `ip`; what it prints."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNetwork(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def uninterrupted():
    """Ctrl-C does nothing meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_subnet():
    """A subnet that has no route yet; those of two runs at once differ as their process ids do."""
    taken = [ipaddress.ip_network(line.split()[0], strict=False)
             for line in ip("-4", "route", "show").splitlines() if line[:1].isdigit()]
    subnets = list(RANGE.subnets(new_prefix=24))
    first = os.getpid() % len(subnets)
    for subnet in subnets[first:] + subnets[:first]:
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise NoNetwork(f"all of {RANGE} is taken")


class Network:
    """One bridge and the places around it."""

    def __init__(self):
        """Makes the bridge, or leaves nothing and raises `NoNetwork`."""
        if os.geteuid() != 0:
            raise NoNetwork("network namespaces need root")
        if shutil.which("ip") is None:
            raise NoNetwork("network namespaces need `ip`, of the package iproute2")
        self.name = f"shoal-{os.getpid()}"
        self.hub = f"{self.name}-hub"
        # Names of interfaces have 15 characters at most.
        self.uplink = f"shoal{os.getpid()}"
        self.made = 0
        self.places = []
        self.subnet = free_subnet()
        try:
            self._make_hub()
        except BaseException:
            self.remove()
            raise

    def _make_hub(self):
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.hub, "link", "set", "bridge", "up")
        ip("link", "add", self.uplink, "type", "veth", "peer", "name", "clients", "netns", self.hub)
        ip("-n", self.hub, "link", "set", "clients", "master", "bridge", "up")
        ip("addr", "add", f"{self.subnet[OWN]}/24", "dev", self.uplink)
        ip("link", "set", self.uplink, "up")

    def add(self):
        """A further place."""
        self.made += 1
        place = Place(f"{self.name}-{self.made}", str(self.subnet[self.made]), f"port{self.made}")
        self.places.append(place)
        ip("netns", "add", place.namespace)
        ip("-n", self.hub, "link", "add", place.port, "type", "veth", "peer", "name", "wire", "netns", place.namespace)
        ip("-n", self.hub, "link", "set", place.port, "master", "bridge", "up")
        ip("-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", "wire")
        ip("-n", place.namespace, "link", "set", "lo", "up")
        ip("-n", place.namespace, "link", "set", "wire", "up")
        return place

    def cut(self, place):
        """Pulls the cable."""
        ip("-n", self.hub, "link", "set", place.port, "down")

    def mend(self, place):
        ip("-n", self.hub, "link", "set", place.port, "up")

    def drop(self, sender, receiver):
        """From now on packets from one place to another are lost; those of the other direction are not."""
        ip("-n", sender.namespace, "neigh", "replace", receiver.address, "lladdr", NOWHERE, "dev", "wire", "nud", "permanent")

    def let_pass(self, sender, receiver):
        ip("-n", sender.namespace, "neigh", "del", receiver.address, "dev", "wire")

    def remove(self):
        """Takes everything away. Processes in it must have been stopped before."""
        with uninterrupted():
            for namespace in [place.namespace for place in self.places] + [self.hub]:
                subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", self.uplink], capture_output=True, check=False)
