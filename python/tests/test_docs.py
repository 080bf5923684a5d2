"""The pages' programs run and print what the pages say. So do the parts of programs (page_parts.py)."""

import contextlib
import importlib.util
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import skim

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from blocks import block, blocks, commands  # noqa: E402

PAGES = ["README.md", "CONTRIBUTING.md", "studies/README.md",
         *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
RUN = {"script", "command", "file", "part"}
# Blocks that other tests run, or hold against files that are built and run.
RUN_ELSEWHERE = {("docs/python.md", "python"): "Page, below", ("docs/library.md", "cpp"): "tests/readme_test.py"}
NOT_CODE = {"text", "", "{toctree}", "{eval-rst}"}
PROGRAMS = {".", "apt-get", "auditwheel", "cd", "cmake", "cp", "ctest", "export", "mkdir", "mpirun", "pip", "python",
            "python3", "srun", "sudo", "torchrun"}
PARTS = str(ROOT / "python/tests/page_parts.py")
HAS_TORCH, HAS_MATPLOTLIB = (importlib.util.find_spec(name) is not None for name in ("torch", "matplotlib"))
if HAS_TORCH:
    import torch


def program(page, name):
    return compile(block(page, "script", name), page, "exec")


def output_of(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


class Page(unittest.TestCase):
    def test_runs_as_it_says(self):
        text = "\n".join(one.text for one in blocks("docs/python.md") if one.language == "python")
        expected = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
        self.assertEqual(len(expected), text.count("print("))
        self.assertEqual(output_of(compile(text, "docs/python.md", "exec")).splitlines(), expected)


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Contracts(unittest.TestCase):
    def test_published_local_steps_have_the_options_of_the_page(self):
        section = (ROOT / "docs/pytorch.md").read_text().split("\n## Local steps\n")[1].split("\n## ")[0]
        options = re.findall(r"\| `(every=.*)` \|", section)
        self.assertEqual(len(options), 4)
        contract = " ".join(skim.LocalSteps.__doc__.split())
        for text in options:
            self.assertIn(text, contract)


class Programs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def started(self, *command, **environment):
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def printed(self, page, name):
        """What a page's program prints when it is started as the page says."""
        (self.folder / f"{name}.py").write_text(block(page, "script", name))
        found = []
        for program, *arguments in commands(block(page, "command", name)):
            self.assertEqual(program, "torchrun")
            found.append(self.started(sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments))
        return "".join(found)

    def assert_close(self, printed, shown, within=0.02):
        """The words are the same. Numbers may differ a little, as processors do."""
        number = r"\d+(?:\.\d+)?"
        self.assertEqual(re.sub(number, "#", printed), re.sub(number, "#", shown))
        for a, b in zip(re.findall(number, printed), re.findall(number, shown), strict=True):
            self.assertLess(abs(float(a) - float(b)), within * max(1.0, float(b)), f"{printed}\nis not\n{shown}")

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_first(self):
        page = "docs/start-pytorch.md"
        losses, report = self.printed(page, "first").split("skim: ")
        shown_losses, shown_report = block(page, "output", "first").split("skim: ")
        self.assert_close(losses, shown_losses)
        sent, shown = (re.search(r".* times less than dense", text)[0] for text in (report, shown_report))
        self.assert_close(sent, shown)

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_resume(self):
        page = "docs/how-to/resume.md"
        self.assert_close(self.printed(page, "resume"), block(page, "output", "resume"), within=1e-3)
        # The same steps without an interruption end with the same bits.
        resumed = torch.load(self.folder / "shared.pt")["model"]
        (self.folder / "shared.pt").unlink()
        whole = block(page, "script", "resume").replace("first + 20", "first + 40")
        (self.folder / "whole.py").write_text(whole)
        self.started(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "whole.py")
        self.assertIn("first + 40", whole)
        for name, value in torch.load(self.folder / "shared.pt")["model"].items():
            self.assertTrue(torch.equal(value, resumed[name]), name)

    def test_density(self):
        page = "docs/how-to/density.md"
        self.assertEqual(output_of(program(page, "density")), block(page, "output", "density"))

    @unittest.skipUnless(HAS_MATPLOTLIB, "matplotlib is not installed")
    def test_concepts(self):
        """The pictures are drawn, by the run that the page's numbers are of."""
        page = "docs/concepts.md"
        (words,) = commands(block(page, "command", "concepts"))
        self.assertEqual(words[0], ".venv/bin/python")
        words[0], words[1], words[-1] = sys.executable, ROOT / words[1], self.folder
        printed = self.started(*words).replace(str(self.folder), "docs/figures")
        self.assert_close(printed, block(page, "output", "concepts"))
        for figure in self.folder.iterdir():
            self.assertTrue((ROOT / "docs/figures" / figure.name).exists(), figure.name)

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_job_of_slurm(self):
        """With stand-ins: srun runs its command once for each node, at once, and scontrol names this host."""
        stand_ins = {
            "scontrol": "echo localhost; echo elsewhere",
            "srun": 'for node in $(seq "$SLURM_NNODES"); do "$@" & done; wait -n && wait -n',
            "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        }
        for name, text in stand_ins.items():
            (self.folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.folder / name).chmod(0o755)
        (self.folder / "train.py").write_text(block("docs/start-pytorch.md", "script", "first"))
        (self.folder / "job.sh").write_text(block("docs/how-to/slurm.md", "script", "job"))
        out = self.started("bash", "job.sh", PATH=f"{self.folder}:{os.environ['PATH']}", SLURM_NNODES="2",
                           SLURM_JOB_ID="17", SLURM_JOB_NODELIST="host[1-2]")
        self.assertIn("skim: rank 0 of 2, 1000 steps", out)


def untrue_in_shell(text):
    """Programs that are not there, and options that the tool does not have."""
    wrong = []
    options = set(re.findall(r"--[\w-]+", (ROOT / "docs/tool.md").read_text()))
    of_cmake = set(re.findall(r"option\((SKIM_\w+)", (ROOT / "CMakeLists.txt").read_text()))
    for program, *arguments in commands(text):
        if program in ("for", "done"):
            continue
        is_tool = program in ("skim", "build/release/skim")
        is_file = "/" in program and (program.startswith((".venv/", "build/", "~/")) or (ROOT / program).exists())
        if not (is_tool or is_file or program in PROGRAMS):
            wrong.append(program)
        if is_tool:
            wrong += [one for one in arguments if one.startswith("--") and one.partition("=")[0] not in options]
        wrong += [one for one in arguments if one.startswith("-DSKIM_") and one[2:].partition("=")[0] not in of_cmake]
        of_tree = r"(studies|examples|scripts|tests)/[\w./-]+\.(py|cpp|sh|jsonl)"
        wrong += [one for one in arguments if re.fullmatch(of_tree, one) and not (ROOT / one).exists()]
    return wrong


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Parts(unittest.TestCase):
    """Parts of programs, each with what it takes for granted, on two ranks."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def start(self, *command):
        started = subprocess.Popen([sys.executable, *command], cwd=self.folder, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.addCleanup(started.communicate)
        self.addCleanup(started.kill)
        return started

    def assert_ran(self, page, started, times):
        names = [one.name for one in blocks(page) if one.kind == "part"]
        out, err = started.communicate(timeout=300)
        self.assertEqual(started.returncode, 0, out + err)
        self.assertGreater(len(names), 0)
        for name in names:
            self.assertEqual(len(re.findall(f"ran {name}\\b", out)), times, out)

    def test_one_after_another(self):
        for page in ("README.md", "docs/pytorch.md"):
            with self.subTest(page):
                launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
                self.assert_ran(page, self.start(*launcher, PARTS, page), 2)

    def test_elastic(self):
        store = self.start("-m", "skim.store", "0")
        address = "localhost:" + re.search(r"port (\d+)", store.stdout.readline())[1]
        for rank in [self.start(PARTS, "docs/elastic.md", address) for _ in range(2)]:
            self.assert_ran("docs/elastic.md", rank, 1)


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Docstrings(unittest.TestCase):
    def test_every_public_method_has_one(self):
        from skim import _report, ddp, dry_run, fsdp

        classes = [
            ddp.DdpCompression, fsdp.FsdpCompression, skim.Aggregator, dry_run.DryRun, _report.Report, _report.BucketReport,
        ]  # fmt: skip
        without = [
            f"{c.__name__}.{name}"
            for c in classes
            for base in c.__mro__[:-1]
            for name, value in vars(base).items()
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)) and not value.__doc__
        ]
        self.assertEqual(without, [])


class Blocks(unittest.TestCase):
    """Every block is run by a test, or shows what is printed. Long commands use only what is there."""

    def test_every_block(self):
        wrong, seen = [], 0
        for one in (one for page in PAGES for one in blocks(page)):
            page = one.where.partition(":")[0]
            if one.kind in RUN or one.language in NOT_CODE or (page, one.language) in RUN_ELSEWHERE:
                continue
            found = untrue_in_shell(one.text) if one.language == "sh" else [f"no test runs this '{one.language}'"]
            wrong += [f"{one.where}: {what}" for what in found]
            seen += 1
        self.assertEqual(wrong, [])
        self.assertGreater(seen, 50)

    def test_it_can_fail(self):
        self.assertEqual(untrue_in_shell(
            "A=1 skim train --ranks 2 --none 3 # --no\nnobody --x\nstudies/none.py \\\n  a\ncmake -DSKIM_NO=1"),
            ["--none", "nobody", "studies/none.py", "-DSKIM_NO=1"])

    def test_every_program_has_a_test(self):
        """A marked block is named by a test."""
        tests = "".join((ROOT / path).read_text() for path in (
            "python/tests/test_docs.py", "python/tests/page_parts.py", "python/tests/test_integrations.py",
            "tests/tool/page_test.py", "tests/start_page_test.py"))
        for one in (one for page in PAGES for one in blocks(page) if one.kind):
            self.assertIn(f'"{one.name}"', tests, one.where)


if __name__ == "__main__":
    unittest.main()
