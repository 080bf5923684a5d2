"""What a run of the tool survives: restarts, signals with lead time, what killed runs leave, a loss that diverges.

docs/reliability.md promises these. Needs SKIM_TOOL; SKIM_HAS_MPI=1 where the build has MPI.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import unittest
import unittest.mock

from tool_test import FOR_MPIRUN, HAS_MPI, LIMIT, SMALL, TOOL, Case, lines, newest_in, train

from launched import decoded, is_running, listening, parent_of, pids_of

NEEDS_MPI = "this build has no MPI: it cannot start several ranks"
RUN = ["--ranks", 3, "--model", "mlp-64", "--steps", 120, "--momentum", 0.9, "--eval-epochs", 0, "--checkpoint-steps", 10]
TEMPFAIL = 75
SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples/slurm.sh"


def residuals_in(folder):
    return {f.name: f.read_bytes() for f in newest_in(folder).glob("*.residual")}


class Reliability(Case):
    def folder(self, name):
        return ["--checkpoint", self.dir / name, "--metrics", self.dir / f"{name}.jsonl"]

    def assert_as_undisturbed(self, name, run=RUN):
        """The run has ended with the residuals of one that nothing happened to, and recorded every step once."""
        self.assert_ok(train(*run, "--checkpoint", self.dir / "undisturbed"))
        self.assertTrue(residuals_in(self.dir / name) == residuals_in(self.dir / "undisturbed"), "residuals differ")
        steps = [line["step"] for line in lines(self.dir / f"{name}.jsonl") if "k" in line]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertEqual(newest_in(self.dir / name).name, f"step-{len(steps):08}")

    def steps_in(self, name):
        """Those of the newest checkpoint."""
        return int(newest_in(self.dir / name).name[5:])

    def wait_for_step_of(self, run, name, step):
        self.wait_for_step(run, self.dir / f"{name}.jsonl", step)


@unittest.skipUnless(HAS_MPI, NEEDS_MPI)
class Restarts(Reliability):
    def kill_a_rank(self, run, name, step, rank):
        self.wait_for_step_of(run, name, step)
        self.kill_now(run, rank)

    def kill_now(self, run, rank):
        before = pids_of(self.dir)
        os.kill(before[rank], signal.SIGKILL)
        self.wait_until(run, lambda: set(pids_of(self.dir).values()).isdisjoint(before.values()), "ranks stay")

    def end_after_a_restart(self, run, name):
        """Ends a run whose ranks are gone once it has come further than they did. Returns what it has said."""
        before = (self.dir / f"{name}.jsonl").read_text().count('"sent_bytes"')
        self.wait_for_step_of(run, name, before + 1)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)
        self.assert_as_undisturbed(name, [*RUN, "--steps", self.steps_in(name)])
        return err

    def test_a_rank_that_dies_and_one_that_hangs(self):
        run = self.start(*RUN, *self.folder("c"), "--restarts", 3, "--timeout", 10)
        self.wait_for_step_of(run, "c", 5)
        self.wait_for_checkpoint(run, self.dir / "c")
        self.kill_a_rank(run, "c", 15, 1)
        self.wait_for_step_of(run, "c", 45)
        os.kill(pids_of(self.dir)[2], signal.SIGSTOP)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 0, out + err)
        said = err.splitlines()
        self.assertRegex(said[0], r"^skim: rank 1 \(pid \d+\) died.*; restart 1 from step-000000\d0 on 3 ranks$")
        self.assertRegex(said[1], r"^skim: rank \d: .*rank 2.*; restart 2 from step-000000\d0 on 3 ranks$")
        self.assertEqual(said[2], "skim: restarts:")
        self.assertRegex(said[3], r"^  after \d+ s, from step-000000\d0 on 3 ranks: rank 1 \(pid")
        self.assertRegex(said[4], r"^  after \d+ s, from step-000000\d0 on 3 ranks: rank \d: .*rank 2")
        self.assertEqual(len(said), 5, err)
        self.assert_as_undisturbed("c")

    def test_a_restart_does_not_continue_another_run(self):
        """The ranks of the first attempt have ended before one of them could put the old run aside."""
        self.assert_ok(train(*RUN, *self.folder("c"), "--steps", 20))
        once, wrapper = self.dir / "once", self.dir / "mpirun"
        wrapper.write_text(f'#!/bin/sh\n[ -e "{once}" ] || {{ touch "{once}"; exit 1; }}\n'
                           f'exec "{os.environ["SKIM_MPIRUN"]}" "$@"\n')
        wrapper.chmod(0o755)
        with unittest.mock.patch.dict(os.environ, SKIM_MPIRUN=str(wrapper)):
            done = train(*RUN, *self.folder("c"), "--steps", 30, "--seed", 2, "--restarts", 1)
        self.assert_ok(done)
        self.assertIn("restart 1 from the beginning on 3 ranks", done.stderr)
        self.assertEqual(newest_in(self.dir / "c.~1~").name, "step-00000020")
        self.assertEqual(newest_in(self.dir / "c").name, "step-00000030")
        self.assertEqual([line["step"] for line in lines(self.dir / "c.jsonl") if "k" in line], list(range(1, 31)))

    def test_on_the_ranks_that_are_left(self):
        run = self.start(*RUN, *self.folder("c"), "--steps", 1000000, "--restarts", 5, "--min-ranks", 2)
        self.wait_for_checkpoint(run, self.dir / "c")
        self.kill_a_rank(run, "c", 15, 0)
        self.wait_until(run, lambda: sorted(pids_of(self.dir)) == [0, 1], "no 2 ranks are left")
        os.kill(pids_of(self.dir)[1], signal.SIGKILL)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGKILL, out + err)
        self.assertIn("restart 1 from step-", err)
        self.assertIn("on 2 ranks", err)
        self.assertIn("not started again: fewer ranks are left (1) than --min-ranks 2", err)
        self.assertRegex(err.splitlines()[-1], r"^skim: rank 1 \(pid \d+\) died")

    def test_before_the_first_checkpoint_it_starts_from_the_beginning(self):
        run = self.start(*RUN, *self.folder("c"), "--steps", 1000000, "--checkpoint-steps", 1000000, "--restarts", 1)
        self.kill_a_rank(run, "c", 3, 0)
        self.assertIn("restart 1 from the beginning on 3 ranks", self.end_after_a_restart(run, "c"))

    def test_it_gives_up(self):
        dead = ["--ranks", 2, "--model", "mlp-64", "--lr", "1e20", "--steps", 60, *self.folder("c"), "--restarts", 9]
        done = train(*dead)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("restart 1 from the beginning"), 1)
        self.assertIn("not started again: the failure came again from the same checkpoint", done.stderr)
        self.assertNotIn("restart 2", done.stderr)
        self.assertIn("steps were skipped", done.stderr.splitlines()[-1])

        run = self.start(*RUN, *self.folder("d"), "--steps", 1000000, "--restarts", 1, "--restart-within", "1h")
        self.kill_a_rank(run, "d", 3, 1)
        self.wait_until(run, lambda: 1 in pids_of(self.dir), "it did not start again")
        os.kill(pids_of(self.dir)[1], signal.SIGKILL)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGKILL, out + err)
        self.assertIn("not started again: 1 restart within 1:00 h did not help (--restarts)", err)

    def test_restarts_of_long_ago_do_not_count(self):
        run = self.start(*RUN, *self.folder("c"), "--steps", 1000000, "--restarts", 1, "--restart-within", "0.1s")
        self.kill_a_rank(run, "c", 3, 1)
        self.wait_until(run, lambda: 1 in pids_of(self.dir), "it did not start again")
        self.kill_now(run, 1)
        self.assertIn("; restart 2 from", self.end_after_a_restart(run, "c"))

    def test_a_signal_is_no_failure(self):
        run = self.start(*RUN, *self.folder("c"), "--steps", 1000000, "--restarts", 3)
        self.wait_for_step_of(run, "c", 5)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)
        self.assertNotIn("restart", err)

    def test_a_signal_to_one_rank_is_no_failure(self):
        run = self.start(*RUN, *self.folder("c"), "--steps", 1000000, "--restarts", 3)
        self.wait_for_step_of(run, "c", 5)
        os.kill(pids_of(self.dir)[1], signal.SIGTERM)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)
        self.assertRegex(err, r"^skim: stopped after step \d+; checkpoint \S+; --resume continues\n$")

    def test_usage(self):
        one = ["--ranks", 2, "--model", "linear", "--steps", 3]
        for arguments, words in [
            (["--restarts", 2], ["--restarts needs --checkpoint DIR"]),
            (["--min-ranks", 2], ["--min-ranks needs --restarts N"]),
            (["--restart-within", "1h"], ["--restart-within needs --restarts N"]),
            (["--restarts", 2, *self.folder("c"), "--min-ranks", 3], ["--min-ranks 3 is more than --ranks 2"]),
            (["--restarts", 2, *self.folder("c"), "--compare", "dense,gtopk"], ["--restarts takes one run"]),
            (["--restarts", 2, *self.folder("c"), "--data", "mnist", "--data-dir", self.dir], ["mnist"]),
        ]:
            with self.subTest(arguments=arguments):
                self.assert_refused(train(*one, *arguments), *words)
        mpirun = [os.environ["SKIM_MPIRUN"], "-n", "1"]
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        done = subprocess.run([*mpirun, TOOL, "train", "--restarts", "2", "--checkpoint", self.dir / "c"],
                              capture_output=True, text=True, timeout=LIMIT, env=environment)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--restarts needs ranks that skim starts itself", done.stderr)


class Preemption(Reliability):
    """A batch system sends SIGUSR1 some time before it ends a job."""

    def test_status_75_and_a_checkpoint(self):
        for ranks in (1, 3) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                run_of = [*RUN, "--ranks", ranks]
                name = f"c{ranks}"
                run = self.start(*run_of, *self.folder(name), "--steps", 1000000)
                self.wait_for_step_of(run, name, 5)
                run.send_signal(signal.SIGUSR1)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, TEMPFAIL, out + err)
                self.assertIn("--resume continues", err)
                run_of += ["--steps", self.steps_in(name) + 20]
                self.assert_ok(train(*run_of, *self.folder(name), "--resume"))
                if ranks == 3:
                    self.assert_as_undisturbed(name, run_of)

    def test_a_terminal_that_closes_ends_the_run_with_a_checkpoint(self):
        for ranks in (1, 3) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                name = f"c{ranks}"
                run = self.start(*RUN, "--ranks", ranks, *self.folder(name), "--steps", 1000000)
                self.wait_for_step_of(run, name, 5)
                run.send_signal(signal.SIGHUP)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 128 + signal.SIGHUP, out + err)
                self.assertIn("--resume continues", err)
                self.assertIn("\nrun ", out, "the table is lost")

    def test_under_nohup_it_goes_on_when_the_terminal_closes(self):
        """Also if a library that the tool links has a handler for SIGHUP of its own, as UCX behind Open MPI 5 has."""
        library = self.dir / "own_handler.so"
        source = "#include <csignal>\n[[gnu::constructor]] void take() { std::signal(SIGHUP, [](int) { _Exit(9); }); }\n"
        subprocess.run(["c++", "-shared", "-fPIC", "-o", library, "-xc++", "-include", "cstdlib", "-"], input=source,
                       text=True, check=True)
        for ranks, preload in ((1, ""), (1, str(library)), (3, "")) if HAS_MPI else ((1, ""), (1, str(library))):
            with self.subTest(ranks=ranks, preload=preload):
                name = f"c{ranks}{bool(preload)}"
                with unittest.mock.patch.dict(os.environ, LD_PRELOAD=preload):
                    run = self.start(*RUN, "--ranks", ranks, "--steps", 1000000, *self.folder(name),
                                     preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
                self.wait_for_step_of(run, name, 5)
                run.send_signal(signal.SIGHUP)
                self.wait_for_step_of(run, name, 50 + (self.dir / f"{name}.jsonl").read_text().count("\n"))
                run.send_signal(signal.SIGTERM)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)

    @unittest.skipUnless(HAS_MPI, NEEDS_MPI)
    def test_mpirun_has_nothing_to_wait_for_after_a_stop(self):
        """Where a rank ends with another status than 0, Open MPI waits for seconds."""
        wrapper, status = self.dir / "mpirun", self.dir / "status"
        wrapper.write_text(f'#!/bin/sh\n"{os.environ["SKIM_MPIRUN"]}" "$@"\necho $? >"{status}"\n')
        wrapper.chmod(0o755)
        for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
            with self.subTest(name), unittest.mock.patch.dict(os.environ, SKIM_MPIRUN=str(wrapper)):
                number = signal.Signals[name]
                run = self.start(*RUN, "--ranks", 2, *self.folder(name), "--steps", 1000000)
                self.wait_for_step_of(run, name, 5)
                run.send_signal(number)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, TEMPFAIL if name == "SIGUSR1" else 128 + number, out + err)
                self.assertEqual(status.read_text(), "0\n")

    @unittest.skipUnless(HAS_MPI, NEEDS_MPI)
    def test_a_signal_before_the_ranks_start_stops_them(self):
        wrapper = self.dir / "mpirun"
        wrapper.write_text('#!/bin/sh\nkill -TERM $PPID\nuntil [ -e "$SKIM_RUN_DIR/stopping" ]; do sleep 0.1; done\n'
                           f'exec "{os.environ["SKIM_MPIRUN"]}" "$@"\n')
        wrapper.chmod(0o755)
        with unittest.mock.patch.dict(os.environ, SKIM_MPIRUN=str(wrapper)):
            run = self.start(*RUN, "--ranks", 2, *self.folder("c"), "--steps", 1000000, "--grace", "1h")
            out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)
        self.assertEqual(newest_in(self.dir / "c").name, "step-00000001")

    def test_a_failure_is_told_though_a_signal_came(self):
        for ranks in (1, 2) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                name = f"c{ranks}"
                folder = self.dir / name
                restarts = ["--restarts", 3] if ranks > 1 else []
                run = self.start("--ranks", ranks, "--model", "mlp-64", "--eval-epochs", 0, "--steps", 1000000,
                                 *self.folder(name), *restarts)
                self.wait_for_step_of(run, name, 5)
                folder.rmdir()
                folder.write_text("")  # so that no checkpoint can be written
                run.send_signal(signal.SIGUSR1)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 1, out + err)
                self.assertRegex(err.splitlines()[-1], f"^skim: (rank 0: )?checkpoint: .*Not a directory.*{name}")
                self.assertIn("\nrun ", out, "the table is lost")
                self.assertNotIn("restart", err)

    def test_a_signal_that_comes_too_late_to_stop_anything_is_none(self):
        """It comes while a rank writes the last checkpoint."""
        for ranks in (1, 2) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                name = f"c{ranks}"
                run = self.start("--ranks", ranks, "--model", "vgg16", "--steps", 1, "--batch", 1, *self.folder(name))
                metrics = self.dir / f"{name}.jsonl"
                self.wait_until(run, lambda: metrics.exists() and '"evaluation"' in metrics.read_text(),
                                "no evaluation")
                run.send_signal(signal.SIGTERM)
                out, err = run.communicate(timeout=LIMIT)
                self.assertEqual(run.returncode, 0, out + err)
                self.assertNotIn("stopped after", err)
                self.assertEqual(newest_in(self.dir / name).name, "step-00000001")

    def one_rank_that_hangs(self, *arguments):
        """Nobody reads its metrics, so it cannot write them."""
        pipe = self.dir / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        size = fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        run = self.start("--model", "linear", "--eval-epochs", 0, "--steps", 1000000, "--metrics", pipe,
                         *arguments)

        def is_full():  # the line of a step has 500 bytes or so, and no room for two is left
            return struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))[0] > size - 700

        self.wait_until(run, is_full, "the pipe is not full")
        return run

    def test_a_second_signal_ends_one_rank_at_once(self):
        run = self.one_rank_that_hangs("--grace", "1h")
        end = time.monotonic() + LIMIT
        while run.poll() is None and time.monotonic() < end:  # two signals at a time may become one
            run.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(timeout=0.02)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)

    def test_the_grace_is_a_bound_for_one_rank(self):
        run = self.one_rank_that_hangs("--grace", "1s")
        run.send_signal(signal.SIGUSR1)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, TEMPFAIL, out + err)

    @unittest.skipUnless(HAS_MPI, NEEDS_MPI)
    def test_ranks_of_mpirun(self):
        environment = dict(os.environ, **FOR_MPIRUN, OMPI_MCA_btl_vader_single_copy_mechanism="none")
        command = [os.environ["SKIM_MPIRUN"], "-n", "3", TOOL, "train",
                   *map(str, [*SMALL, *RUN, *self.folder("c"), "--steps", 1000000])]
        run = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        self.addCleanup(run.kill)
        self.wait_for_step_of(run, "c", 5)
        run.send_signal(signal.SIGUSR1)  # mpirun forwards it
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, TEMPFAIL, out + err)
        self.assertIn("--resume continues", err)
        longer = [*RUN, "--steps", self.steps_in("c") + 20]
        self.assert_ok(train(*longer, *self.folder("c"), "--resume"))
        self.assert_as_undisturbed("c", longer)

    def test_the_script_for_slurm(self):
        """With an srun that starts one rank, and an scontrol that notes what it is told."""
        def write(name, text):
            (self.dir / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.dir / name).chmod(0o755)

        def write_srun(epochs):
            run_of = ["--model", "mlp-64", "--data", "generated", *SMALL, "--epochs", epochs, "--eval-epochs", 0]
            write("srun", f'shift 3; exec "{TOOL}" train "$@" {" ".join(map(str, run_of))}')

        write_srun(1000000)
        write("scontrol", f'echo "$@" >>"{self.dir}/told"')
        environment = dict(os.environ, PATH=f"{self.dir}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(self.dir),
                           SLURM_JOB_ID="17")
        job = subprocess.Popen(["bash", EXAMPLE], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment)
        self.addCleanup(job.kill)
        self.wait_for_step(job, self.dir / "run-17.jsonl", 5)
        children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        self.assertEqual(len(children), 1)
        os.kill(int(children[0]), signal.SIGUSR1)
        out, err = job.communicate(timeout=LIMIT)
        self.assertEqual(job.returncode, TEMPFAIL, out + err)
        self.assertEqual((self.dir / "told").read_text(), "requeue 17\n")
        stopped = self.steps_in("run-17")
        write_srun(stopped // 64 + 1)  # of 64 steps
        done = subprocess.run(["bash", EXAMPLE], text=True, capture_output=True, env=environment, timeout=LIMIT)
        self.assert_ok(done)
        self.assertIn(f"resumed after step {stopped}", done.stdout)
        self.assertEqual((self.dir / "told").read_text(), "requeue 17\n", "it was requeued after its end")

    @unittest.skipUnless(HAS_MPI, NEEDS_MPI)
    def test_the_grace_is_a_bound(self):
        """A rank that hangs cannot finish its step. The run ends in time, with the checkpoint before."""
        run = self.start(*RUN, *self.folder("c"), "--grace", "3s", "--steps", 100000)
        self.wait_for_checkpoint(run, self.dir / "c")
        ranks = pids_of(self.dir)
        os.kill(ranks[1], signal.SIGSTOP)
        begin = time.monotonic()
        run.send_signal(signal.SIGUSR1)
        _, err = run.communicate(timeout=LIMIT)
        self.assertRegex(err.splitlines()[-1], r"^skim: rank .*did not stop within 3 s of the signal \(--grace\)")
        # mpirun gives the ranks that are left some seconds more.
        self.assertLess(time.monotonic() - begin, 3 + 12 + 5)
        self.assertEqual(run.returncode, TEMPFAIL)
        self.assertTrue((newest_in(self.dir / "c") / "manifest.json").exists())
        for pid in ranks.values():
            self.assertFalse(is_running(pid), f"pid {pid} is still there")


@unittest.skipUnless(HAS_MPI, NEEDS_MPI)
class Leftovers(Reliability):
    """A launch that is killed cannot remove its folders. The next one does."""

    @staticmethod
    def memory_of(pid):
        """The files in /dev/shm that a process maps."""
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
        return {pathlib.Path(path) for path in re.findall(r"(/dev/shm/skim-\S+)", maps)}

    def folders(self):
        return {*self.dir.glob("skim-*")}

    def test_the_next_launch_removes_what_a_killed_one_left(self):
        if not os.access("/dev/shm", os.W_OK):
            self.skipTest("there is no /dev/shm to write to")
        name = "killed"
        run = self.start(*RUN, "--steps", 100000, *self.folder(name))
        self.wait_for_step_of(run, name, 3)
        ranks = list(pids_of(self.dir).values())
        segments = set().union(*map(self.memory_of, ranks))
        self.assertEqual(len(segments), 3, "the ranks share no memory there")
        left = self.folders()
        mpirun = parent_of(ranks[0])

        def another():  # beside the first one
            self.assert_ok(train("--ranks", 2, "--model", "linear", "--steps", 2,
                                 env=dict(os.environ, TMPDIR=str(self.dir))))

        another()
        self.assertEqual(self.folders(), left, "it removed the folder of a run that lives")
        self.assertTrue(all(s.exists() for s in segments))
        for pid in [run.pid, mpirun, *ranks]:
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=LIMIT)
        self.assertEqual(self.folders(), left)
        self.assertTrue(all(s.exists() for s in segments), "there is nothing to remove")
        another()
        self.assertEqual(self.folders(), set())
        self.assertFalse(any(s.parent.exists() for s in segments))

    def test_a_run_that_ends_leaves_nothing(self):
        run = self.start(*RUN, *self.folder("c"))
        self.wait_for_step_of(run, "c", 3)
        segments = set().union(*map(self.memory_of, pids_of(self.dir).values()))
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 0, out + err)
        self.assertEqual(set(self.dir.iterdir()), {self.dir / "c", self.dir / "c.jsonl"})
        self.assertFalse([s for s in segments if s.parent.exists()])


@unittest.skipUnless(HAS_MPI, NEEDS_MPI)
class Scripts(Reliability):
    """scripts/soak and scripts/chaos, which are asked to end."""

    def assert_ends_with_its_ranks(self, script, *arguments, folder):
        run = subprocess.Popen([sys.executable, str(SCRIPTS / script), *arguments], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=dict(os.environ, TMPDIR=str(self.dir), SKIM_TOOL=TOOL))
        self.addCleanup(run.kill)
        pids = {}

        def started():
            for found in self.dir.glob(folder):
                pids.update(pids_of(found))
            return len(pids) >= 2

        self.wait_until(run, started, "no ranks")
        run.terminate()
        _, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 130, err)
        self.assertNotIn("Traceback", err)
        self.assertEqual([pid for pid in pids.values() if is_running(pid)], [])
        self.assertEqual(list(self.dir.iterdir()), [])

    def test_soak(self):
        self.assert_ends_with_its_ranks("soak", "--ranks", "2", folder="*")

    def test_soak_refuses_a_time_in_which_nothing_is_measured(self):
        for minutes in ("0", "-1", "nan"):
            done = subprocess.run([sys.executable, str(SCRIPTS / "soak"), f"--minutes={minutes}"], text=True,
                                  capture_output=True, env=dict(os.environ, SKIM_TOOL=TOOL), timeout=LIMIT)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertTrue(done.stderr.endswith(f"--minutes: must be above 0, not {float(minutes):g}\n"), done.stderr)

    def test_chaos(self):
        self.assert_ends_with_its_ranks("chaos", "--faults", "kill", folder="chaos-*/undisturbed")


@unittest.skipUnless(HAS_MPI, NEEDS_MPI)
class Strangers(Reliability):
    def test_one_who_connects_and_says_nothing_does_not_keep_the_run_from_its_end(self):
        """Open MPI's mpirun waits for his first message on the port that it has for its own ranks."""
        run = self.start(*RUN, *self.folder("c"))
        self.wait_for_step_of(run, "c", 3)
        addresses = [decoded(address) for address in listening(parent_of(pids_of(self.dir)[0]))]
        self.assertTrue(addresses, "mpirun listens nowhere: this test, and what it is for, can go")
        for address in 20 * addresses:
            stranger = socket.create_connection(address)
            self.addCleanup(stranger.close)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 0, out + err)
        self.assert_as_undisturbed("c")


