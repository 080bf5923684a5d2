"""The live line on a terminal that is made narrower while the line stands. A small terminal is part of this file.

Needs SKIM_TOOL; SKIM_HAS_MPI=1 where the build has MPI.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import unittest

from tool_test import FOR_MPIRUN, HAS_MPI, LIMIT, SMALL, TOOL, Case, lines, pids_of

LIVE = re.compile(r"step (\d+)/\d+")


class Screen:
    """A terminal and all that has left it at the top.

    A line that was wrapped is one line here. If the window gets narrower, a terminal that reflows wraps lines that are
    too long (VTE, kitty, Windows Terminal, tmux). The others cut them (xterm, Linux console).
    """

    def __init__(self, columns, reflows):
        self.columns, self.reflows = columns, reflows
        self.lines, self.line, self.column = [""], 0, 0  # the cursor is in a line, after so many letters
        self.wraps = True
        self.is_full = False  # the cursor stands on the last column, behind the letter there
        self.rest = ""  # of a sequence that has begun

    def text(self):
        return "\n".join(self.lines)

    def rows(self, line):
        return [line[i:i + self.columns] for i in range(0, max(len(line), 1), self.columns)]

    def row(self):
        """The cursor's, within its line."""
        return (self.column - self.is_full) // self.columns

    def resize(self, columns):
        if not self.reflows:
            first = sum(len(self.rows(line)) for line in self.lines[:self.line])
            self.line, self.column = first + self.row(), self.column - self.row() * self.columns
            self.lines = [row[:columns] for line in self.lines for row in self.rows(line)]
            self.column = min(self.column, columns - 1)
        self.columns, self.is_full = columns, False

    def feed(self, text):
        text = self.rest + text
        while text:
            found = re.match(r"\x1b\[(\?7)?([A-Za-z])|[^\x1b]", text)
            if not found:
                break  # the other part follows
            text = text[found.end():]
            self.take(found[0])
        self.rest = text
        if len(text) > 5:
            raise ValueError(f"a sequence that it does not know: {text!r}")

    def take(self, one):
        before, behind = self.lines[self.line][:self.column], self.lines[self.line][self.column:]
        row = self.row()
        if one == "\r":
            self.column = row * self.columns
        elif one == "\n":
            self.column -= row * self.columns
            if row + 1 < len(self.rows(self.lines[self.line])):
                self.column += (row + 1) * self.columns
            else:
                self.line += 1
                self.lines += [""] * (self.line == len(self.lines))
        elif one == "\x1b[J":
            self.lines[self.line:] = [before]
        elif one == "\x1b[K":
            in_row = (row + 1) * self.columns - self.column
            self.lines[self.line] = (before + " " * in_row + behind[in_row:]).rstrip()
        elif one in ("\x1b[?7h", "\x1b[?7l"):
            self.wraps = one[-1] == "h"
            return
        elif one >= " ":
            if self.is_full and not self.wraps:
                self.column -= 1
            line = self.lines[self.line].ljust(self.column)
            self.lines[self.line] = line[:self.column] + one + line[self.column + 1:]
            self.column += 1
            self.is_full = self.column % self.columns == 0
            return
        else:
            raise ValueError(f"it does not know {one!r}")
        self.is_full = False


class TheModel(unittest.TestCase):
    def test_what_narrower_windows_do_to_a_line(self):
        for reflows, rows in (True, ["abcd", "efgh", "ij"]), (False, ["abcd"]):
            screen = Screen(12, reflows)
            screen.feed("abcdefghij")
            screen.resize(4)
            self.assertEqual(screen.rows(screen.lines[0]), rows)
            screen.feed("\r\x1b[Kx\r\n")  # how a line is drawn anew where nothing was wrapped
            self.assertEqual(screen.lines, ["abcdefghx", ""] if reflows else ["x", ""])

    def test_letters_at_the_end_of_a_row(self):
        for text, expected in [("abcd\r\nx", ["abcd", "x"]), ("abcdx\r\ny", ["abcdx", "y"]), ("abcd\rx", ["xbcd"]),
                               ("abcdx\ry", ["abcdy"]), ("\x1b[?7labcdefg\r\n\x1b[?7hx", ["abcg", "x"]),
                               ("abcdx\rab\x1b[J", ["abcdab"])]:
            screen = Screen(4, True)
            for letter in text:
                screen.feed(letter)
            self.assertEqual(screen.lines, expected, text)


