"""Ranks as threads of a test."""

import threading


def on_ranks(group, f):
    """[f(rank, comm)] of all ranks, each in a thread; raises what the first of them raised."""
    results, errors = [None] * len(group), [None] * len(group)

    def run(rank):
        try:
            results[rank] = f(rank, group[rank])
        except BaseException as e:  # noqa: BLE001 - it is raised below
            errors[rank] = e
            group[rank].abort(rank)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(group))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in errors:
        if e is not None:
            raise e
    return results
