"""Looks at the processes of a run that `skim train --ranks P` has launched. For scripts and tests."""

import contextlib
import ipaddress
import os
import pathlib
import re


def pids_of(folder):
    """{rank: pid} of the ranks whose launcher has `folder` as its folder for temporary files."""
    found = {}
    for file in pathlib.Path(folder).glob("skim-*/rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):  # it is being written, or is gone
            found[int(re.search(r"rank-(\d+)", file.name)[1])] = int(file.read_text())
    return found


def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def is_running(pid):
    """Not so: gone, or dead and waiting for a parent that may never ask."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def listening(pid):
    """The sockets on which a process listens, as "address:port" in hexadecimal."""
    own = {os.readlink(link) for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1])
    return found


def decoded(address):
    """(IP address, port), as socket.create_connection takes them. Linux reaches 0.0.0.0 and :: on this machine."""
    host, port = address.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
