"""skim.ElasticGroup: what ranks have and owe is conserved while ranks leave, are lost and join."""

import gc
import importlib.util
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import unittest
import unittest.mock

import numpy as np

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # PyTorch tells of each lost connection at length
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import skim
    from skim import elastic
    from skim._elastic_steps import ElasticSteps

WHY_NOT = "" if HAS_TORCH and hasattr(dist.TCPStore, "check") else "torch is not installed, or its stores have no check()"

N = 400  # entries of the model
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "elastic.py"
CLOSE = 2e-3  # of sums of some 100 steps in float32
MANY = 10**6  # more messages than a rank sends
SECONDS = 120  # in which a test must end, on a busy machine

# A rank that forks a child, which ends as a program does. Prints who ends the rank's part in the run, and how.
FORKS = """
import os, sys
import torch
import skim
from skim import elastic

end, rank = elastic._Pulse.end, os.getpid()
def told(pulse, how):
    print("child" if os.getpid() != rank else "rank", how, flush=True)
    end(pulse, how)
elastic._Pulse.end = told
model = torch.nn.Linear(3, 3)
with skim.ElasticGroup(sys.argv[1], {"model": model}) as group:
    aggregator = skim.Aggregator(model.parameters(), process_group=group)
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    aggregator.step()
"""


class Lost(BaseException):
    """Stands for the sudden end of a rank that is a thread."""


if HAS_TORCH:

    class LosableTransport(elastic.GlooTransport):
        """Loses the rank whose thread sends, when its sends_left has come to 0."""

        def send(self, *what):
            rank = threading.current_thread()
            sends_left = getattr(rank, "sends_left", None)  # Skim's own thread has none
            if sends_left == 0:
                rank.lose()
                raise ConnectionError("lost")
            if sends_left is not None:
                rank.sends_left -= 1
            return super().send(*what)

        def receive(self, *what):
            """Or receives, while it settles a generation with the others."""
            rank = threading.current_thread()
            if getattr(rank, "is_settling", False) and rank.receives_left is not None:
                if rank.receives_left == 0:
                    rank.lose()
                    raise ConnectionError("lost")
                rank.receives_left -= 1
            return super().receive(*what)


class Rank(threading.Thread):
    """A rank in a thread. It trains with gradients of its own until the run ends, or until it leaves or is lost."""

    def __init__(self, run, *, kind="aggregator", joins=False, min_ranks=1, sends_left=None, bits=32, more=(), saved=None,
                 **options):
        super().__init__(daemon=True)
        self.in_run, self.kind, self.joins, self.options = run, kind, joins, options
        self.number = len(run.ranks)
        self.settings = {"min_ranks": min_ranks, "lost_after": 5.0, "timeout": 20.0}
        self.leaves_at = None  # a step
        self.is_to_leave, self.is_to_be_lost = False, None  # None, or after how many sends from the next step on
        self.drops_model = False  # as a function that has trained does when it returns
        self.sends_left = sends_left  # until it is lost; None: it is not
        self.receives_left, self.is_settling = None, False  # the same of messages that it receives while it settles
        self.has_ended = False
        self.error, self.owed_before = None, []  # what the mean owes this rank, before each step
        self.steps_taken = []  # (number of the step, number of ranks)
        self.progress = {"step": 0}
        self.more = dict(more)  # what else is in its state
        self.saved = saved  # what an earlier run ended with
        self.model = nn.Linear(N, 1, bias=False, dtype=torch.float32 if bits == 32 else torch.bfloat16)
        run.ranks.append(self)
        self.start()

    def run(self):
        try:
            self.train()
        except Lost:
            self.group.close("failed")
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            self.error = e
        with self.in_run.changed:
            self.has_ended = True  # is_alive() says so later, when nobody is told any more
            self.in_run.changed.notify_all()

    def gradient(self, step):
        if step >= self.in_run.quiet:
            return torch.zeros(1, N)
        numbers = np.random.default_rng([step, self.number]).standard_normal((1, N))
        return torch.from_numpy(numbers.astype(np.float32))

    def train(self):
        with torch.no_grad():
            self.model.weight.fill_(float("nan") if self.joins else 0.0)  # whoever joins gets the others'
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        if self.saved:
            self.progress["step"] = self.saved["step"]
            with torch.no_grad():
                self.model.weight.copy_(self.saved["x"])
        state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress, **self.more}
        self.group = skim.ElasticGroup(self.in_run.address, state, **self.settings)
        options = {"density": 0.02, "value_code": "f32", "process_group": self.group, "dense_below": 0, **self.options}
        if self.kind == "aggregator":
            self.compression = skim.Aggregator(self.model.named_parameters(), **options)
        elif self.kind == "updates":
            self.ddp = DistributedDataParallel(self.model)
            self.compression = skim.attach(self.ddp, updates_of=self.optimizer, **options)
        else:
            self.compression = skim.LocalSteps(self.model, self.optimizer, **options)
        if self.saved:
            self.compression.load_state_dict(self.saved["states"])
        while self.progress["step"] < (self.leaves_at or self.in_run.steps) and not self.is_to_leave:
            step = self.progress["step"]
            self.step(step)
            with self.in_run.changed:
                self.progress["step"] += 1
                self.steps_taken.append((step, self.group.size))
                self.in_run.changed.notify_all()
        if self.kind == "local" and not self.is_to_leave:
            self.compression.finish()
        self.kept, self.state = self.residual(), self.compression.state_dict()
        if self.drops_model:
            del self.compression
            gc.collect()
        self.group.leave()

    def step(self, step):
        self.owed_before.append(self.residual() / self.group.size)
        if self.is_to_be_lost is not None and self.sends_left is None:
            self.sends_left = self.is_to_be_lost
        if self.kind == "updates":
            self.optimizer.param_groups[0]["lr"] = self.in_run.rate
            self.ddp(self.gradient(step)).sum().backward()
            self.mean = self.model.weight.grad.clone()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        self.model.weight.grad = self.gradient(step).to(self.model.weight.dtype)
        if self.kind == "aggregator":
            assert self.compression.step()
            self.optimizer.step()
        else:
            self.compression.step()

    def lose(self):
        self.sends_left = self.receives_left = None
        self.group.close("failed")  # which tells the others, as the end of a process closes its connections
        self.group.regroup = self.group.hand_over = self.group.take = self.end

    def end(self, *_, **__):
        raise Lost

    def be_lost_in_the_barrier(self, of):
        """With the last message of this step. The step before shows how many there are."""
        take = self.step

        def count_and_be_lost(step):
            if step == of - 1:
                self.sends_left = MANY
            elif step == of:
                self.sends_left = MANY - self.sends_left - 1
            take(step)

        self.step = count_and_be_lost

    def be_lost_while_it_leaves(self, sends):
        """After so many messages."""
        leave = self.group.leave

        def leave_and_be_lost():
            self.sends_left = sends
            leave()

        self.group.leave = leave_and_be_lost

    def residual(self):
        return next(iter(self.compression.residuals().values())).double()

    def trains(self):
        return len(self.steps_taken) > 2

    def x(self):
        return self.model.weight.detach().double().flatten()


