"""The scripts of docs/integrations.md, as a user pastes them: run, ended, and resumed. Each needs its framework."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "integrations.md"

# Runs a script. Prints a hash of a rank's residuals where they are saved or loaded, and of the parameters in the end.
HASHING = """
import hashlib, os, runpy, sys
import torch, skim, skim.ddp
def say(line):  # not to stdout, where lines of ranks may run into one another
    with open(f"said_by_{os.environ['RANK']}", "a") as out:
        out.write(line + "\\n")
def tell(what, tensors):
    whole = torch.cat([t.detach().flatten() for t in tensors])
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    say(f"{what} {os.environ['RANK']} {digest} {whole.norm()}")
def residuals(model):
    return [r for _, r in sorted(skim.compression_of(model).residuals().items())]
attach, save, load, models = skim.ddp.attach, skim.ddp.state_dict, skim.ddp.load_state_dict, []
def attached(model, *arguments, **options):
    models.append(model)
    return attach(model, *arguments, **options)
def saved(model, **how):
    tell("saved", residuals(model))
    return save(model, **how)
def loaded(model, state, strict=True):
    report = load(model, state, strict)
    tell("loaded", residuals(model))
    return report
skim.ddp.attach = skim.attach = attached
skim.ddp.state_dict, skim.ddp.load_state_dict = saved, loaded
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
[model] = set(models)
tell("ends", model.parameters())
x = torch.randn(500, 64, generator=torch.Generator().manual_seed(12345))
net = model.module.net if hasattr(model.module, "net") else model.module
loss = torch.nn.functional.cross_entropy(net(x), x[:, :10].argmax(1)).item()
say(f"loss: {loss}")
os._exit(0)
"""


class Frameworks(unittest.TestCase):
    def run_script(self, script, folder, fails=False):
        for name, text in (("hashing.py", HASHING), ("script.py", script)):
            pathlib.Path(folder, name).write_text(text)
        said = [pathlib.Path(folder, f"said_by_{rank}") for rank in range(2)]
        for file in said:
            file.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "hashing.py", "script.py"],
            cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.assertEqual(done.returncode != 0, fails, done.stdout + done.stderr)
        if fails:
            return done.stderr
        lines = "".join(file.read_text() for file in said)
        found = {
            what: set(re.findall(rf"^{what} (\d) (\S{{64}}) (\S+)$", lines, re.M))
            for what in ("saved", "loaded", "ends")
        }
        self.assertEqual(len({digest for _, digest, _ in found["ends"]}), 1, "ranks end with different weights")
        return found, float(re.search("loss: (.*)", lines)[1])

    def script(self, name):
        needed = {"trainer": "transformers"}.get(name, name)
        if importlib.util.find_spec(needed) is None:
            self.skipTest(f"{needed} is not installed")
        return re.search(rf"<!-- script: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.S)[1]

    def check(self, name, second=None):
        """second: the checkpoint after 60 steps, if there is one beside that after 30."""
        # "auto" may choose other exchanges in another run.
        script = self.script(name).replace("density=0.05", 'density=0.05, exchange="allgather"')
        with tempfile.TemporaryDirectory() as folder:
            whole, loss = self.run_script(script, folder)
            self.assertFalse(whole["loaded"])
            checkpoints = pathlib.Path(folder, "checkpoints")
            if second is not None:
                [last] = checkpoints.glob(second)
                shutil.rmtree(last) if last.is_dir() else last.unlink()
            resumed, again = self.run_script(script, folder)
            # Each rank gets what it had.
            self.assertEqual({rank for rank, _, norm in resumed["loaded"] if float(norm) > 0.0}, {"0", "1"})
            self.assertLessEqual(resumed["loaded"], whole["saved"])
            self.assertEqual(resumed["ends"], whole["ends"])
            self.assertEqual(again, loss)

    def test_trainer(self):
        self.check("trainer", "checkpoint-60")

    def test_a_trainer_trains_again(self):
        script = self.script("trainer").replace("density=0.05", 'density=0.05, exchange="allgather"')
        once, resumes = script, script.replace("=last)", '=last)\ntrainer.train(resume_from_checkpoint="checkpoints/checkpoint-30")')
        self.assertNotEqual(once, resumes)
        found = []
        for script in (once, resumes):
            with tempfile.TemporaryDirectory() as folder:
                found.append(self.run_script(script, folder)[0])
        first, both = found
        self.assertEqual({rank for rank, _, norm in both["loaded"] if float(norm) > 0.0}, {"0", "1"})
        self.assertEqual(both["saved"], first["saved"])
        self.assertEqual(both["ends"], first["ends"])

    def test_accelerate(self):
        self.check("accelerate")

    def test_lightning(self):
        self.check("lightning", "*step=60.ckpt")

    def test_schedules_go_by_the_epoch(self):
        by_epoch = (
            "class ByEpoch:\n"
            "    def density(self, progress):\n"
            "        pathlib.Path(f'epoch_{progress.epoch}').touch()\n"
            "        return 0.05\n"
        )
        for name, epochs in (("trainer", 4), ("lightning", 2)):  # of 15 and 30 steps
            with self.subTest(name):
                script = self.script(name).replace("4000", "480").replace("density=0.05", "density=ByEpoch()")
                script = script.replace("torch.manual_seed(0)", by_epoch + "torch.manual_seed(0)", 1)
                with tempfile.TemporaryDirectory() as folder:
                    self.run_script(script, folder)
                    seen = sorted(file.name for file in pathlib.Path(folder).glob("epoch_*"))
                self.assertEqual(seen, [f"epoch_{epoch}.0" for epoch in range(epochs)])

    def test_ray(self):
        script = self.script("ray").replace("density=0.05", 'density=0.05, exchange="allgather"')

        def states_after(runs, script):
            """Of both ranks, in the newest checkpoint."""
            with tempfile.TemporaryDirectory() as folder:
                pathlib.Path(folder, "script.py").write_text(script)
                for _ in range(runs):
                    done = subprocess.run(
                        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=300,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
                    )  # fmt: skip
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                import torch

                newest = max(pathlib.Path(folder, "checkpoints", "skim").glob("checkpoint_*/rank_0.pt")).parent
                return [torch.load(newest / f"rank_{rank}.pt") for rank in range(2)]

        resumed, whole = states_after(2, script), states_after(1, script.replace("step + 30", "step + 60"))
        for a, b in zip(resumed, whole, strict=True):
            self.assertEqual((a["step"], b["step"]), (60, 60))
            for of_a, of_b in ((a["model"], b["model"]), (a["skim"], b["skim"])):
                self.assertEqual(list(of_a), list(of_b))
                for name in of_a:
                    self.assertTrue((of_a[name] == of_b[name]).all(), name)

    def test_a_checkpoint_without_residuals_is_refused(self):
        def lose_files(folder):
            for file in folder.glob("30/skim_*"):
                file.unlink()

        def lose_key(folder):
            import torch

            for file in folder.glob("*.ckpt"):
                checkpoint = torch.load(file, weights_only=False)
                del checkpoint["skim"]
                torch.save(checkpoint, file)

        for name, lose in (("accelerate", lose_files), ("lightning", lose_key)):
            with self.subTest(name):
                script = self.script(name)
                with tempfile.TemporaryDirectory() as folder:
                    # As at 30 of 60 steps, so that the second run trains.
                    self.run_script(script.replace("max_steps=60", "max_steps=30"), folder)
                    lose(pathlib.Path(folder, "checkpoints"))
                    self.assertIn("was saved without Skim", self.run_script(script, folder, fails=True))


@unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
class Callbacks(unittest.TestCase):
    """On objects that look like the frameworks', which need not be installed."""

    def attached(self, module, framework, **names):
        """The class SkimCallback of a module of skim.integrations, and the mock that it calls for skim.attach."""
        fakes = {framework: types.SimpleNamespace(**names)}
        for parent in range(framework.count(".")):
            fakes[framework.rsplit(".", parent + 1)[0]] = types.SimpleNamespace()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(unittest.mock.patch("torch.distributed.is_initialized", lambda: True))
        stack.enter_context(unittest.mock.patch("torch.distributed.get_world_size", lambda: 2))
        attach = stack.enter_context(unittest.mock.patch("skim.ddp.attach"))  # imports PyTorch, which cannot be imported twice
        stack.enter_context(unittest.mock.patch.dict(sys.modules, fakes))
        sys.modules.pop(module, None)
        return importlib.import_module(module).SkimCallback, attach

    def test_the_trainer_gives_optimizer_and_scaler(self):
        callback, attach = self.attached("skim.integrations.huggingface", "transformers", TrainerCallback=object)
        state = types.SimpleNamespace(global_step=0)
        for scaler in (None, "its scaler"):
            trainer = types.SimpleNamespace(
                model_wrapped="model", optimizer="its optimizer", accelerator=types.SimpleNamespace(scaler=scaler)
            )
            callback(trainer, density=0.1).on_train_begin(None, state, None)
            attach.assert_called_with("model", optimizer="its optimizer", scaler=scaler, density=0.1)
        callback(trainer, optimizer=None, scaler="mine").on_train_begin(None, state, None)
        attach.assert_called_with("model", optimizer=None, scaler="mine")

    def test_lightning_gives_optimizer_and_scaler(self):
        callback, attach = self.attached("skim.integrations.lightning", "lightning.pytorch.callbacks", Callback=object)
        for optimizers, plugin, found in (
            (["its optimizer"], {}, {"optimizer": "its optimizer", "scaler": None}),
            (["its optimizer"], {"scaler": "its scaler"}, {"optimizer": "its optimizer", "scaler": "its scaler"}),
            (["one", "another"], {"scaler": "its scaler"}, {"scaler": "its scaler"}),
        ):
            strategy = types.SimpleNamespace(model="model", precision_plugin=types.SimpleNamespace(**plugin))
            trainer = types.SimpleNamespace(world_size=2, optimizers=optimizers, strategy=strategy)
            callback(density=0.1).on_train_start(trainer, None)
            attach.assert_called_with("model", **found, density=0.1)
            callback(scaler="mine").on_train_start(trainer, None)
            self.assertEqual(attach.call_args.kwargs["scaler"], "mine")


if __name__ == "__main__":
    unittest.main()
