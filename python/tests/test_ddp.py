"""skim.attach under torchrun: the cases of ddp_cases.py on 1 to 4 ranks, and what a lost rank does."""

import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock

from under_torchrun import AS_ON_A_DEVICE, OnRanks

HAS_TORCH = importlib.util.find_spec("torch") is not None


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Cases(OnRanks, unittest.TestCase):
    file = "ddp_cases.py"


class CasesOnADevice(Cases):
    environment = AS_ON_A_DEVICE


# The job of a compression that is gone begins when Python ends, and takes a while.
LEAVE = """
import atexit, gc, threading, torch, torch.distributed as dist, skim
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
aggregator, ends = skim.Aggregator([torch.zeros(10)]), threading.Event()
atexit.register(ends.set)  # the last one registered runs first

def job():
    ends.wait()
    print(sum(x * x for x in range(1_000_000)), "done", flush=True)

aggregator.submit(job)
del aggregator
gc.collect()
"""


class Stuck:
    """A thread that never ends. Its clock has only the time of the waits for it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def join(self, timeout):
        self.now += timeout


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class End(unittest.TestCase):
    def test_python_ends_after_one_wait_for_all_threads(self):
        import queue

        from skim import _compression

        stuck = Stuck()
        threads = {unittest.mock.Mock(join=stuck.join): queue.SimpleQueue() for _ in range(4)}
        with (
            unittest.mock.patch.object(_compression, "_threads", threads),
            unittest.mock.patch.object(_compression.time, "monotonic", stuck.monotonic),
        ):
            _compression._close_all()
        self.assertEqual(stuck.now, _compression.LAST_WAIT_S)
        self.assertEqual([jobs.get_nowait() for jobs in threads.values()], [None] * 4)

    def test_python_ends_after_the_jobs_of_a_compression_that_is_gone(self):
        done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stdout), (0, "333332833333500000 done\n"), done.stderr)


TRAIN = """
import sys, threading, torch, torch.distributed as dist, skim
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(nn.Linear(500, 500))
skim.attach(model, density=0.01, exchange=sys.argv[1], timeout=float(sys.argv[2]))
for step in range(100000):
    model(torch.full((1, 500), 1.0 + rank)).sum().backward()
    if step == 5:
        print(f"rank {rank} trains", flush=True)
    if step == 20 and sys.argv[3] == f"rank {rank} stalls":
        threading.Event().wait()  # for ever
