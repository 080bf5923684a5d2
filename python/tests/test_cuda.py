"""Training on a GPU. Not beside test_tensor_half: where a PyTorch has an emulated device, it cannot train on another."""

import importlib.util
import itertools
import unittest

import numpy as np

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import skim
    import torch
    import torch.distributed as dist


@unittest.skipUnless(HAS_TORCH and torch.cuda.is_available(), "no GPU")
class TrainingOnCuda(unittest.TestCase):
    """skim.LocalSteps, skim.Aggregator and skim.attach, on a GPU and on the CPU. The sums of matrices differ in
    their last bits."""

    def losses(self, device, backend, kind, autocast, scaled):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            return self.train(device, kind, autocast, scaled)
        finally:
            dist.destroy_process_group()

    def train(self, device, kind, autocast, scaled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
        inner = model
        options = {"density": 0.05, "dense_below": 0, "exchange": "allgather"}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler(device, enabled=scaled, init_scale=64.0)
        if kind == "attach":
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
            skim.attach(model, optimizer=optimizer, scaler=scaler, **options)
        elif kind == "local":
            local = skim.LocalSteps(model, optimizer, every=2, **options)
        else:
            aggregator = skim.Aggregator(model.parameters(), optimizer=optimizer, **options)
        found = []
        data = torch.Generator().manual_seed(1)
        for _ in range(120):
            x = torch.randn(32, 64, generator=data).to(device)
            y = x[:, :10].argmax(1)
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if kind == "aggregator":
                scaler.unscale_(optimizer)
                aggregator.step()
            scaler.step(optimizer)
            scaler.update()
            if kind == "local":
                local.after_step()
            found.append(loss.item())
        if kind == "attach":
            skim.detach(model)
        elif kind == "local":
            local.finish()
        assert all(p.device.type == device for p in inner.parameters())
        return found

    def test_losses_are_those_of_the_cpu(self):
        for backend, kind in itertools.product(("gloo", "nccl"), ("attach", "local", "aggregator")):
            for autocast, scaled in ((False, False), (True, True)):
                with self.subTest(backend=backend, kind=kind, autocast=autocast, scaled=scaled):
                    cuda = self.losses("cuda", backend, kind, autocast, scaled)
                    cpu = self.losses("cpu", "gloo", kind, autocast, scaled)
                    self.assertLess(cuda[-1], 0.7 * cuda[0])
                    np.testing.assert_allclose(cuda[-10:], cpu[-10:], rtol=0.15 if autocast else 0.05)


if __name__ == "__main__":
    unittest.main()