class Live(Case):
    def start_on_terminal(self, columns, reflows, *arguments, term="xterm"):
        """Standard output and standard error are the terminal."""
        self.master, slave = pty.openpty()
        self.addCleanup(os.close, self.master)
        self.screen = Screen(columns, reflows)
        self.resize(columns)
        self.run_ = subprocess.Popen([TOOL, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
                                     env=dict(os.environ, TMPDIR=str(self.dir), TERM=term))
        os.close(slave)
        self.addCleanup(self.run_.kill)

    def resize(self, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.screen.resize(columns)

    def read(self):
        """What the run has drawn next. False: it has ended."""
        if not select.select([self.master], [], [], LIMIT)[0]:
            self.fail(f"nothing was drawn in {LIMIT} s")
        try:
            text = os.read(self.master, 1 << 16)
        except OSError:  # nobody has the terminal any more
            return False
        self.screen.feed(text.decode())
        return text != b""

    def step(self):
        """Of the live line; 0: none stands there, or not all of it was read. It is the only one."""
        found = LIVE.findall(self.screen.text())
        self.assertLessEqual(len(found), 1, self.screen.text())
        if self.screen.column > 0 or not LIVE.search(self.screen.lines[self.screen.line]):
            return 0
        return int(found[0])

    def wait_for_live_line(self, after=0, below=1 << 30):
        """Of a later step and of fewer columns, after lines that were on their way."""
        end = time.monotonic() + LIMIT
        while self.step() <= after or len(self.screen.lines[self.screen.line]) >= below:
            self.assertLess(time.monotonic(), end, "no such live line: " + self.screen.text())
            self.assertTrue(self.read(), "the run has ended: " + self.screen.text())
        return self.step()

    def commands(self):
        train = ["train", *SMALL, "--model", "mlp-64", "--steps", 1000000, "--eval-epochs", 10]
        yield [*train, "--ranks", 1]
        if HAS_MPI:
            yield [*train, "--ranks", 2]
        yield ["simulate", "--train", "--link", "1gbit", *train[1:], "--ranks", 2]

    def test_it_stays_one_row_and_leaves_nothing(self):
        for command in self.commands():
            for reflows in True, False:
                with self.subTest(command=command, reflows=reflows):
                    self.shrink(command, reflows)

    def shrink(self, command, reflows):
        metrics = self.dir / "m.jsonl"
        metrics.unlink(missing_ok=True)
        self.start_on_terminal(120, reflows, *command, "--metrics", metrics)
        step = self.wait_for_live_line()
        self.assertGreater(len(self.screen.lines[self.screen.line]), 60)
        for columns in 60, 59, 31, 45, 30:
            self.resize(columns)
            step = self.wait_for_live_line(after=step, below=columns)
        self.run_.send_signal(signal.SIGINT)
        while self.read():
            pass
        self.assertEqual(self.run_.wait(timeout=LIMIT), 128 + signal.SIGINT, self.screen.text())
        self.assertEqual(LIVE.findall(self.screen.text()), [])
        (title,) = [i for i, line in enumerate(self.screen.lines) if line.startswith("mlp-64 on generated: ")]
        self.assertRegex(self.screen.lines[title], r", [\d,]+ steps$")  # whole, in several rows
        said = [f"epoch {e['epoch']:.2f}  train loss {e['train_loss']:.4f}  test loss {e['test_loss']:.4f}  "
                f"accuracy {100 * e['test_accuracy']:.2f} %" for e in lines(metrics) if "evaluation" in e]
        said = [f"gtopk  {line}" for line in said] + ["skim: stopping after this step; once more to end at once"]
        # This line comes by another stream of the ranks, before the table or after it.
        stopped = re.compile("|skim: stopped after step [0-9]+; no checkpoint was asked for")
        others = [line for line in self.screen.lines[:title] if not stopped.fullmatch(line)]
        if reflows:
            self.assertLessEqual(set(others), set(said))
            self.assertGreaterEqual(set(others), set(said[:-1]))
        else:  # such a terminal has cut them, and left the rows of a line that was wrapped
            self.assertEqual([row for row in others if not any(row in line for line in said)], [])
            self.assertLessEqual({line[:30] for line in said[:-1]}, {row[:30] for row in others})

    def test_a_narrow_terminal_shows_the_time_left(self):
        self.start_on_terminal(80, True, "train", *SMALL, "--model", "mlp-64", "--steps", 1000000, "--eval-epochs", 0.1)
        step = self.wait_for_live_line()
        while "accuracy" not in self.screen.lines[self.screen.line]:
            step = self.wait_for_live_line(after=step)
        self.assertRegex(self.screen.lines[self.screen.line], r"^gtopk  step \d+/1000000  left [\d:]+ (s|min|h)  epoch ")

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_it_does_not_outlive_a_rank_that_draws_it(self):
        self.start_on_terminal(120, True, "train", *SMALL, "--model", "mlp-64", "--steps", 1000000, "--ranks", 2,
                               "--eval-epochs", 0)
        self.wait_for_live_line()
        os.kill(pids_of(self.dir)[0], signal.SIGKILL)
        while self.read():
            pass
        self.run_.wait(timeout=LIMIT)
        (line,) = filter(None, self.screen.lines)
        self.assertRegex(line, r"^skim: rank 0 \(pid \d+\) died")

    @unittest.skipUnless(HAS_MPI, "this build has no MPI: it cannot start several ranks")
    def test_ranks_of_mpirun_print_plain_lines(self):
        """Open MPI gives a rank a terminal of its own, whatever mpirun writes to."""
        done = subprocess.run([os.environ["SKIM_MPIRUN"], "-n", "2", TOOL, "train", *SMALL, "--model", "linear",
                               "--steps", "3"], capture_output=True, text=True, timeout=LIMIT,
                              env=dict(os.environ, **FOR_MPIRUN))
        self.assert_ok(done)
        self.assertRegex(done.stdout, r"(?m)^gtopk  step 3/3 ")
        self.assertNotIn("\x1b", done.stdout)

    def test_a_dumb_terminal_gets_plain_lines(self):
        for command in self.commands():
            with self.subTest(command=command):
                self.start_on_terminal(200, True, *[3 if word == 1000000 else word for word in command], term="dumb")
                drawn = b""
                while True:
                    try:
                        text = os.read(self.master, 1 << 16)
                    except OSError:
                        break
                    drawn += text
                self.assertEqual(self.run_.wait(timeout=LIMIT), 0, drawn)
                self.assertIn(b"step 3/3 ", drawn)
                self.assertNotIn(b"\x1b", drawn)


if __name__ == "__main__":
    unittest.main()