class Run:
    """Ranks that share a store, and a model that starts at 0."""

    def __init__(self):
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.address = f"localhost:{self.store.port}"
        self.steps = self.quiet = 10**9  # the run ends; gradients are zeros: from this step on
        self.ranks = []
        self.rate = 1.0  # with kind="updates"
        self.changed = threading.Condition()  # after every step of a rank

    def wait_until(self, holds):
        with self.changed:
            if not self.changed.wait_for(lambda: holds() or any(r.error for r in self.ranks), SECONDS):
                self.steps = 0  # so that no rank goes on beside the next test
                raise AssertionError("it does not come about")

    def let_soon(self, what):
        """Sets `steps` or `quiet` to a step that no rank has reached. A rank looks at it again after its open step."""
        with self.changed:
            setattr(self, what, max(r.progress["step"] for r in self.ranks) + 3)

    def let_be_quiet(self):
        """Returns when all ranks have taken a round without gradients, and go on without."""
        self.let_soon("quiet")
        self.wait_until(lambda: all(r.progress["step"] > self.quiet + 3 for r in self.ranks))

    def end(self):
        self.let_soon("steps")
        for r in self.ranks:
            r.join(SECONDS)
            if r.error:
                raise r.error
            if r.is_alive():
                raise AssertionError(f"rank {r.number} hangs")

    def given(self):
        """The sum over the steps of the means of gradients."""
        total = torch.zeros(N, dtype=torch.float64)
        for r in self.ranks:
            for step, size in r.steps_taken:
                total += r.gradient(step).double().flatten() / size
        return total


def begun(count, *, then=None, **options):
    """A run, and its first ranks, which train. Later they wait for new ranks if they are fewer than `then`; None: count."""
    run = Run()
    ranks = [Rank(run, min_ranks=count, **options) for _ in range(count)]
    run.wait_until(lambda: all(r.trains() for r in ranks))
    for r in ranks:  # not from the start, or some may start without the others
        r.group.min_ranks = then or count
    return run, ranks


KINDS = [
    ("aggregator", {"exchange": "allgather"}),
    ("aggregator", {"exchange": "gtopk"}),
    ("aggregator", {"exchange": "param-server", "server": "sharded"}),
    ("aggregator", {"exchange": "auto"}),
    ("local", {"every": 1, "outer_lr": 1.0}),
    ("local", {"every": 3, "outer_lr": 1.0}),
    ("local", {"every": 3, "outer_lr": 1.0, "ahead": 0.0}),
    ("local", {"every": 2, "outer_lr": 1.0, "exchange": "param-server"}),  # rank 0 is the server
]
FACTOR = ("local", {"every": 1})  # means are multiplied by outer_lr_for(number of ranks): the model gets more than was given