class Divergence(Reliability):
    # From step 96 on, the learning rate is 300 times as large. 3 ranks: an epoch is 21 steps.
    RUN = ["--model", "mlp-64", "--steps", 300, "--eval-epochs", 0, "--checkpoint-steps", 10, "--batch", 8,
           "--lr-schedule", "steps", "--lr-gamma", 300, "--clip-norm", 1]

    def case(self, ranks):
        return [*self.RUN, "--ranks", ranks, "--lr-drops", 96 * 8 * ranks / 512]

    def test_stop_keeps_the_state(self):
        for ranks in (1, 3) if HAS_MPI else (1,):
            with self.subTest(ranks=ranks):
                name = f"c{ranks}"
                done = train(*self.case(ranks), *self.folder(name), "--on-divergence", "stop")
                self.assert_refused(done, "has diverged", "medians of 10", "diverged-", status=1)
                found = re.search(r"step (\d+): the loss of rank \d has diverged: (\S+) after (\S+) \(", done.stderr)
                step = int(found[1])
                self.assertTrue(97 < step < 120, done.stderr)
                self.assertGreater(float(found[2]), 3 * float(found[3]))
                state = self.dir / name / f"diverged-{step:08}"
                self.assertTrue((state / "manifest.json").exists())
                # No run continues from it, but one that is asked to does.
                self.assertLess(int(newest_in(self.dir / name).name[5:]), step)
                state.rename(self.dir / name / f"step-{step:08}")
                done = train(*self.case(ranks), *self.folder(name), "--resume", "--steps", step)
                self.assert_ok(done)
                self.assertIn(f"resumed after step {step}", done.stdout)

    def test_rollback_goes_on_with_other_examples(self):
        # It diverges again and again, because the rate stays.
        done = train(*self.case(1), *self.folder("c"), "--on-divergence", "rollback", "--keep", 4)
        self.assertEqual(done.returncode, 1, done.stderr)
        said = done.stderr.splitlines()
        self.assertEqual(len(said), 4, done.stderr)
        back = [re.search(r"step (\d+): the loss.*; back to step (\d+), without the examples", line) for line in said[:3]]
        for found in back:
            self.assertGreaterEqual(int(found[1]) - int(found[2]), 20)
            self.assertLess(int(found[2]), 97)
        self.assertIn("after 3 rollbacks", said[3])
        # The steps of the last attempt are recorded once, and not as they would have been.
        self.assert_ok(train(*self.case(1), *self.folder("d"), "--steps", 90, "--metrics", self.dir / "straight"))
        straight = {line["step"]: line["loss"] for line in lines(self.dir / "straight") if "k" in line}
        recorded = [(line["step"], line["loss"]) for line in lines(self.dir / "c.jsonl") if "k" in line]
        self.assertEqual([step for step, _ in recorded], list(range(1, len(recorded) + 1)))
        last = int(back[-1][2])
        for step, loss in recorded[:last]:
            self.assertEqual(loss, straight[step], step)
        other = [(loss, straight[step]) for step, loss in recorded[last:90]]
        self.assertTrue(other and all(loss != before for loss, before in other), other)

    @unittest.skipUnless(HAS_MPI, NEEDS_MPI)
    def test_a_rollback_to_a_checkpoint_of_another_number_of_ranks(self):
        """The line that says where the process began goes with its steps, and comes again."""
        case = [*self.case(2), *self.folder("c"), "--keep", 4]
        case[case.index("--checkpoint-steps") + 1] = 1000
        case[case.index("--ranks") + 1] = 1
        self.assert_ok(train(*case, "--steps", 60))
        case[case.index("--ranks") + 1] = 2
        done = train(*case, "--resume", "--on-divergence", "rollback")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(set(re.findall(r"back to step (\d+),", done.stderr)), {"30"})
        recorded = lines(self.dir / "c.jsonl")
        self.assertEqual([(line["step"], line["ranks"]) for line in recorded if "command" in line], [(0, 1), (30, 2)])
        steps = [line["step"] for line in recorded if "k" in line]
        self.assertEqual(steps, [*range(1, 61), *range(31, 31 + len(steps) - 60)])

    def test_a_good_run_is_left_alone(self):
        good = ["--model", "mlp-64", "--steps", 300, "--eval-epochs", 0]
        done = train(*good, "--on-divergence", "stop", "--summary", self.dir / "s.json")
        self.assert_ok(done)
        self.assertEqual(json.loads((self.dir / "s.json").read_text())[0]["rollbacks"], 0)

    def test_usage(self):
        done = train("--model", "linear", "--steps", 3, "--on-divergence", "rollback", "--checkpoint", self.dir / "c")
        self.assert_refused(done, "--on-divergence rollback needs --checkpoint DIR, and --checkpoint-steps")
        rollback = ["--model", "linear", "--steps", 3, "--on-divergence", "rollback", "--checkpoint", self.dir / "c"]
        for steps, keep, least in ((5, 2, 5), (10, 2, 3), (1, 19, 20), (18, 2, 3)):
            with self.subTest(steps=steps):
                often = [*rollback, "--checkpoint-steps", steps, "--keep"]
                text = f"goes back 20 steps: with --checkpoint-steps {steps} it needs --keep {least}"
                self.assert_refused(train(*often, keep), text)
                self.assert_ok(train(*often, least))
        in_rounds = [*rollback, "--local-steps", 50, "--checkpoint-steps", 10, "--keep"]
        self.assert_refused(train(*in_rounds, 7), "goes back 70 steps: with --checkpoint-steps 10 it needs --keep 8")
        self.assert_ok(train(*in_rounds, 8))


