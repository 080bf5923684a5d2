"""The store of skim.ElasticGroup, in a process of its own: python -m skim.store PORT

PORT: the TCP port; 0: any that is free. The first line of output says which it is. Ends with SIGINT or SIGTERM.

Keep it on a machine that lives as long as the run. It holds the list of ranks, not what they train. Anyone who reaches
the port can change that list, so keep it inside a trusted network, as any store of torch.distributed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal

import torch.distributed as dist

from skim.elastic import MOST_PORT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m skim.store", description="The store of skim.ElasticGroup.")
    parser.add_argument("port", help="TCP port; 0: any that is free")
    text = parser.parse_args().port
    if not re.fullmatch("[0-9]{1,5}", text) or (port := int(text)) > MOST_PORT:
        parser.exit(2, f"skim.store: port: must be a whole number in [0, {MOST_PORT}], not '{text}'\n")
    # TCPStore looks up the name of every new peer, and serves nobody meanwhile. Without an answer that takes 10 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the store's threads begin, which inherit it
    try:
        store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as e:
        parser.exit(1, f"skim.store: port {port} cannot be used: {str(e).splitlines()[0]}\n")
    print(f"skim.store: listens on port {store.port}; Ctrl-C ends it", flush=True)
    signal.sigwait(signals)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
