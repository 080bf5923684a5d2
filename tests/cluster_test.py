"""scripts/cluster/cluster without privileges: what it refuses, and that it says so in one line.

With root it needs the machine's network; docs/slow-network.md says how to try it for real.
"""

import os
import pathlib
import random
import shutil
import string
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "cluster" / "cluster"


def cluster(*arguments, script=SCRIPT, **options):
    return subprocess.run(["/bin/bash", str(script), *arguments], capture_output=True, text=True, timeout=30,
                          **options)


class Refusals(unittest.TestCase):
    def refused(self, done, status, *words):
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("cluster: "), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_help_names_every_command(self):
        done = cluster("--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        for command in ("up", "run", "once", "shape", "stats", "enter", "down"):
            self.assertIn(f"\n  {command} ", done.stdout)

    def test_wrong_arguments(self):
        for arguments, word in [
            (["upp"], "unknown command 'upp'"),
            (["up", "4"], "expected up HOSTS RATE"),
            (["up", "1", "1gbit"], "2 to 250 hosts, got '1'"),
            (["up", "251", "1gbit"], "2 to 250 hosts, got '251'"),
            (["up", "four", "1gbit"], "got 'four'"),
            (["up", "010", "1gbit"], "2 to 250 hosts, got '010'"),
            (["up", "4", "1gb"], "got '1gb'"),
            (["up", "4", "fast"], "expected a rate such as 100mbit"),
            (["up", "4", "0.0gbit"], "got '0.0gbit'"),
            (["up", "4", "1gbit", "64k"], "got '64k'"),
            (["up", "4", "1gbit", "09999"], "got '09999'"),
            (["up", "4", "1gbit", "8192", "8192"], "smaller than the burst"),
            (["shape", "1"], "got '1'"),
            (["once", "4", "1gbit"], "expected once HOSTS RATE PROGRAM"),
            (["run"], "expected run PROGRAM"),
            (["enter", "h1", "true"], "HOST a number"),
        ]:
            with self.subTest(arguments):
                self.refused(cluster(*arguments), 2, word)

    def test_names_that_could_mean_other_namespaces(self):
        for name in ("h1", "", "a b", "x" * 9):
            with self.subTest(name):
                # An empty one is the default name, as with every variable of a shell.
                done = cluster("up", "1", "1gbit", env={**os.environ, "SKIM_CLUSTER": name})
                self.refused(done, 2, "SKIM_CLUSTER" if name else "2 to 250")
        done = cluster("stats", env={**os.environ, "SKIM_CLUSTER_NET": "10.77"})
        self.refused(done, 2, "SKIM_CLUSTER_NET")

    def test_without_root(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(SCRIPT, folder)
            os.chmod(folder, 0o755)
            as_other = {"user": 65534, "cwd": folder} if os.geteuid() == 0 else {}
            for arguments in (["up", "2", "1gbit"], ["run", "true"], ["shape", "1gbit"], ["stats"], ["down"]):
                with self.subTest(arguments):
                    self.refused(cluster(*arguments, script=copy, **as_other), 1, "needs root")

    @unittest.skipUnless(os.geteuid() == 0, "without root, that is said first")
    def test_without_its_programs(self):
        with tempfile.TemporaryDirectory() as folder:
            for program in ("dirname", "uname"):
                os.symlink(shutil.which(program), os.path.join(folder, program))
            self.refused(cluster("up", "2", "1gbit", env={"PATH": folder}), 1, "needs ip", "iproute2")


class Links(unittest.TestCase):
    def setUp(self):
        self.name = "shape" + "".join(random.choices(string.ascii_lowercase, k=3))
        self.addCleanup(self.cluster, "down")

    def cluster(self, *arguments):
        return cluster(*arguments, env=os.environ | {"SKIM_CLUSTER": self.name, "SKIM_CLUSTER_NET": "10.77.9"})

    def test_another_rate_keeps_the_latency(self):
        up = self.cluster("up", "2", "100mbit+5ms")
        if up.returncode:
            self.skipTest(f"no hosts here: {up.stderr.strip().splitlines()[-1]}")
        for rate, bits, nanoseconds in [("10mbit", 10_000_000, 5_000_000), ("none", 0, 5_000_000),
                                        ("1gbit+0us", 1_000_000_000, 0)]:
            with self.subTest(rate):
                done = self.cluster("shape", rate)
                self.assertEqual(done.returncode, 0, done.stderr)
                link = pathlib.Path(f"/run/skim-cluster-{self.name}/link").read_text()
                self.assertEqual(link.split(), [str(bits), str(nanoseconds)])
        done = self.cluster("shape", "10mbit", "8192")
        self.assertEqual((done.returncode, done.stderr), (1, "cluster: hosts with a latency have no burst: '8192'\n"))


class Places(unittest.TestCase):
    def setUp(self):
        self.environment = os.environ | {"SKIM_CLUSTER": "space" + "".join(random.choices(string.ascii_lowercase, k=3))}

    def usual(self, *once):
        there = cluster(*once, env=self.environment)
        if there.returncode:
            self.skipTest(f"no hosts here: {there.stderr.strip().splitlines()[-1]}")
        return sorted(there.stdout.split())

    def test_a_folder_with_a_space(self):
        once = ["once", "2", "none", "hostname"]
        hosts = self.usual(*once)
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "with a space")
            shutil.copytree(SCRIPT.parent, copy)
            done = cluster(*once, script=copy / "cluster", env=self.environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.split()), hosts)

    def test_clusters_that_come_and_go_beside_it(self):
        """ip then complains of namespaces that it lists."""
        once = ["once", "2", "none", "hostname"]
        hosts = self.usual(*once)
        with tempfile.TemporaryDirectory() as folder:
            ip = pathlib.Path(folder, "ip")
            ip.write_text('#!/bin/sh\n[ "$1 $2" != "netns list" ] || echo "Error: Peer netns reference is invalid." >&2\n'
                          f'exec {shutil.which("ip")} "$@"\n')
            ip.chmod(0o755)
            done = cluster(*once, env=self.environment | {"PATH": f"{folder}:{os.environ['PATH']}"})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(sorted(done.stdout.split()), hosts)

    def once_where(self, folder, options, *once, **environment):
        """once with a file system of its own for a folder, and for /run, where other clusters come and go meanwhile."""
        mount = f"mount -t tmpfs tmpfs /run && mount -t tmpfs -o {options} tmpfs {folder} && exec /bin/bash \"$@\""
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(SCRIPT), *once]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.environment | environment)

    def test_no_program_may_be_in_run(self):
        """Debian mounts it so."""
        once = ["once", "2", "none+1ms", "hostname"]
        hosts = self.usual(*once)
        with tempfile.TemporaryDirectory() as folder:
            done = self.once_where("/run", "nodev,nosuid,noexec", *once, TMPDIR=folder)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(sorted(done.stdout.split()), hosts)
            self.assertEqual(os.listdir(folder), [], "something is left")

    def test_no_program_may_be_among_temporary_files(self):
        self.usual("once", "2", "none", "hostname")
        with tempfile.TemporaryDirectory() as folder:
            for rate in "none", "none+1ms":
                with self.subTest(rate):
                    done = self.once_where(folder, "noexec", "once", "2", rate, "hostname", TMPDIR=folder)
                    self.assertEqual((done.returncode, done.stdout), (1, ""))
                    self.assertEqual(done.stderr, f"cluster: programs in {folder} cannot run, as on a disk mounted noexec; "
                                                  "TMPDIR names another folder for them\n")


if __name__ == "__main__":
    unittest.main()