@unittest.skipIf(WHY_NOT, WHY_NOT)
class Elastic(unittest.TestCase):
    def setUp(self):
        settle = ElasticSteps._settle_with

        def settle_with(steps, comm):
            rank = threading.current_thread()
            rank.is_settling = True
            try:
                return settle(steps, comm)
            finally:
                rank.is_settling = False

        for patch in (
            unittest.mock.patch.object(elastic, "GlooTransport", LosableTransport),
            unittest.mock.patch.object(ElasticSteps, "_settle_with", settle_with),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def check_law(self, run, stayed):
        """What the model has got and what is still owed are what was given. Returns what was not."""
        owed = sum(r.kept for r in stayed) / len(stayed)
        self.assertGreater(run.given().abs().max().item(), 1.0)
        for r in stayed:
            self.assertTrue(torch.equal(r.x(), stayed[0].x()))
            self.assertTrue(torch.isfinite(r.x()).all())
        return run.given() + stayed[0].x() - owed

    def test_ranks_leave_and_join(self):
        for kind, options in KINDS:
            with self.subTest(kind=kind, **options):
                run, (first, second) = begun(2, kind=kind, **options)
                third = Rank(run, kind=kind, joins=True, **options)
                run.wait_until(third.trains)
                second.is_to_leave = True
                run.wait_until(lambda: second.has_ended)
                fourth = Rank(run, kind=kind, joins=True, **options)
                run.wait_until(fourth.trains)
                run.end()
                missing = self.check_law(run, [first, third, fourth])
                self.assertLess(missing.abs().max().item(), CLOSE)
                self.assertEqual(
                    first.group.events[1:],
                    [
                        f"skim: {third.group.name} joined; 3 ranks now",
                        f"skim: {second.group.name} left and handed over its residual; 2 ranks now",
                        f"skim: {fourth.group.name} joined; 3 ranks now",
                    ],
                )

    def test_a_rank_leaves_in_good_order_though_only_the_group_is_left_of_its_training(self):
        for kind, options in (KINDS[0], KINDS[5]):
            with self.subTest(kind=kind, **options):
                run, (first, second) = begun(2, then=1, kind=kind, **options)
                second.drops_model = second.is_to_leave = True
                run.wait_until(lambda: second.has_ended)
                run.end()
                self.assertLess(self.check_law(run, [first]).abs().max().item(), CLOSE)
                self.assertEqual(
                    first.group.events[1:], [f"skim: {second.group.name} left and handed over its residual; 1 rank now"]
                )

    def test_whoever_joins_gets_x_in_float32_though_the_model_has_16_bits(self):
        run, [first] = begun(1, kind="local", every=1, outer_lr=0.3, bits=16)
        second = Rank(run, kind="local", every=1, outer_lr=0.3, bits=16, joins=True)
        run.wait_until(second.trains)
        run.end()
        of_both = [r.compression.state_dict()["shared"] for r in (first, second)]
        self.assertFalse(torch.equal(of_both[0], of_both[0].bfloat16().float()))
        self.assertTrue(torch.equal(*of_both))

    def test_whoever_joins_at_a_learning_rate_of_0_gets_the_last_rate(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        run, [first] = begun(1, kind="updates")
        run.rate = 0.0
        then = first.progress["step"] + 1
        run.wait_until(lambda: first.progress["step"] > then)
        second = Rank(run, kind="updates", joins=True)
        run.wait_until(second.trains)
        run.end()
        self.assertTrue(first.mean.any())
        self.assertTrue(torch.equal(first.mean, second.mean), "the mean is in gradients, and residuals in updates")

    def test_a_rank_that_is_lost_takes_only_what_it_kept(self):
        for kind, options in KINDS[:3] + KINDS[5:6]:
            for sends in (0, 2, 3, 4, 5):
                with self.subTest(kind=kind, **options, sends=sends):
                    run, ranks = begun(3, then=2, kind=kind, **options)
                    # Without gradients it does not matter whether the step counts with the old ranks or the new.
                    run.let_be_quiet()
                    ranks[2].is_to_be_lost = sends  # after so many more messages
                    run.wait_until(lambda: ranks[2].has_ended)
                    run.end()
                    lost, owed = self.check_law(run, ranks[:2]), ranks[2].owed_before
                    # If all had reduced the step, what the rank sent in it has arrived, and what gtopk's other ranks
                    # gave it back is lost.
                    arrived = ((lost - owed[-1]).abs() > CLOSE).sum().item()
                    self.assertLessEqual(arrived, 3 * 0.02 * N)
                    # The ranks tell their norms when they meet, before each step.
                    norms = [f"norm {3 * o.norm().item():.3g};" for o in owed[-2:]]
                    for r in ranks[:2]:
                        told = [e for e in r.group.events if "is lost" in e]
                        self.assertTrue(any(n in told[0] for n in norms), (told, norms))
                        self.assertEqual(len(told), 1)
                    for r in ranks[:2]:
                        self.assertEqual([step for step, _ in r.steps_taken], list(range(run.steps)))

    def test_a_mean_has_the_factor_of_the_ranks_that_have_reduced_it(self):
        for sends in range(1, 9):  # some ranks may know that all have reduced the step, and others hear it later
            with self.subTest(sends=sends):
                kind, options = FACTOR
                run, ranks = begun(4, then=3, kind=kind, **options)
                ranks[3].is_to_be_lost = sends
                run.wait_until(lambda: ranks[3].has_ended)
                run.end()
                for r in ranks[:3]:
                    self.assertTrue(torch.equal(r.x(), ranks[0].x()))

    def test_a_rank_is_lost_while_another_leaves(self):
        for sends in range(6):
            with self.subTest(sends=sends):
                run, (first, leaver, lost) = begun(3, then=1)
                run.let_be_quiet()
                leaver.is_to_leave, lost.is_to_be_lost = True, sends
                run.wait_until(lambda: leaver.has_ended and lost.has_ended)
                run.end()
                missing = self.check_law(run, [first])
                # The lost rank may have taken what the other one kept.
                explained = [lost.owed_before[-1], lost.owed_before[-1] + leaver.kept / 3]
                differ = [((missing - e).abs() > CLOSE).sum().item() for e in explained]
                self.assertLessEqual(min(differ), 2 * 0.02 * N, first.group.events)

    def test_a_rank_that_was_silent_before_it_was_admitted_joins_when_it_goes_on(self):
        run, [first] = begun(1)
        begins = threading.Event()  # the pulse of the other one
        beat = elastic._Pulse._beat
        with unittest.mock.patch.object(elastic._Pulse, "_beat", lambda self: begins.wait() and beat(self)):
            silent = Rank(run, joins=True)
            seen = first.group._watch._seen
            run.wait_until(lambda: any(of.silence > first.group.lost_after for of in list(seen.values())))
        then = first.progress["step"]
        run.wait_until(lambda: first.progress["step"] > then + 3)
        begins.set()
        run.wait_until(silent.trains)
        run.end()
        self.assertTrue(torch.equal(first.x(), silent.x()))

    def test_a_rank_that_is_lost_while_it_joins_takes_nothing(self):
        for sends in range(0, 14, 2):
            with self.subTest(sends=sends):
                run, ranks = begun(2)
                run.let_be_quiet()
                lost = Rank(run, joins=True, sends_left=sends)
                run.wait_until(lambda: lost.has_ended)
                run.end()
                missing = self.check_law(run, ranks)
                self.assertLessEqual((missing.abs() > CLOSE).sum().item(), 0.02 * N)

    def test_random_changes(self):
        for seed in range(8):
            with self.subTest(seed=seed):
                self.change_at_random(random.Random(seed))

    def change_at_random(self, draw):
        kind, options = draw.choice([*KINDS, FACTOR])
        run, (first, second) = begun(2, then=1, kind=kind, **options)
        stayed = [first, second]
        for _ in range(6):
            for _ in range(draw.choice((1, 1, 2, 3))):  # at about the same time
                others = [r for r in stayed[1:] if r.trains()]
                what = draw.choice(("joins", "is lost while it joins", "leaves", "is lost"))
                if what == "is lost while it joins":
                    Rank(run, kind=kind, joins=True, sends_left=draw.randrange(12), **options)
                elif what == "joins" or not others:
                    stayed.append(Rank(run, kind=kind, joins=True, **options))
                else:
                    goes = draw.choice(others)
                    stayed.remove(goes)
                    if what == "leaves":
                        goes.is_to_leave = True
                    else:
                        goes.is_to_be_lost = draw.randrange(10)
            then = first.progress["step"] + draw.choice((3, 10))
            run.wait_until(lambda then=then: first.progress["step"] > then)
        run.wait_until(lambda: all(r.trains() for r in stayed))
        run.end()
        for r in stayed:
            self.assertTrue(torch.equal(r.x(), first.x()))
            self.assertTrue(torch.isfinite(r.x()).all())
        self.assertEqual([step for step, _ in first.steps_taken], list(range(run.steps)))

    def test_too_few_ranks_wait_for_new_ones(self):
        """Also if the step in which a rank was lost counts as done."""
        for sends in range(1, 8):
            with self.subTest(sends=sends):
                run, (first, second, lost) = begun(3)
                lost.is_to_be_lost = sends
                run.wait_until(lambda: lost.has_ended)
                before = [len(r.steps_taken) for r in (first, second)]
                new = Rank(run, joins=True, min_ranks=3)
                run.wait_until(new.trains)
                run.end()
                for r in (second, new):
                    self.assertTrue(torch.equal(first.x(), r.x()))
                for r, taken in zip((first, second), before):
                    self.assertEqual({size for _, size in r.steps_taken[taken:]}, {3})
                    self.assertEqual([step for step, _ in r.steps_taken], list(range(run.steps)))
                since = new.steps_taken[0][0]
                self.assertEqual([step for step, _ in new.steps_taken], list(range(since, run.steps)))

    def test_too_few_ranks_wait_once(self):
        run, (first, second) = begun(2)
        first.group.patience, propose, waits = 0.5, first.group._propose, []

        def count(*what, **how):
            waits.append(what)
            propose(*what, **how)

        first.group._propose = count
        second.is_to_leave = True
        first.join(SECONDS)
        self.assertIsInstance(first.error, skim.CommError)
        self.assertIn("1 rank(s), but min_ranks is 2, and no others came in 0.5 s", str(first.error))
        self.assertEqual(len(waits), 1)

    def test_ranks_agree_on_a_step_though_two_are_lost(self):
        """The second one while the others agree: some of them then know whether the step counts, and others do not."""
        for of_second in (0, 1):
            for sends in (3, 4, 5, 6):
                with self.subTest(second=of_second, sends=sends):
                    run, ranks = begun(4, then=1)
                    in_order = sorted(ranks, key=lambda r: r.group.rank)
                    second = in_order.pop(of_second)
                    second.receives_left = 1
                    lost = in_order.pop()
                    lost.is_to_be_lost = sends
                    run.wait_until(lambda: lost.has_ended and second.has_ended)
                    run.end()
                    for r in in_order:
                        self.assertTrue(torch.equal(r.x(), in_order[0].x()))
                        self.assertEqual([step for step, _ in r.steps_taken], list(range(run.steps)))

    def test_a_saved_run_goes_on_with_another_number_of_ranks(self):
        for kind, options in (KINDS[0], KINDS[2], KINDS[5]):
            for after in (2, 3, 4):
                with self.subTest(kind=kind, **options, after=after):
                    run, ranks = begun(3, kind=kind, **options)
                    run.end()
                    self.assertLess(self.check_law(run, ranks).abs().max().item(), CLOSE)
                    saved = {"step": run.steps, "x": ranks[0].model.weight.detach(),
                             "states": {key: value for r in ranks for key, value in r.state.items()}}  # fmt: skip
                    then, new = begun(after, kind=kind, saved=saved, **options)
                    then.end()
                    self.assertEqual({r.steps_taken[0] for r in new}, {(run.steps, after)})
                    missing = run.given() + self.check_law(then, new)
                    self.assertLess(missing.abs().max().item(), CLOSE)

    def test_a_rank_is_lost_while_it_leaves_with_others(self):
        """They leave in good order. Only what the lost one kept is missing."""
        run, ranks = begun(5, then=1)
        run.let_be_quiet()
        first, second, lost, *leavers = sorted(ranks, key=lambda r: r.group.rank)
        hand_over = lost.group.hand_over

        def begin_to_hand_over(*what):
            lost.sends_left = 1
            return hand_over(*what)

        lost.group.hand_over = begin_to_hand_over
        then = max(r.progress["step"] for r in ranks) + 3
        for r in (lost, *leavers):
            r.leaves_at = then
        run.wait_until(lambda: all(r.has_ended for r in (lost, *leavers)))
        run.end()
        missing = self.check_law(run, [first, second])
        self.assertLess((missing - lost.kept / 5).abs().max().item(), CLOSE)

    def test_a_leaver_without_the_last_mean_gives_nobody_its_state(self):
        """When it wants to leave, another rank is lost. So it helps with one step more, whose mean it does not apply."""
        run, ranks = begun(4, then=1)
        leaver, stays, lost_later, lost = sorted(ranks, key=lambda r: r.group.rank)
        take_later = lost_later.step

        def be_lost_in_the_meeting(step):
            if step == last + 1:
                leaver.group.min_ranks = stays.group.min_ranks = 3  # they wait for the new rank
                lost_later.sends_left = 0
            take_later(step)

        with run.changed:
            last = leaver.leaves_at = max(r.progress["step"] for r in ranks) + 4
            lost.be_lost_in_the_barrier(last - 1)
            lost_later.step = be_lost_in_the_meeting
        run.wait_until(lambda: lost_later.has_ended)
        joined = Rank(run, joins=True)
        run.wait_until(joined.trains)
        leaver.group.min_ranks = stays.group.min_ranks = 1
        run.end()
        self.assertFalse(lost.is_alive())
        self.assertEqual(joined.steps_taken[0][0], last + 1)
        self.assertTrue(torch.equal(joined.x(), stays.x()))

    def test_ranks_that_help_with_a_last_step_leave_though_the_others_are_lost_in_it(self):
        for sends in (0, 1, 2):  # in the last step
            with self.subTest(sends=sends):
                run, ranks = begun(4, then=3)
                *leavers, lost_later, lost = sorted(ranks, key=lambda r: r.group.rank)
                tell = lost_later.group.tell

                def tell_and_be_lost(lost_later=lost_later, tell=tell, sends=sends):
                    tell()
                    lost_later.sends_left = sends

                with run.changed:
                    last = max(r.progress["step"] for r in ranks) + 4
                    for r in leavers:
                        r.leaves_at = last
                    lost.be_lost_in_the_barrier(last - 1)
                    lost_later.group.tell = tell_and_be_lost  # when the ranks that are left have settled
                run.wait_until(lambda: all(r.has_ended for r in ranks))
                self.assertEqual([r.progress["step"] for r in leavers], [last, last])
                self.assertTrue(torch.equal(leavers[0].x(), leavers[1].x()))

    def let_all_leave(self, run, ranks, **options):
        """All leave after the same step, which ends when another rank waits to join. Returns that one, when it trains."""
        waits = threading.Event()
        ask = elastic._Store.append

        def ask_and_tell(store, *what):
            ask(store, *what)
            waits.set()

        def wait_after(take):
            def take_and_wait(step):
                take(step)
                if step + 1 == last:
                    waits.wait(SECONDS)

            return take_and_wait

        with run.changed:
            last = max(r.progress["step"] for r in ranks) + 3
            for r in ranks:
                r.leaves_at, r.step = last, wait_after(r.step)
        run.wait_until(lambda: all(r.progress["step"] + 1 == last for r in ranks))
        with unittest.mock.patch.object(elastic._Store, "append", ask_and_tell):
            joins = Rank(run, joins=True, **options)
            run.wait_until(joins.trains)
        self.assertEqual(joins.steps_taken[0][0], last)
        return joins

    def test_the_last_rank_that_leaves_hands_over_to_one_that_waits(self):
        for kind, options in (KINDS[0], KINDS[5]):
            with self.subTest(kind=kind, **options):
                run, ranks = begun(1, kind=kind, **options)
                joined = self.let_all_leave(run, ranks, kind=kind, **options)
                run.end()
                self.assertLess(self.check_law(run, [joined]).abs().max().item(), CLOSE)

    def test_a_rank_is_lost_while_all_leave_and_one_waits(self):
        """Only what the lost one kept is missing."""
        for kind, options in (KINDS[0], KINDS[5]):
            for sends in (0, 1, 2):  # before it is lost
                with self.subTest(kind=kind, **options, sends=sends):
                    run, ranks = begun(3, then=1, kind=kind, **options)
                    run.let_be_quiet()
                    lost = max(ranks, key=lambda r: r.group.rank)
                    lost.be_lost_while_it_leaves(sends)
                    joined = self.let_all_leave(run, ranks, kind=kind, **options)
                    run.end()
                    missing = self.check_law(run, [joined])
                    self.assertLess((missing - lost.kept / 3).abs().max().item(), CLOSE)

    def test_a_rank_is_lost_while_it_leaves(self):
        """At any of its messages. Lost at the third, it may leave behind one that knows that it leaves, and a taker that
        does not."""
        for sends in range(6):
            with self.subTest(sends=sends):
                run, ranks = begun(4, then=1)
                run.let_be_quiet()
                lost = max(ranks, key=lambda r: r.group.rank)
                lost.be_lost_while_it_leaves(sends)
                lost.is_to_leave = True
                run.wait_until(lambda: lost.has_ended)
                then = max(r.progress["step"] for r in ranks)
                stay = [r for r in ranks if r is not lost]
                run.wait_until(lambda: all(r.progress["step"] > then + 2 for r in stay))
                run.end()
                self.assertEqual([r.group.size for r in stay], [3, 3, 3])
                missing = self.check_law(run, stay)
                either = [missing, missing - lost.kept / 4]  # it had handed over, or not
                self.assertLess(min(m.abs().max().item() for m in either), CLOSE)

    def test_who_leaves_with_too_few_ranks_waits_for_nobody(self):
        run, ranks = begun(3)
        ranks[0].be_lost_while_it_leaves(1)
        run.end()
        self.assertEqual([r.group.size for r in ranks[1:]], [2, 2])

    def test_who_is_admitted_by_a_rank_that_is_lost_joins(self):
        """The lost rank has decided who the ranks are, and not told the new one."""
        run, [first] = begun(1)
        decide = elastic._Store.decide

        def decide_and_be_lost(store, key, value):
            decided = decide(store, key, value)
            if threading.current_thread() is first and key == "ranks/2":
                first.lose()
                first.end()
            return decided

        with unittest.mock.patch.object(elastic._Store, "decide", decide_and_be_lost):
            second = Rank(run)
            run.wait_until(second.trains)
        run.end()
        self.assertFalse(first.is_alive())
        self.assertEqual(second.steps_taken[0][0], 0)

    def test_a_state_travels_in_pieces(self):
        longest = []
        send = LosableTransport.send

        def measured(transport, message, to, tag):
            if tag == elastic.STATE_TAG:
                longest.append(len(message))
            return send(transport, message, to, tag)

        with (
            unittest.mock.patch.object(elastic, "PIECE_BYTES", 100),
            unittest.mock.patch.object(LosableTransport, "send", measured),
        ):
            run, [first] = begun(1)
            second = Rank(run, joins=True)
            run.wait_until(second.trains)
            second.is_to_leave = True
            run.wait_until(lambda: second.has_ended)
            run.end()
        self.assertLess(self.check_law(run, [first]).abs().max().item(), CLOSE)
        self.assertEqual(max(longest), 100)

    def test_new_ranks_begin_where_no_rank_is_left(self):
        run, [first] = begun(1)
        first.is_to_be_lost = 0
        first.sends_left = 0
        second = Rank(run)  # is admitted, which needs messages
        run.wait_until(second.trains)
        run.end()
        self.assertEqual(second.steps_taken[0][0], 0)
        self.assertIn("is rank 0; 1 rank now", second.group.events[0])

    def test_without_its_store_a_run_goes_on(self):
        run, ranks = begun(2)
        run.store = None  # the last reference to the server
        then = ranks[0].progress["step"] + 20
        run.wait_until(lambda: ranks[0].progress["step"] > then)
        run.end()
        self.assertTrue(torch.equal(ranks[0].x(), ranks[1].x()))
        told = [e for r in ranks for e in r.group.events if "is rank" not in e]
        self.assertEqual(told, ["skim: the store of the group has ended; no rank can join any more"])

    def test_a_rank_with_other_options_is_refused_and_the_others_go_on(self):
        run, ranks = begun(2)
        other = Rank(run, joins=True, residual_decay=0.5)
        run.wait_until(lambda: other.error)
        self.assertIsInstance(other.error, skim.InvalidArgument)
        self.assertRegex(str(other.error), "rank 0 has residual_decay=1.0, rank 2 has residual_decay=0.5")
        other.error = None
        run.end()
        self.assertTrue(torch.equal(ranks[0].x(), ranks[1].x()))
        self.assertEqual([step for step, _ in ranks[0].steps_taken], list(range(run.steps)))

    def check_refused(self, run, ranks, other, message):
        """`other` alone fails. The rest trains on."""
        run.wait_until(lambda: other.error or other.trains())
        self.assertIsInstance(other.error, skim.InvalidArgument)
        self.assertRegex(str(other.error), message)
        self.assertNotIn("\n", str(other.error))
        other.error = None
        run.wait_until(lambda: ranks[0].group.size == len(ranks))
        then = ranks[0].progress["step"]
        run.wait_until(lambda: ranks[0].progress["step"] > then)
        run.end()
        for r in ranks:
            self.assertTrue(torch.equal(r.x(), ranks[0].x()))
            self.assertEqual([step for step, _ in r.steps_taken], list(range(run.steps)))

    def test_a_rank_whose_state_has_other_names_is_refused_and_the_others_go_on(self):
        run, ranks = begun(2)
        theirs, its = ["model", "optimizer", "progress"], ["extra", "model", "optimizer", "progress"]
        why = re.escape(f"rank 0 has state={theirs}, rank 2 has state={its}")
        self.check_refused(run, ranks, Rank(run, joins=True, more={"extra": {}}), why)

    def test_a_rank_that_cannot_get_the_state_is_refused_and_the_others_go_on(self):
        for value, why in (
            ((i for i in range(3)), "'progress' cannot be sent .*\\(cannot pickle 'generator' object\\); it may"),
            (np.float64(0.5), r"'progress' cannot be sent .*\(numpy\S*scalar\); it may"),
        ):
            with self.subTest(why):
                run, ranks = begun(2)
                for r in ranks:
                    r.progress["value"] = value
                self.check_refused(run, ranks, Rank(run, joins=True), why)

    def test_what_is_no_store_is_told(self):
        def answer():
            while True:
                connection, _ = listener.accept()
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                connection.close()

        listener = socket.create_server(("localhost", 0))
        self.addCleanup(listener.close)
        threading.Thread(target=answer, daemon=True).start()
        address = "localhost:{}".format(listener.getsockname()[1])
        with self.assertRaisesRegex(skim.CommError, f"what listens at {address} does not answer as a store"):
            skim.ElasticGroup(address, {"model": nn.Linear(3, 3)}, timeout=1)

    def test_what_never_answers_is_told(self):
        listener = socket.create_server(("localhost", 0))
        self.addCleanup(listener.close)
        address = "localhost:{}".format(listener.getsockname()[1])
        made, group = threading.Event(), []

        def make():
            try:
                skim.ElasticGroup(address, {"model": nn.Linear(3, 3)}, timeout=1)
            except skim.CommError as e:
                group.append(str(e))
            made.set()

        with unittest.mock.patch.object(elastic, "STORE_WAIT_S", 1.0):
            threading.Thread(target=make, daemon=True).start()
            self.assertTrue(made.wait(SECONDS / 2), "it waits for ever")
        self.assertRegex(group[0], f"what listens at {address} does not answer as a store")

    def test_usage(self):
        run, model = Run(), nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def group(**how):
            return skim.ElasticGroup(how.pop("address", run.address), how.pop("state", {"model": model}), **how)

        def local(**how):
            return skim.LocalSteps(model, optimizer, process_group=group(), **how)

        def aggregator(**how):
            return skim.Aggregator(model.parameters(), process_group=group(), **how)

        class Own:
            def select(self, accumulated, k, step, slot):
                return np.arange(k)

        generator = (i for i in range(3))
        for error, message, make, how in (
            (skim.InvalidArgument, "address: must be 'host:port', not 'x'", group, {"address": "x"}),
            (skim.CommError, "no store at localhost:1 .*; start one", group, {"address": "localhost:1", "timeout": 1}),
            (skim.CommError, r"no store at a\.\.b:1 \(.*label", group, {"address": "a..b:1", "timeout": 1}),
            (skim.InvalidArgument, "min_ranks: must be a whole number of at least 1, not 0", group, {"min_ranks": 0}),
            (skim.InvalidArgument, "min_ranks: must be a whole number of at least 1, not 2.5", group, {"min_ranks": 2.5}),
            (skim.InvalidArgument, "timeout: must be a number above 0, not '9'", group, {"timeout": "9"}),
            (skim.InvalidArgument, "timeout: must be a number above 0, not inf", group, {"timeout": float("inf")}),
            (skim.InvalidArgument, r"timeout: must be at most 1e\+06 s, not 10000000000.0", group, {"timeout": 1e10}),
            (skim.InvalidArgument, r"timeout: must be at most 1e\+06 s, not 1e\+300", group, {"timeout": 1e300}),
            (skim.InvalidArgument, "lost_after: must be a number above 0, not nan", group, {"lost_after": float("nan")}),
            (skim.InvalidArgument, "patience: must be a number above 0, not -1", group, {"patience": -1}),
            (skim.InvalidArgument, "address: must be 'host:port', not 29400", group, {"address": 29400}),
            (skim.InvalidArgument, "address: must be 'host:port', not 'a:²'", group, {"address": "a:²"}),
            (skim.InvalidArgument, "address: must be 'host:port', not 'a:-1'", group, {"address": "a:-1"}),
            (skim.InvalidArgument, r"address: the port must be in \[1, 65535\], not 0", group, {"address": "localhost:0"}),
            (skim.InvalidArgument, r"address: the port .*, not 65536", group, {"address": "localhost:65536"}),
            (skim.InvalidArgument, "state: must be a dict .* not Linear", group, {"state": model}),
            (skim.InvalidArgument, "state: 'step' must be a dict or have", group, {"state": {"step": 3}}),
            (skim.InvalidArgument, "'a' cannot be sent .*cannot pickle 'gen", group, {"state": {"a": {"b": generator}}}),
            (skim.InvalidArgument, r"'a' cannot be sent .*numpy\S*scal", group, {"state": {"a": {"b": np.float32(1)}}}),
            (skim.InvalidArgument, "delay=0 and fragments=1", local, {"every": 3, "delay": 1}),
            (skim.InvalidArgument, "needs fragments=1", aggregator, {"fragments": 2}),
            (skim.InvalidArgument, "no selector of your own", aggregator, {"selector": Own()}),
            (skim.InvalidArgument, "needs feedback", aggregator, {"feedback": False}),
            (skim.InvalidArgument, "no dedicated", aggregator, {"exchange": "param-server", "server": "dedicated"}),
        ):  # fmt: skip
            with self.subTest(message=message), self.assertRaisesRegex(error, message):
                make(**how)
        with (
            unittest.mock.patch.object(dist, "TCPStore", object),
            self.assertRaisesRegex(skim.InvalidArgument, "is too old, .*; use 2.4 or newer"),
        ):
            group()
        one = group()
        of_one = skim.Aggregator(model.parameters(), process_group=one)
        with self.assertRaisesRegex(skim.InvalidArgument, "it has a model already"):
            skim.Aggregator(model.parameters(), process_group=one)
        with self.assertRaisesRegex(skim.InvalidArgument, "no gather in an ElasticGroup"):
            of_one.state_dict(gather=True)
        one.leave()
        one.leave()  # nothing more
        with self.assertRaisesRegex(skim.InvalidArgument, "no step after leave"):
            of_one.step()


@unittest.skipIf(WHY_NOT, WHY_NOT)
class WhoLives(unittest.TestCase):
    """Which ranks count as lost, with a clock and a store that the test moves. Ranks are lost after 4 s."""

    def setUp(self):
        self.now, self.values, self.stands_still_for = 0.0, {"pulse/a": "0", "pulse/b": "0"}, 0.0
        patch = unittest.mock.patch.object(elastic.time, "monotonic", lambda: self.now)
        patch.start()
        self.addCleanup(patch.stop)
        self.watch = elastic._Watch(self, 4.0)

    def get(self, key):
        self.now, self.stands_still_for = self.now + self.stands_still_for, 0.0
        return self.values[key]

    def pass_by(self, seconds, *living):
        for _ in range(seconds):
            self.now += 1.0
            for name in living:
                self.values[f"pulse/{name}"] = str(int(self.values[f"pulse/{name}"]) + 1)
            found = {name: self.watch.is_gone(name) for name in "ab"}
        return found

    def test_a_rank_is_gone_when_its_pulse_stands_still_for_long_enough(self):
        self.assertEqual(self.pass_by(5, "a"), {"a": False, "b": True})
        self.assertTrue(self.watch.lives("a"))
        self.assertFalse(self.watch.lives("b"))

    def test_a_rank_that_was_silent_and_goes_on_lives(self):
        self.pass_by(9, "a")
        self.assertEqual(self.pass_by(1, "a", "b"), {"a": False, "b": False})
        self.assertTrue(self.watch.lives("b"))

    def test_a_rank_that_has_told_its_end_is_gone_at_once(self):
        self.pass_by(1, "a", "b")
        self.values["pulse/b"] = elastic.FAILED
        self.assertTrue(self.watch.is_gone("b"))

    def test_nobody_is_gone_because_the_store_or_this_rank_has_stood_still(self):
        self.pass_by(2, "a", "b")
        for _ in range(3):
            self.stands_still_for = 60.0  # and no pulse gets through
            self.assertFalse(self.watch.is_gone("a"))
            self.assertFalse(self.watch.is_gone("b"))
            self.assertEqual(self.pass_by(1, "a", "b"), {"a": False, "b": False})


@unittest.skipIf(WHY_NOT, WHY_NOT)
class Processes(unittest.TestCase):
    """examples/elastic.py, whose ranks are killed and stopped."""

    def setUp(self):
        self.store = self.start("-m", "skim.store", "0")
        self.address = "localhost:" + re.search(r"port (\d+)", self.store.stdout.readline())[1]

    def start(self, *arguments):
        p = subprocess.Popen(
            [sys.executable, *arguments],
            env={**{k: v for k, v in os.environ.items() if k != "SKIM_DATA"}, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.addCleanup(p.communicate)
        self.addCleanup(p.kill)
        return p

    def rank(self, *arguments):
        p = self.start(str(EXAMPLE), self.address, "--lost-after", "3", *map(str, arguments))
        return p

    def read_until(self, process, pattern):
        for line in process.stdout:
            if found := re.search(pattern, line):
                return found
        self.fail(f"it ends without '{pattern}': {process.communicate()[1]}")

    def ends_well(self, *processes):
        lines = set()
        for p in processes:
            out, err = p.communicate(timeout=SECONDS)
            self.assertEqual(p.returncode, 0, err)
            lines.add(re.search("test accuracy .*", out)[0])
            told = err
        self.assertEqual(len(lines), 1, lines)  # the loss to the last digit
        return lines.pop(), told

    def test_a_killed_rank_is_replaced_under_ddp(self):
        ranks = [self.rank("--steps", 300, "--min-ranks", 3) for _ in range(3)]
        for p in ranks:
            p.began = self.read_until(p, r"begins at step (\d+) as rank (\d)")
        killed, *left = sorted(ranks, key=lambda p: int(p.began[2]), reverse=True)
        self.read_until(left[1], "step 20: .* 3 ranks")  # rank 0 tells
        killed.kill()
        new = self.rank("--steps", 300, "--min-ranks", 3)
        self.assertGreaterEqual(int(self.read_until(new, r"begins at step (\d+)")[1]), 20)
        line, _ = self.ends_well(*left, new)
        self.assertGreater(float(re.search(r"accuracy (\S+)", line)[1]), 90)

    def test_a_stopped_rank_is_left_behind_and_told(self):
        ranks = [self.rank("--steps", 400, "--local-steps", 5, "--min-ranks", 2) for _ in range(3)]
        for p in ranks:
            p.began = self.read_until(p, r"begins at step (\d+) as rank (\d)")
        stopped, *left = sorted(ranks, key=lambda p: int(p.began[2]), reverse=True)
        self.read_until(left[1], "3 ranks")
        stopped.send_signal(signal.SIGSTOP)
        self.read_until(left[1], "2 ranks")
        stopped.send_signal(signal.SIGCONT)
        _, err = stopped.communicate(timeout=SECONDS)
        self.assertEqual(stopped.returncode, 1, err)
        self.assertIn("the others went on without this rank", err)
        self.ends_well(*left)

    def test_a_child_of_a_rank_does_not_end_its_part(self):
        rank = self.start("-c", FORKS, self.address)
        out, err = rank.communicate(timeout=SECONDS)
        self.assertEqual((rank.returncode, out), (0, "rank left\n"), err)

    def test_the_store_ends_by_a_signal_and_refuses_a_taken_port(self):
        taken = self.start("-m", "skim.store", self.address.split(":")[1])
        _, err = taken.communicate(timeout=SECONDS)
        self.assertEqual(taken.returncode, 1)
        self.assertRegex(err.splitlines()[-1], r"skim.store: port \d+ cannot be used")
        for port in ("65536", "-1", "²", "x"):
            _, err = self.start("-m", "skim.store", "--", port).communicate(timeout=SECONDS)
            self.assertEqual(err.splitlines()[-1], f"skim.store: port: must be a whole number in [0, 65535], not '{port}'")
        self.store.send_signal(signal.SIGINT)
        self.assertEqual(self.store.wait(SECONDS), 0)


if __name__ == "__main__":
    unittest.main()
