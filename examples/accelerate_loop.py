"""A training loop with Hugging Face's accelerate. Skim is attached to the model that prepare() returns.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse
import sys

import torch
from ddp_mnist import digits

import skim

try:
    from accelerate import Accelerator
except ImportError:
    sys.exit("this example needs accelerate: pip install accelerate")


def main():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    options = parser.parse_args()
    if options.steps < 1 or options.accumulate < 1:
        parser.error("--steps and --accumulate must be at least 1")

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(*digits("train"))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if accelerator.num_processes > 1:
        skim.attach(model, density=0.01, optimizer=optimizer)  # prepare() made it a DistributedDataParallel

    step = 0
    while step < options.steps:
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 100 == 0 or step in (1, options.steps):
                accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            if step == options.steps:
                break
    if accelerator.num_processes > 1:
        accelerator.print(skim.report(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
