"""skim inspect and its pictures, as a person or a script uses them.

Needs SKIM_TOOL (the binary); SKIM_HAS_MPI=1 where the build has MPI; SKIM_PYTHON, the Python that draws.
"""

import json
import math
import os
import pathlib
import random
import struct
import subprocess
import unittest

from tool_test import HAS_MPI, LIMIT, SMALL, Case, skim

ROOT = pathlib.Path(__file__).parents[2]
PLOTS = ROOT / "tools/plots/plots.py"
FIGURES = ROOT / "studies/figures.py"
PYTHON = os.environ["SKIM_PYTHON"]
CAN_DRAW = subprocess.run([PYTHON, "-c", "import matplotlib"], capture_output=True).returncode == 0 \
    if os.path.exists(PYTHON) else False
PICTURES = {"cumulative.png", "histograms.png", "ratio.png", "selectors.png"}


def npy(path, values, descr="<f4", version=1, shape=None, cut=0):
    """A file as numpy.save writes it, less its last `cut` bytes."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape or f'({len(values)},)'}, }}"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    code = {"2": "e", "4": "f", "8": "d"}.get(descr[-1], "f")
    body = struct.pack(f"{descr[0] if descr[0] in '<>' else '<'}{len(values)}{code}", *values)
    whole = b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + body
    path.write_bytes(whole[:len(whole) - cut])
    return path


def inspect(*arguments):
    return skim("inspect", "--pictures", "none", *arguments)


def result(folder):
    return json.loads((folder / "inspect.json").read_text())


class Files(Case):
    def test_what_is_measured_is_what_its_name_says(self):
        rng = random.Random(1)
        u = [round(rng.gauss(0, 1) * 64) / 64 for _ in range(1000)]  # the same in all three types
        path = npy(self.dir / "u.npy", u)
        self.assert_ok(inspect("--npy", path, "--density", 0.05, "--bins", 11, "--out", self.dir))
        found = result(self.dir)
        self.assertEqual(found["source"], "npy")
        m = found["records"][0]["model"]
        self.assertEqual((m["n"], m["k"]), (1000, 50))
        squares = sorted((v * v for v in u), reverse=True)
        self.assertAlmostEqual(m["ratio"], sum(squares[50:]) / sum(squares), places=12)
        mean = sum(u) / 1000
        central = [sum((v - mean) ** p for v in u) / 1000 for p in range(5)]
        self.assertAlmostEqual(m["mean"], mean, places=12)
        self.assertAlmostEqual(m["std"], math.sqrt(central[2]), places=12)
        self.assertAlmostEqual(m["skewness"], central[3] / central[2] ** 1.5, places=9)
        self.assertAlmostEqual(m["excess_kurtosis"], central[4] / central[2] ** 2 - 3, places=9)
        self.assertAlmostEqual(m["general_bound"], 0.95, places=12)
        self.assertAlmostEqual(m["bell_bound"], 0.9025, places=12)
        self.assertAlmostEqual(m["unimodal_bound"], 0.857375, places=12)
        self.assertAlmostEqual(m["laplace_ratio"], 0.575853, places=6)
        h = m["histogram"]
        self.assertEqual(len(h["count"]), 11)
        self.assertEqual(h["below"] + sum(h["count"]) + h["above"], 1000)
        self.assertAlmostEqual(h["high"], 5 * m["std"], places=9)
        self.assertEqual(h["low"], -h["high"])
        below = [h["below"] + sum(h["count"][:b]) for b in range(12)]
        self.assertEqual([round(1000 * c) for c in m["cumulative"]], below)
        selectors = {s["name"]: s for s in m["selectors"]}
        exact = selectors["exact"]
        self.assertEqual(exact["selected"], 50)
        self.assertAlmostEqual(exact["threshold"], math.sqrt(squares[49]), places=6)
        self.assertAlmostEqual(exact["ratio"], m["ratio"], places=9)
        self.assertGreater(len(selectors), 5)

    def test_types_and_versions_give_the_same(self):
        u = [0.5, -2.0, 3.0, 0.0, 1.0, -0.25, 8.0, 0.125]
        files = [npy(self.dir / f"{d[1:]}-{v}.npy", u, d, v)
                 for d in ["<f2", "<f4", "<f8"] for v in [1, 2, 3]]
        self.assert_ok(inspect("--npy", *files, "--density", 0.25, "--out", self.dir))
        records = result(self.dir)["records"]
        self.assertEqual([r["file"] for r in records], [str(f) for f in files])
        for r in records:
            self.assertEqual(r["model"]["ratio"], records[0]["model"]["ratio"])
            self.assertEqual(r["model"]["histogram"], records[0]["model"]["histogram"])

    def test_bad_files_are_refused_in_one_line(self):
        u = [1.0, 2.0, 3.0]
        bad = self.dir / "bad.npy"

        def refused(*words):
            done = inspect("--npy", bad, "--density", 0.5, "--out", self.dir)
            self.assert_refused(done, "bad.npy", *words)
        refused("No such file")
        bad.write_bytes(b"")
        refused("NUMPY")
        bad.write_text("1.0 2.0 3.0 4.0")
        refused("NUMPY")
        whole = npy(bad, u).read_bytes()
        for size in [7, 9, 20, 60]:
            bad.write_bytes(whole[:size])
            refused("NUMPY" if size == 7 else "header")
        npy(bad, u, cut=1)
        refused("12 bytes", "got 11")
        bad.write_bytes(whole + b"x")
        refused("12 bytes", "got 13")
        npy(bad, u, version=4)
        refused("version 4")
        for descr in [">f4", "<i4", "|b1", "<c8"]:
            npy(bad, u, descr)
            refused(descr, "<f4")
        for shape in ["()", "(3, 1)", "(0,)", "(-3,)", "(99999999999999999999,)"]:
            npy(bad, u, shape=shape)
            refused("expected")
        npy(bad, u, "<" + 2_000_000 * "4", version=2)  # which a regular expression would take a stack for
        refused("a header of 2000055 bytes, expected at most 10000")
        npy(bad, [1.0, math.nan])
        refused("NaN")
        npy(bad, [1.0, 1e300], "<f8")  # infinity as float32
        refused("infinity")
        bad.unlink()
        bad.mkdir()
        refused("directory")
        self.assertFalse((self.dir / "inspect.json").exists())

    def test_an_old_result_is_kept_beside(self):
        path = npy(self.dir / "u.npy", [1.0, 2.0, 3.0, 4.0])
        (self.dir / "inspect.json").write_text("old")
        done = inspect("--npy", path, "--density", 0.5, "--out", self.dir)
        self.assert_ok(done)
        self.assertIn("--out: kept the old", done.stderr)
        self.assertEqual((self.dir / "inspect.json.~1~").read_text(), "old")
        self.assertEqual(result(self.dir)["records"][0]["model"]["k"], 2)

    @unittest.skipUnless(CAN_DRAW, "no matplotlib")
    def test_pictures(self):
        path = npy(self.dir / "u.npy", [random.Random(2).gauss(0, 1) for _ in range(100)])
        for form, start in [("png", b"\x89PNG"), ("svg", b"<?xml")]:
            out = self.dir / form
            self.assert_ok(skim("inspect", "--npy", path, "--density", 0.1, "--out", out,
                                "--pictures", form))
            for name in PICTURES:
                self.assertTrue((out / name).with_suffix("." + form).read_bytes().startswith(start))


class Training(Case):
    @unittest.skipUnless(CAN_DRAW, "no matplotlib")
    def test_pictures_of_a_density_that_is_a_rule(self):
        done = skim("inspect", *self.MLP, "--density", "capture=0.9", "--every", 2, "--out", self.dir / "i")
        self.assert_ok(done)
        self.assertNotIn("no pictures", done.stdout + done.stderr)
        self.assertTrue(PICTURES <= {path.name for path in (self.dir / "i").iterdir()})

    MLP = ["--model", "mlp", "--density", "0.01", "--steps", "4", *SMALL]

    def test_records_of_a_run_and_the_run_is_the_same_as_without(self):
        ranks = ["--ranks", 2] if HAS_MPI else []
        for name in "u-2.npy", "selected-4-0.frame":
            (self.dir / name).write_text("old")
        done = inspect(*self.MLP, *ranks, "--every", 2, "--out", self.dir, "--save", "--save-frames", "--summary",
                       self.dir / "inspected.json")
        self.assert_ok(done)
        for option, name in ("--save", "u-2.npy"), ("--save-frames", "selected-4-0.frame"):
            self.assertIn(f"skim: {option}: kept the old '{self.dir / name}' as '{name}.~1~'", done.stderr)
            self.assertEqual((self.dir / f"{name}.~1~").read_text(), "old")
        self.assertIn("(1 - k/d)^2", done.stdout)
        self.assert_ok(skim("train", *self.MLP, *ranks, "--summary", self.dir / "plain.json"))
        inspected, plain = (json.loads((self.dir / f"{name}.json").read_text())[0]
                            for name in ["inspected", "plain"])
        for key in ["train_loss", "test_loss", "test_accuracy", "sent_bytes_per_step"]:
            self.assertEqual(inspected[key], plain[key])

        found = result(self.dir)
        self.assertEqual((found["source"], found["model"], found["density"]), ("training", "mlp", 0.01))
        self.assertEqual([r["step"] for r in found["records"]], [1, 2, 4])
        for r in found["records"]:
            model, parameters = r["model"], r["parameters"]
            self.assertEqual(model["n"], plain["parameters"])
            self.assertEqual(model["k"], math.floor(0.01 * model["n"]))
            self.assertEqual(sum(p["n"] for p in parameters), model["n"])
            self.assertEqual(len({p["name"] for p in parameters}), len(parameters))
            for p in [model, *parameters]:
                self.assertEqual(p["histogram"]["below"] + sum(p["histogram"]["count"]) +
                                 p["histogram"]["above"], p["n"])
                exact = next(s for s in p["selectors"] if s["name"] == "exact")
                self.assertLessEqual(exact["selected"], p["k"])
                self.assertAlmostEqual(exact["ratio"], p["ratio"], places=6)
            # All of u is in the parameters: energies add up.
            energy = [p["n"] * (p["std"] ** 2 + p["mean"] ** 2) for p in [model, *parameters]]
            self.assertAlmostEqual(sum(energy[1:]) / energy[0], 1.0, places=9)
        # What was saved is what was measured.
        files = [self.dir / f"u-{r['step']}.npy" for r in found["records"]]
        self.assert_ok(inspect("--npy", *files, "--density", 0.01, "--out", self.dir / "again"))
        for saved, r in zip(result(self.dir / "again")["records"], found["records"]):
            for key in ["n", "k", "mean", "std", "ratio", "histogram", "cumulative"]:
                self.assertEqual(saved["model"][key], r["model"][key])
        # u is residual + gradient: what was not sent comes again.
        first, last = found["records"][0]["model"], found["records"][-1]["model"]
        self.assertGreater(last["std"], first["std"])

    def test_without_feedback_and_with_several_buckets(self):
        done = inspect(*self.MLP, "--no-feedback", "--exchange", "allgather", "--bucket-mb", 0.1,
                       "--dense-below", 0, "--every", 3, "--out", self.dir)
        self.assert_ok(done)
        records = result(self.dir)["records"]
        self.assertEqual([r["step"] for r in records], [1, 3])
        self.assertEqual(sum(p["n"] for p in records[0]["parameters"]), records[0]["model"]["n"])

    def test_what_cannot_be_inspected(self):
        out = ["--out", self.dir / "none"]
        self.assert_refused(inspect(*self.MLP, *out, "--exchange", "dense"), "dense")
        self.assert_refused(inspect(*self.MLP, *out, "--density", "1"), "dense")
        self.assert_refused(inspect(*self.MLP, *out, "--compare", "allgather,gtopk"), "--compare")
        self.assert_refused(inspect(*self.MLP, *out, "--every", "0"), "--every", "> 0")
        self.assert_refused(inspect(*self.MLP, *out, "--pictures", "gif"), "gif", "png")
        self.assertFalse((self.dir / "none").exists())
        blocked = self.dir / "file"
        blocked.write_text("")
        self.assert_refused(inspect(*self.MLP, "--out", blocked / "deeper"), "--out: cannot make", "give another folder")

    def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(self):
        folder = self.dir / "read-only"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            self.skipTest("needs root, to mount a folder that cannot be written")
        self.addCleanup(subprocess.run, ["umount", folder], check=True)
        done = inspect(*self.MLP, "--out", folder)
        self.assert_refused(done, "--out: cannot write to", "Read-only file system", "give another folder")
        self.assertNotIn("train loss", done.stdout)


@unittest.skipUnless(CAN_DRAW, "no matplotlib")
class Plots(Case):
    def plot(self, *arguments, script=PLOTS):
        return subprocess.run([PYTHON, script, *map(str, arguments)], capture_output=True, text=True,
                              timeout=LIMIT)

    def test_curves_of_runs(self):
        metrics, summary = self.dir / "m.jsonl", self.dir / "s.json"
        self.assert_ok(skim("train", *SMALL, "--model", "linear", "--epochs", 2, "--dense-below", 0,
                            "--compare", "dense,gtopk:0.01", "--metrics", metrics,
                            "--summary", summary))
        for command in ["curves", "entries"]:
            for y in ["accuracy", "test-loss", "train-loss"]:
                out = self.dir / f"{command}-{y}.svg"
                self.assert_ok(self.plot(command, f"{metrics}=A", "--y", y, "--out", out))
                text = out.read_text()
                self.assertIn("A dense", text)
                self.assertIn("A gtopk:0.01", text)
        self.assert_ok(self.plot("sensitivity", summary, "--out", self.dir / "f.svg"))
        self.assertIn("dense", (self.dir / "f.svg").read_text())
        metrics.write_text(metrics.read_text() + '{"run": "dense", "st')
        self.assert_ok(self.plot("curves", metrics, "--out", self.dir / "x.png"))
        broken = self.dir / "broken.jsonl"
        for text in ("[]\n", '{"step": 1}\n'):
            broken.write_text(text)
            self.assert_refused(self.plot("curves", broken, "--out", self.dir / "x.png"), "line 1", "'run'", status=1)
        broken.write_text('{"run": ')
        self.assert_refused(self.plot("curves", broken, "--out", self.dir / "x.png"), "line 1", status=1)
        self.assert_refused(self.plot("curves", self.dir / "none", "--out", "x.png"), "none", status=1)

    def test_times(self):
        cases = [{"select": rule, "n": n, "k": n // 1000, "shape": "normal", "ns": n * factor,
                  "add_pass_ns": n, "ratio": factor}
                 for rule, factor in [("exact", 1.25), ("gaussian", 2.0), ("dgc", 3.0)]
                 for n in [2**18, 2**22, 2**26]]
        bench = self.dir / "bench.json"
        bench.write_text(json.dumps(cases))
        for command, script in [("select-time", PLOTS), ("iteration-time", FIGURES)]:
            out = self.dir / f"{command}.svg"
            self.assert_ok(self.plot(command, bench, "--out", out, script=script))
            for word in ["exact", "gaussian", "dgc"]:
                self.assertIn(word, out.read_text())
            self.assert_refused(self.plot(command, bench, "--density", 0.1, "--out", out, script=script),
                                "density", status=1)
            self.assert_refused(self.plot(command, bench, "--select", "magic", "--out", out, script=script),
                                "magic", status=1)
        # The same cases with two threads: which, is for the caller to say.
        both = self.dir / "both.json"
        both.write_text(json.dumps([{**c, "threads": t, "ns": c["ns"] // t} for c in cases for t in [1, 2]]))
        self.assert_refused(self.plot("select-time", both, "--out", out), "--where", "threads", status=1)
        self.assert_ok(self.plot("select-time", both, "--where", "threads=2", "--out", out))


if __name__ == "__main__":
    unittest.main()
