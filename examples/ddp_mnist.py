"""Trains an MLP on MNIST with PyTorch's DistributedDataParallel. The two lines that Skim needs are marked 1 and 2.

torchrun --nproc-per-node 2 examples/ddp_mnist.py
SKIM_DATA names the folder that holds mnist/ with the published files. Without it the images are random patterns.
"""

import argparse
import gzip
import os
import pathlib
import sys

import torch
import torch.distributed as dist

import skim  # 1


def digits(part):
    """Images [n, 784], in [0, 1], and labels [n]. part: "train" or "t10k"."""
    if "SKIM_DATA" not in os.environ:
        drawn = torch.Generator().manual_seed(["train", "t10k"].index(part))
        labels = torch.randint(10, (10_000,), generator=drawn)
        shapes = torch.rand(10, 784, generator=torch.Generator().manual_seed(2)) < 0.2
        return shapes[labels] * torch.rand(10_000, 784, generator=drawn), labels
    files = [f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"]
    try:
        raw = [gzip.open(pathlib.Path(os.environ["SKIM_DATA"], "mnist", f)).read() for f in files]
    except OSError as e:
        sys.exit(f"SKIM_DATA: {e}")
    images, labels = (torch.frombuffer(bytearray(r), dtype=torch.uint8) for r in raw)
    return images[16:].view(-1, 784) / 255, labels[8:].long()


def main():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error("--steps must be at least 1")
    images, labels = digits("train")
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # for batches that differ between ranks; DDP copies rank 0's parameters
    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    skim.attach(model, density=0.01, optimizer=optimizer)  # 2
    for step in range(1, steps + 1):
        batch = torch.randint(len(images), (32,))
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 100 == 0 or step in (1, steps)):
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        images, labels = digits("t10k")
        right = (model.module(images).argmax(1) == labels).float().mean()
        print(f"test accuracy {100 * right:.2f} %\n{skim.report(model)}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when the model is gone (docs/pytorch.md)