@unittest.skipUnless(HAS_MPI, NEEDS_MPI)
class Stragglers(Reliability):
    def test_the_table_names_the_rank_that_the_others_waited_for(self):
        self.pause_rank_2()

    def test_a_dedicated_server_counts_as_a_rank_in_the_table(self):
        self.pause_rank_2("--exchange", "param-server", "--server", "dedicated")

    def pause_rank_2(self, *options):
        # Many pauses fall into computing; those in an exchange do not count.
        run = self.start(*RUN, "--model", "lenet5", "--batch", 64, "--threads", 1, "--steps", 1000000,
                         *self.folder("c"), "--summary", self.dir / "s.json", *options)
        self.wait_for_step_of(run, "c", 10)
        slow = pids_of(self.dir)[2]
        begin = time.monotonic()
        for signal_, seconds in 20 * [(signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.03)]:
            os.kill(slow, signal_)
            with self.assertRaises(subprocess.TimeoutExpired, msg="the run ended early"):
                run.wait(timeout=seconds)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=LIMIT)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, out + err)
        [row] = json.loads((self.dir / "s.json").read_text())
        self.assertEqual(len(row["waited_ms"]), 3)
        self.assertEqual(max(row["waited_ms"]), row["waited_ms"][2])
        self.assertGreater(row["waited_ms"][2], 200)
        self.assertLess(row["waited_ms"][2], 1e3 * (time.monotonic() - begin))
        self.assertRegex(out, r"the ranks waited for slower ones in \d+\.\d of \d+\.\d s: .*rank 2 \d")


if __name__ == "__main__":
    unittest.main()