"""


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Failures(unittest.TestCase):
    """Without torchrun, which ends all ranks itself once one is gone."""

    def start(self, ranks, *arguments):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        started = []
        for rank in range(ranks):
            p = subprocess.Popen(
                [sys.executable, "-c", TRAIN, *map(str, arguments)],
                env={**os.environ, **group, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.addCleanup(p.communicate)
            self.addCleanup(p.kill)
            started.append(p)
        for p in started:
            self.assertIn("trains", p.stdout.readline())
        return started

    def ends_with(self, process, limit):
        _, err = process.communicate(timeout=limit)
        self.assertNotIn(process.returncode, (0, -signal.SIGKILL), err)
        return err

    def test_a_rank_that_is_killed_is_named_at_once(self):
        for exchange in ("allgather", "gtopk"):
            with self.subTest(exchange=exchange):
                ranks = self.start(4, exchange, 300, "trains")
                ranks[2].kill()
                since = time.monotonic()
                for rank in (0, 1, 3):
                    self.assertRegex(self.ends_with(ranks[rank], 60), "CommError: rank %d: .*rank 2" % rank)
                self.assertLess(time.monotonic() - since, 60)

    def test_a_rank_that_stalls_is_named_within_the_timeout(self):
        for exchange in ("allgather", "gtopk", "sparcml"):
            for stalled in (1, 2):
                with self.subTest(exchange=exchange, stalled=stalled):
                    ranks = self.start(3, exchange, 3, f"rank {stalled} stalls")
                    for rank in {0, 1, 2} - {stalled}:
                        err = self.ends_with(ranks[rank], 60)
                        named = (f"(was aborted because of|no message from|for) rank {stalled}( in|\\n)|"
                                 f"rank {stalled} took no message")
                        self.assertRegex(err, f"CommError: rank {rank}: .*({named})")
                        self.assertRegex(err, f"timed out after 3 s|was aborted because of rank {stalled}")
                    ranks[stalled].kill()


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Blame(unittest.TestCase):
    def setUp(self):
        import torch.distributed as dist

        for newer in {"append", "check", "multi_get", "multi_set"} & set(dir(dist.Store)):  # than PyTorch 2.0
            patch = unittest.mock.patch.object(dist.Store, newer, side_effect=AssertionError(newer))
            patch.start()
            self.addCleanup(patch.stop)

    def broadcast_from_a_rank_that_stalls(self, late, timeout):
        """In a broadcast from rank 3, which stalls, rank 2 waits for rank 0, which waits for rank 3. One of the two comes
        late. Returns their errors."""
        import torch.distributed as dist

        from skim import _core
        from skim._transport import GlooTransport

        store, errors, ends = dist.HashStore(), {}, threading.Event()

        def rank(r):
            comm = _core.communicator_over(GlooTransport(store, r, 4, timeout))
            comm.barrier()
            if r in (1, 3):
                ends.wait()
                return
            if r == late:
                ends.wait(timeout / 2)  # stands for a long computation
            try:
                comm.broadcast(b"", 3)
            except _core.CommError as e:
                errors[r] = e
                comm.abort(e.peer)

        threads = [threading.Thread(target=rank, args=[r]) for r in range(4)]
        for t in threads:
            t.start()
        threads[2].join()
        threads[0].join()
        ends.set()
        self.assertEqual({r: e.peer for r, e in errors.items()}, {0: 3, 2: 3}, errors)
        return errors

    def test_a_rank_that_begins_to_wait_late_is_not_blamed_for_the_one_that_it_waits_for(self):
        errors = self.broadcast_from_a_rank_that_stalls(late=0, timeout=6.0)
        self.assertRegex(str(errors[2]), "no message from rank 0 .*: timed out after 6 s; rank 0 waits for rank 3")

    def test_a_rank_whose_wait_ran_out_is_not_taken_for_dead(self):
        """Gloo closes its connections at once, but the rank needs time to find the one that all wait for."""
        errors = self.broadcast_from_a_rank_that_stalls(late=2, timeout=3.0)
        self.assertRegex(str(errors[2]), "the group was aborted because of rank 3")

    def two_ranks(self, of_rank_1):
        """Returns rank 0's transport. of_rank_1(transport) runs in a thread, with rank 1's."""
        import torch.distributed as dist

        from skim._transport import GlooTransport

        store = dist.HashStore()
        other = threading.Thread(target=lambda: of_rank_1(GlooTransport(store, 1, 2, 10.0)))
        other.start()
        self.addCleanup(other.join)
        return GlooTransport(store, 0, 2, 10.0)

    def test_a_send_to_a_rank_that_has_ended_says_so(self):
        transport = self.two_ranks(lambda other: None)
        with self.assertRaisesRegex(ConnectionError, "its connection is closed: it has ended or failed"):
            while True:  # until gloo sees it
                transport.send(memoryview(bytearray(8)), 1, 0)

    def test_a_rank_that_hears_of_a_failure_tells_it_before_it_closes_its_connections(self):
        """The one that fails sends a word to the ranks that wait for it, before it tells the others."""
        from skim import CommError, _core

        heard = threading.Event()

        def fails(transport):
            tells = transport.abort
            transport.abort = lambda *what: heard.wait() and tells(*what)
            _core.communicator_over(transport).abort(1)

        transport = self.two_ranks(fails)
        self.addCleanup(heard.set)
        comm = _core.communicator_over(transport)
        with self.assertRaisesRegex(CommError, "was aborted because of rank 1"):
            comm.broadcast(b"", 1)
        comm.abort(1)
        self.assertEqual(transport.told(), (1, ""))

    def test_a_wait_is_told_while_it_lasts(self):
        import torch.distributed as dist

        from skim._transport import _Waits

        store = dist.HashStore()
        mine, other = (_Waits(store, r, 2, 0.8) for r in range(2))
        self.addCleanup(mine.close)
        self.addCleanup(other.close)

        def comes_to_be(chain):  # a busy machine may publish late
            return any(other.chain(0) == chain for _ in range(100))

        self.assertEqual(other.chain(0), [0])
        mine.begin(1)
        self.assertTrue(comes_to_be([0, 1]))
        mine.end()
        self.assertTrue(comes_to_be([0]))
        mine.begin(1)
        other.begin(0)
        self.assertTrue(comes_to_be([0, 1, 0]), "a ring")


# Rank 0 stays, and makes its default group anew with a rank 1 that is another process.
GROUPS = """
import subprocess, sys, datetime, torch, torch.distributed as dist, skim
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, port, others):
    for_all = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=for_all, wait_for_workers=False)
    if others:
        others.append(subprocess.Popen([sys.executable, *others[0], str(store.port)]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=for_all)
    for _ in range(2):
        model = DDP(nn.Linear(50, 50))
        skim.attach(model, timeout=5.0)
        model(torch.ones(3, 50)).sum().backward()
    print(f"rank {rank} has taken a step", flush=True)
    dist.barrier()
    dist.destroy_process_group()

if len(sys.argv) > 1:
    train(1, int(sys.argv[1]), [])
else:
    for _ in range(2):
        others = [sys.argv[:1]]
        train(0, 0, others)
        assert others[1].wait() == 0
"""


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Groups(unittest.TestCase):
    def test_a_process_that_makes_its_group_anew_finds_a_peer_that_is_new(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "script.py"
            script.write_text(GROUPS)
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        for rank in range(2):
            self.assertEqual(done.stdout.count(f"rank {rank} has taken a step"), 2, done.stdout)

    def test_a_rank_that_makes_no_group_is_named(self):
        import torch.distributed as dist

        from skim import CommError
        from skim._transport import GlooTransport

        store = dist.HashStore()
        errors = {}

        def rank(r):
            try:
                GlooTransport(store, r, 4, 2.0)
            except CommError as e:
                errors[r] = e

        threads = [threading.Thread(target=rank, args=[r]) for r in (0, 1, 3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual({r: e.peer for r, e in errors.items()}, {0: 2, 1: 2, 3: 2})
        self.assertIn("rank 0: rank 2 did not make this group in 2 s", str(errors[0]))
        self.assertNotIn("\n", str(errors[0]))

    def test_a_rank_that_cannot_begin_to_connect_says_why(self):
        import torch.distributed as dist

        from skim import CommError
        from skim._transport import GlooTransport

        with unittest.mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="eth-none"):
            with self.assertRaisesRegex(CommError, "could not connect: .*eth-none") as caught:
                GlooTransport(dist.HashStore(), 0, 2, 60.0)
        self.assertEqual(caught.exception.peer, -1)


class Dense(unittest.TestCase):
    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_each_step_counts_with_its_number_of_ranks(self):
        from skim._report import Report

        step = types.SimpleNamespace(
            n=100, dense=False, k=1, sent_bytes=8, received_bytes=8, select_ns=0, exchange_ns=0, apply_ns=0, capture=0.5
        )
        report = Report(0, 4)
        report.add(0, step, "")
        report.size = 1  # an ElasticGroup, which the others leave
        report.add(0, step, "")
        report.buckets_stand()
        self.assertEqual(report.dense_bytes, 2 * 3 / 4 * 4 * 100)
        report.size = 2
        report.add(0, step, "")
        self.assertEqual(report.dense_bytes, 2 * 3 / 4 * 4 * 100 + 4 * 100)


class Waits(unittest.TestCase):
    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_a_rank_that_stays_slow_is_named_once(self):
        from skim._report import Report

        report = Report(0, 3)
        even, slow = [3.0, 2.0, 2.5], [9.0, 1.0, 8.0]  # rank 1 waits least: the others wait for it
        self.assertEqual([report.compare(even, 10.0) for _ in range(9)], [""] * 9)
        self.assertEqual(report.waited_s, [0.0, 9 * 0.75, 0.0])
        told = [report.compare(slow, 10.0) for _ in range(20)]
        self.assertEqual([i for i, text in enumerate(told) if text], [5])
        self.assertIn("rank 1 has been slow for 60 s", told[5])
        self.assertIn("75 %", told[5])
        report.compare(even, 10.0)
        self.assertEqual([i for i in range(20) if report.compare(slow, 10.0)], [5])


class Bytes(unittest.TestCase):
    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_bytes_have_up_to_three_digits_and_the_unit_that_fits(self):
        from skim._report import _bytes

        for count, text in (
            (0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (999_499, "999 kB"), (999_700, "1 MB"),
            (12.3e6, "12.3 MB"), (999.9e6, "1 GB"), (1234e9, "1.23 TB"),
        ):  # fmt: skip
            self.assertEqual(_bytes(count), text)


# Rank 1 dies in the first attempt, between two checkpoints. The model has one parameter: DDP forms its buckets anew
# after a restart, and until they stand, Skim compresses each parameter alone.
RESTARTED = """
import os, sys, pathlib, torch, torch.distributed as dist, skim
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, folder, dies = dist.get_rank(), pathlib.Path(sys.argv[1]), sys.argv[2] == "dies"
torch.manual_seed(0)
model = DDP(nn.Linear(300, 30, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
skim.attach(model, density=0.01, exchange="allgather", value_code="f32", timeout=20)
saved, first = folder / f"{rank}.pt", 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    skim.load_state_dict(model, state["skim"])
    first = state["step"]
    print(f"rank {rank} goes on after step {first}", flush=True)
for step in range(first, 12):
    optimizer.zero_grad()
    batch = torch.randn(4, 300, generator=torch.Generator().manual_seed(100 * step + rank))
    model(batch).square().sum().backward()
    optimizer.step()
    if step + 1 == 6:
        dist.barrier()
        torch.save({"model": model.state_dict(), "skim": skim.state_dict(model), "step": step + 1}, saved)
        dist.barrier()
    if dies and rank == 1 and step == 8 and first == 0:
        os._exit(7)
state = {"model": model.state_dict(), "residuals": skim.compression_of(model).residuals()}
torch.save(state, folder / f"end-{rank}.pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Restarts(unittest.TestCase):
    def test_the_next_attempt_under_torchrun_finds_its_state(self):
        import torch

        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            script = folder / "script.py"
            script.write_text(RESTARTED)
            ends = {}
            for attempts in (0, 1):
                at = folder / str(attempts)
                at.mkdir()
                done = subprocess.run(
                    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
                     "--max-restarts", str(attempts), script, at, "dies" if attempts else "lives"],
                    capture_output=True, text=True, timeout=300,
                    env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.count("goes on after step 6"), 3 * attempts, done.stdout)
                ends[attempts] = [torch.load(at / f"end-{rank}.pt") for rank in range(3)]
            for straight, restarted in zip(ends[0], ends[1]):
                for part in ("model", "residuals"):
                    self.assertEqual(straight[part].keys(), restarted[part].keys())
                    for key, value in straight[part].items():
                        self.assertTrue(torch.equal(value, restarted[part][key]), f"{part}: {key}")


if __name__ == "__main__":
    unittest.main()
