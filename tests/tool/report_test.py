"""skim report and --report: one HTML page of one run or several. A browser draws it, if there is one.

Needs SKIM_TOOL; SKIM_HAS_MPI=1 where the build has MPI; chromium for the class Drawn.
"""

import fcntl
import html.parser
import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import unittest
import zlib

from tool_test import HAS_MPI, LIMIT, TOOL, Case, lines, newest_in, skim, train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CASE = ["--model", "mlp-64", "--steps", 20, "--density", 0.05, "--eval-epochs", 0.1]


def record(step, run="r", **changed):
    """A step as --metrics writes it."""
    keys = ["loss", "density", "capture", "residual_norm", "step_ms", "compute_ms", "exposed_ms", "optimizer_ms",
            "select_ms", "exchange_ms", "apply_ms", "sent_bytes", "dense_bytes"]
    return {"run": run, "step": step, "skipped": False} | dict.fromkeys(keys, 1.0) | changed


def data_of(page):
    """What the page draws."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


class Element:
    def __init__(self, name, attributes, parent):
        self.name, self.attributes, self.parent = name, dict(attributes), parent
        self.children, self.text = [], ""

    def all(self, name, kind=None):
        """Those below with this name and class, in order."""
        found = []
        for child in self.children:
            if child.name == name and kind in (None, child.attributes.get("class")):
                found.append(child)
            found += child.all(name, kind)
        return found

    def words(self):
        return self.text + " ".join(child.words() for child in self.children)


class Tree(html.parser.HTMLParser):
    """The elements of a drawn page."""
    def __init__(self, text):
        super().__init__()
        self.at = self.root = Element("", [], None)
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        made = Element(tag, attributes, self.at)
        self.at.children.append(made)
        if tag not in ("meta", "br"):
            self.at = made

    def handle_endtag(self, tag):
        while self.at.parent is not None:
            ended, self.at = self.at, self.at.parent
            if ended.name == tag:
                return

    def handle_data(self, text):
        self.at.text += text


def points_of(path):
    """The numbers of points that a path of a chart joins."""
    return len(re.findall(r"[ML]", path.attributes["d"]))


class Pages(Case):
    def write(self, name, records):
        path = self.dir / name
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        return path

    def report(self, *files):
        out = self.dir / "page.html"
        self.assert_ok(skim("report", *files, "--out", out))
        return data_of(out.read_text())["runs"]

    def test_help_lists_it(self):
        self.assertRegex(skim("--help").stdout, r"\n  report +draw")
        done = skim("report", "--help")
        self.assert_ok(done)
        self.assertIn("--out FILE.html", done.stdout)
        for option in ("--report FILE.html", "--trace FILE.json", "--tensorboard DIR"):
            self.assertIn(option, skim("train", "--help").stdout)

    def test_the_page_has_what_the_file_recorded(self):
        metrics = self.dir / "m.jsonl"
        self.assert_ok(train(*CASE, "--compare", "dense,gtopk:0.01", "--metrics", metrics))
        runs = self.report(metrics)
        self.assertEqual([run["name"] for run in runs], ["dense", "gtopk:0.01"])
        for run in runs:
            recorded = [line for line in lines(metrics) if line["run"] == run["name"]]
            steps = [line for line in recorded if "sent_bytes" in line]
            points = run["points"]
            self.assertEqual(points["step"], list(range(1, 21)))
            for key in ("loss", "density", "capture", "residual_norm"):
                for drawn, line in zip(points[key], steps, strict=True):
                    self.assertAlmostEqual(drawn, line[key], delta=1e-6 * abs(line[key]))
            self.assertEqual(run["sent_bytes"], sum(line["sent_bytes"] for line in steps))
            self.assertAlmostEqual(points["seconds"][-1], sum(line["step_ms"] for line in steps) / 1e3, places=5)
            for part in ("compute", "select", "exchange", "apply", "exposed", "optimizer", "step"):
                mean = sum(line[f"{part}_ms"] for line in steps) / len(steps)
                self.assertAlmostEqual(run["means"][f"{part}_ms"], mean, delta=1e-6 * mean + 1e-9)
            evaluations = [line for line in recorded if "evaluation" in line]
            self.assertGreater(len(evaluations), 2)
            self.assertEqual([e["test_loss"] for e in run["evaluations"]], [e["test_loss"] for e in evaluations])

    def test_long_runs_are_drawn_by_means(self):
        for count in (1999, 2000, 2001, 9001):
            with self.subTest(count):
                losses = [1000.0 - i % 7 for i in range(count)]
                (run,) = self.report(self.write("m.jsonl", [record(i + 1, loss=loss) for i, loss in enumerate(losses)]))
                points, width = run["points"], run["steps_per_point"]
                self.assertEqual(len(points["loss"]), -(-count // width))
                self.assertLessEqual(len(points["loss"]), 2000)
                self.assertGreater(len(points["loss"]), 1000)
                for i, loss in enumerate(points["loss"]):
                    part = losses[i * width:(i + 1) * width]
                    self.assertAlmostEqual(loss, sum(part) / len(part), delta=1e-3)
                self.assertEqual(points["step"][-1], count)
                self.assertEqual(run["sent_bytes"], count)

    def test_skipped_steps_waits_and_decisions(self):
        records = [record(1), record(2, skipped=True, loss=None), record(3)]
        records += [{"run": "r", "step": 2, "waited_ms": [0.0, 30.0], "compared_ms": 100.0},
                    {"run": "r", "step": 3, "waited_ms": [5.0, 10.0], "compared_ms": 60.0}]
        records += [{"run": "r", "step": i, "bucket": 0, "n": 9, "decision": f"gtopk {i}"} for i in range(1, 211)]
        (run,) = self.report(self.write("m.jsonl", records))
        self.assertEqual(run["points"]["skipped"], [0, 1, 0])
        self.assertEqual(run["points"]["loss"], [1.0, None, 1.0])
        self.assertEqual((run["waited_ms"], run["compared_ms"]), ([5.0, 40.0], 160.0))
        self.assertEqual((len(run["decisions"]), run["left_out_decisions"]), (200, 10))
        self.assertEqual(run["decisions"][-1]["decision"], "gtopk 210")

    def test_runs_of_one_name_are_told_apart(self):
        one, other = self.write("a.jsonl", [record(1)]), self.write("b.jsonl", [record(1), record(1, run="s")])
        self.assertEqual([run["name"] for run in self.report(one, other)], [f"{one}: r", f"{other}: r", "s"])

    def test_an_incomplete_last_line_is_left_out(self):
        path = self.write("m.jsonl", [record(1), record(2)])
        path.write_text(path.read_text() + '{"run": "r", "st')
        self.assertEqual(self.report(path)[0]["points"]["step"], [1, 2])

    def test_names_cannot_become_elements(self):
        name = "</script><script>alert('x')</script>"
        path = self.write("m.jsonl", [record(1, run=name)])
        (run,) = self.report(path)
        self.assertEqual(run["name"], name)
        self.assertNotIn("alert", re.sub(r'<script type="application/json".*?</script>', "",
                                         (self.dir / "page.html").read_text(), flags=re.DOTALL))

    def test_a_name_cannot_reverse_the_text_around_it(self):
        for mark in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069":
            (run,) = self.report(self.write(f"{ord(mark)}.jsonl", [record(1, run=f"a{mark}b{mark}")]))
            self.assertEqual(run["name"], "a\ufffdb\ufffd")
            (self.dir / "page.html").unlink()
        (run,) = self.report(self.write("m.jsonl", [record(1, run="\u05d0\u03b1")]))
        self.assertEqual(run["name"], "\u05d0\u03b1")

    def test_wrong_input_is_refused(self):
        good = self.write("good.jsonl", [record(1)])
        out = ["--out", self.dir / "page.html"]
        no_loss = record(1)
        del no_loss["loss"]
        cases = {
            "none": ["cannot read", "No such file"],
            "text": ["text' line 1: not JSON", "skim train --metrics"],
            "middle": ["middle' line 2: not JSON"],
            "summary": ["summary' line 1: not an object with the key 'run'"],
            "no_loss": ["no_loss' line 2: not a record of --metrics", "loss"],
            "no_test_loss": ["no_test_loss' line 2: not a record of --metrics", "test_loss"],
            "no_words": ["no_words' line 2: not a record of --metrics", "must be string"],
            "no_command": ["no_command' line 1: not a record of --metrics", "must be string"],
            "empty": ["empty' has no steps"],
        }
        self.write("no_words", [record(1), {"run": "r", "step": 1, "bucket": 0, "n": 9, "decision": None}])
        self.write("no_command", [{"run": "r", "step": 0, "ranks": 1, "command": ["skim"]}, record(1)])
        self.write("no_test_loss", [record(1), {"run": "r", "evaluation": True, "step": 1, "train_loss": 1.0}])
        (self.dir / "text").write_text("hello\n")
        (self.dir / "middle").write_text(json.dumps(record(1)) + "\n{\n" + json.dumps(record(2)) + "\n")
        (self.dir / "summary").write_text("[]\n")
        (self.dir / "empty").write_text("")
        self.write("no_loss", [record(1), no_loss])
        for name, words in cases.items():
            self.assert_refused(skim("report", self.dir / name, *out), *words)
        self.assert_refused(skim("report", self.dir, *out), "cannot read", "Is a directory")
        self.assert_refused(skim("report", good, good, *out), "given twice")
        self.assert_refused(skim("report", good, "--out", good), "--out is a file to read")
        self.assert_refused(skim("report", good), "--out")
        self.assert_refused(skim("report", *out), "METRICS")
        self.assertFalse((self.dir / "page.html").exists())
        self.assert_refused(skim("report", good, "--out", self.dir / "none" / "page.html"), "--out: cannot write",
                            "No such file", status=1)

    def test_an_old_page_is_kept_beside(self):
        path, out = self.write("m.jsonl", [record(1)]), self.dir / "page.html"
        out.write_text("old")
        done = skim("report", path, "--out", out)
        self.assert_ok(done)
        self.assertIn("as 'page.html.~1~'", done.stderr)
        self.assertEqual((self.dir / "page.html.~1~").read_text(), "old")
        self.assertEqual(skim("report", path, "--out", "-").stdout, out.read_text())

    def test_a_link_stays_and_its_file_is_replaced(self):
        path, out = self.write("m.jsonl", [record(1)]), self.dir / "page.html"
        (self.dir / "pages").mkdir()
        out.symlink_to("pages/page.html")
        for kept in (0, 1):
            self.assert_ok(skim("report", path, "--out", out))
            self.assertEqual(os.readlink(out), "pages/page.html")
            self.assertEqual(len(list(out.resolve().parent.iterdir())), 1 + kept)
        self.assertEqual(skim("report", path, "--out", "-").stdout, out.read_text())

    def test_a_file_that_is_no_regular_one_is_written_and_stays(self):
        path, out = self.write("m.jsonl", [record(1)]), self.dir / "pipe"
        os.mkfifo(out)
        pipe = os.open(out, os.O_RDWR)  # so that no end waits for the other
        self.addCleanup(os.close, pipe)
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.assert_ok(skim("report", path, "--out", out))
        self.assertTrue(out.is_fifo())
        self.assertEqual(os.read(pipe, 1 << 20).decode(), skim("report", path, "--out", "-").stdout)

    def test_nothing_is_loaded(self):
        self.report(self.write("m.jsonl", [record(1)]))
        page = (self.dir / "page.html").read_text()
        self.assertIn("default-src 'none'", page)
        self.assertEqual(re.findall(r"\b(?:src|href|url|import)\s*[=(]", page), [])


class WhileTraining(Case):
    def test_the_page_is_the_one_of_skim_report(self):
        metrics, live, out = self.dir / "m.jsonl", self.dir / "live.html", self.dir / "page.html"
        live.write_text("old")
        self.assert_ok(train(*CASE, "--compare", "dense,gtopk:0.01", "--metrics", metrics, "--report", live))
        self.assert_ok(skim("report", metrics, "--out", out))
        self.assertEqual(live.read_text(), out.read_text())
        self.assertEqual((self.dir / "live.html.~1~").read_text(), "old")
        self.assertEqual({path.name for path in self.dir.glob("live*")}, {"live.html", "live.html.~1~"})

    def test_a_device_stays_one(self):
        null = self.dir / "null"
        try:
            os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            self.skipTest("needs root, to make a device")
        (self.dir / "link").symlink_to("null")
        for live in (null, self.dir / "link"):
            self.assert_ok(train(*CASE, "--report", live))
            self.assertTrue(null.is_char_device())
        self.assertEqual({path.name for path in self.dir.iterdir()}, {"null", "link"})

    def test_it_is_whole_and_grows_during_the_run(self):
        live = self.dir / "live.html"
        run = self.start("--model", "linear", "--steps", 10000000, "--eval-epochs", 0, "--report", live)

        def steps():
            runs = data_of(live.read_text())["runs"] if live.exists() else []
            return runs[0]["steps"] if runs else 0

        self.wait_until(run, lambda: steps() > 0, "no page with steps appeared")
        first = steps()
        self.assertTrue(data_of(live.read_text())["live"])
        self.wait_until(run, lambda: steps() > first, "the page did not grow")
        run.terminate()
        run.communicate(timeout=LIMIT)
        self.assertGreater(steps(), first)
        self.assertFalse(data_of(live.read_text())["live"])

    def test_a_resumed_run_has_all_of_its_steps(self):
        metrics, live = self.dir / "m.jsonl", self.dir / "live.html"
        case = [*CASE[:2], "--metrics", metrics, "--checkpoint", self.dir / "c", "--report", live]
        self.assert_ok(train(*case, "--steps", 8))
        done = train(*case, "--steps", 20, "--resume")
        self.assert_ok(done)
        self.assertNotIn("--report", done.stderr)
        (run,) = data_of(live.read_text())["runs"]
        self.assertEqual(run["points"]["step"], list(range(1, 21)))
        self.assertEqual([b["step"] for b in run["beginnings"]], [0, 8])

    def test_a_resumed_run_has_the_page_of_skim_report(self):
        """Its earlier process went on after the checkpoint."""
        metrics, live, folder, out = (self.dir / name for name in ("m.jsonl", "live.html", "c", "page.html"))
        case = [*CASE[:2], "--metrics", metrics, "--checkpoint", folder, "--report", live]
        self.assert_ok(train(*case, "--steps", 9, "--checkpoint-steps", 6))
        shutil.rmtree(newest_in(folder))
        self.assert_ok(train(*case, "--steps", 12, "--resume"))
        self.assert_ok(skim("report", metrics, "--out", out))
        self.assertEqual(data_of(live.read_text()), data_of(out.read_text()))

    def test_a_resumed_run_whose_metrics_have_no_step_yet(self):
        case = ["--model", "linear", "--checkpoint", self.dir / "c"]
        again = [*case, "--resume", "--metrics", self.dir / "m.jsonl", "--report", self.dir / "live.html"]
        self.assert_ok(train(*case, "--steps", 2))
        self.assert_ok(train(*again, "--steps", 2))
        self.assert_ok(train(*again, "--steps", 4))
        (run,) = data_of((self.dir / "live.html").read_text())["runs"]
        self.assertEqual(run["points"]["step"], [3, 4])

    def test_the_command_repeats_the_run(self):
        metrics, folder = self.dir / "m.jsonl", self.dir / "with 'quotes' and spaces"
        self.assert_ok(train(*CASE, "--metrics", metrics, "--checkpoint", folder))
        first = lines(metrics)
        self.assertEqual(first[0]["ranks"], 1)
        environment = {name: value for name, value in os.environ.items() if name != "SKIM_DATA"}
        again = subprocess.run(["sh", "-c", first[0]["command"].replace("skim train", shlex.quote(TOOL) + " train", 1)],
                               capture_output=True, text=True, timeout=LIMIT, env=environment)
        self.assert_ok(again)
        losses = [[line["loss"] for line in all_lines if "loss" in line] for all_lines in (first, lines(metrics))]
        self.assertEqual(len(losses[0]), 20)
        self.assertEqual(losses[0], losses[1])

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_waits_add_up_to_those_of_the_summary(self):
        metrics, summary = self.dir / "m.jsonl", self.dir / "s.json"
        self.assert_ok(train(*CASE, "--ranks", 2, "--metrics", metrics, "--summary", summary))
        compared = [line for line in lines(metrics) if "compared_ms" in line]
        (row,) = json.loads(summary.read_text())
        for rank in range(2):
            self.assertAlmostEqual(sum(line["waited_ms"][rank] for line in compared), row["waited_ms"][rank], places=6)
        self.assertAlmostEqual(sum(line["compared_ms"] for line in compared), row["compared_ms"], places=6)
        self.assertEqual(lines(metrics)[0]["ranks"], 2)


@unittest.skipUnless(CHROMIUM, "needs a browser: apt-get install chromium")
class Drawn(Case):
    def browse(self, page, *options):
        """(drawn elements, lines of the console)."""
        profile = self.dir / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--disable-sync", f"--user-data-dir={profile}",
             "--enable-logging=stderr", "--v=0", *options,
             f"file://{page}"], capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr)
        return Tree(done.stdout).root, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    def ground(self, page, *options):
        """The colour of the page's first pixel."""
        picture = self.dir / "page.png"
        self.browse(page, f"--screenshot={picture}", "--window-size=800,600", *options)
        raw = picture.read_bytes()
        self.assertEqual(raw[:8], b"\x89PNG\r\n\x1a\n")
        at, packed = 8, b""
        while at < len(raw):
            length = int.from_bytes(raw[at:at + 4], "big")
            if raw[at + 4:at + 8] == b"IDAT":
                packed += raw[at + 8:at + 8 + length]
            at += 12 + length
        return tuple(zlib.decompress(packed)[1:4])  # no filter changes the first pixel

    def page_of_two_runs(self):
        metrics, page = self.dir / "m.jsonl", self.dir / "page.html"
        self.assert_ok(train(*CASE, "--compare", "dense,gtopk:0.01", "--metrics", metrics, "--report", page))
        return page, lines(metrics)

    def test_every_step_and_every_name_is_drawn(self):
        page, recorded = self.page_of_two_runs()
        root, console = self.browse(page, "--dump-dom")
        self.assertEqual(console, [])
        charts = {figure.all("h3")[0].text: figure for figure in root.all("figure") if figure.all("h3")}
        losses = [f"Loss against {what}" for what in ("step", "bytes sent by rank 0", "seconds in steps")]
        self.assertLess(set(losses), set(charts))
        runs = ["dense", "gtopk:0.01"]
        evaluations = sum("evaluation" in line for line in recorded)
        for name in [*losses, "Density", "Captured fraction", "Residual norm of rank 0"]:
            with self.subTest(name):
                paths = [path for path in charts[name].all("path") if path.attributes["class"] == "curve"]
                self.assertEqual([path.attributes["data-run"] for path in paths], runs)
                self.assertEqual([points_of(path) for path in paths], [20, 20])
                self.assertNotIn("NaN", "".join(path.attributes["d"] for path in paths))
                for run in runs:
                    self.assertIn(run, charts[name].all("figcaption")[0].words())
                for axis in ("x-name", "y-name"):
                    self.assertEqual(len(charts[name].all("text", axis)), 1)
        for name in losses:
            self.assertEqual(len(charts[name].all("circle", "evaluation")), evaluations)
        words = root.words()
        for line in recorded:
            if "command" in line:
                self.assertIn(line["command"], words)
        for part in ("compute", "select", "exchange", "apply", "exposed", "optimizer"):
            self.assertIn(part, words)

    def test_a_skipped_step_is_a_gap_and_a_mark(self):
        metrics, page = self.dir / "m.jsonl", self.dir / "page.html"
        records = [record(i, skipped=i == 5, loss=None if i == 5 else 1.0 / i) for i in range(1, 9)]
        metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
        self.assert_ok(skim("report", metrics, "--out", page))
        root, console = self.browse(page, "--dump-dom")
        self.assertEqual(console, [])
        chart = root.all("figure")[0]
        (path,) = chart.all("path")
        self.assertEqual(points_of(path), 7)
        self.assertEqual(path.attributes["d"].count("M"), 2)
        self.assertEqual(len(chart.all("circle", "skipped")), 1)
        self.assertIn("1 of 8 steps were skipped", root.words())

    def test_a_run_without_a_step_does_not_hide_the_others(self):
        metrics, page = self.dir / "m.jsonl", self.dir / "page.html"
        begins = {"run": "refused", "step": 0, "ranks": 2, "model": "linear", "data": "generated", "version": "0.1.0",
                  "command": "skim train"}
        metrics.write_text("".join(json.dumps(one) + "\n" for one in [*(record(i) for i in range(1, 5)), begins]))
        self.assert_ok(skim("report", metrics, "--out", page))
        root, console = self.browse(page, "--dump-dom")
        self.assertEqual(console, [])
        self.assertEqual([points_of(path) for path in root.all("figure")[0].all("path")][:1], [4])

    def test_long_names_stay_inside_a_narrow_page(self):
        metrics, page = self.dir / "m.jsonl", self.dir / "page.html"
        metrics.write_text(json.dumps(record(1, run="long" * 30)) + "\n")
        self.assert_ok(skim("report", metrics, "--out", page))
        measured = "<script>document.title = document.documentElement.scrollWidth <= innerWidth;</script></body>"
        page.write_text(page.read_text().replace("</body>", measured))
        root, console = self.browse(page, "--dump-dom", "--window-size=600,800")
        self.assertEqual((root.all("title")[0].text, console), ("true", []))

    def test_both_colour_schemes(self):
        page, _ = self.page_of_two_runs()
        light = self.ground(page, "--blink-settings=preferredColorScheme=1")
        dark = self.ground(page, "--blink-settings=preferredColorScheme=0")
        self.assertGreater(min(light), 200)
        self.assertLess(max(dark), 60)

    def test_a_pointer_reads_out_the_nearest_step_of_each_run(self):
        page, recorded = self.page_of_two_runs()
        pointed = """<script>
            const svg = document.querySelector('svg'), box = svg.getBoundingClientRect();
            svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 23, clientY: box.top + 50}));
            </script></body>"""
        page.write_text(page.read_text().replace("</body>", pointed))
        root, console = self.browse(page, "--dump-dom")
        self.assertEqual(console, [])
        readout = root.all("figure")[0].all("div", "readout")[0]
        self.assertIn("visibility: visible", readout.attributes["style"])
        words = readout.words()
        for run in ("dense", "gtopk:0.01"):
            of_run = [line for line in recorded if line["run"] == run]
            loss = [line["loss"] for line in of_run if "sent_bytes" in line][-1]
            self.assertIn(f"{run}: {float(f'{loss:.4g}'):g} at step 20", words)

    def test_a_request_of_the_page_would_be_seen(self):
        """So an empty console means: no error, and no request."""
        page, _ = self.page_of_two_runs()
        other = self.dir / "other.html"
        for script in ("fetch('https://example.invalid/')", "missing()"):
            other.write_text(page.read_text().replace("'use strict';", f"'use strict';\n{script};"))
            _, console = self.browse(other, "--dump-dom")
            self.assertNotEqual(console, [], script)


if __name__ == "__main__":
    unittest.main()
