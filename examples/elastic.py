"""Elastic training: ranks may leave, be lost and join while the others train.

python -m skim.store 29400 &                     # once, on a machine that all ranks reach
python examples/elastic.py localhost:29400       # a rank: as often as you like, also later; kill any of them
"""

import argparse
import sys

import torch
import torch.distributed as dist
from ddp_mnist import digits
from torch.nn.parallel import DistributedDataParallel

import skim


def main():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("store", metavar="HOST:PORT", help="where python -m skim.store listens")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--local-steps", type=int, default=0, metavar="H", help="0: DDP, an exchange in every step")
    parser.add_argument("--min-ranks", type=int, default=1, help="fewer ranks wait for new ones")
    parser.add_argument("--lost-after", type=float, default=10.0, metavar="S", help="seconds without a sign of life")
    options = parser.parse_args()

    images, labels = digits("train")
    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    progress = {"step": 0}
    try:
        group = skim.ElasticGroup(
            options.store,
            state={"model": model, "optimizer": optimizer, "progress": progress},
            min_ranks=options.min_ranks,
            lost_after=options.lost_after,
        )
        if options.local_steps > 0:
            local = skim.LocalSteps(model, optimizer, every=options.local_steps, density=0.05, process_group=group)
            step, trained = local.step, model
        else:
            # For DDP this rank is alone. Skim knows the others.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            step, trained = optimizer.step, DistributedDataParallel(model)
            skim.attach(trained, density=0.01, optimizer=optimizer, process_group=group)
    except (skim.InvalidArgument, skim.CommError) as e:
        sys.exit(str(e))

    print(f"begins at step {progress['step']} as rank {group.rank} of {group.size}", flush=True)
    while progress["step"] < options.steps:
        drawn = torch.Generator().manual_seed(1000 * progress["step"] + group.rank)  # no two ranks alike
        batch = torch.randint(len(images), (32,), generator=drawn)
        loss = torch.nn.functional.cross_entropy(trained(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        step()
        progress["step"] += 1
        if progress["step"] % 20 == 0 and group.rank == 0:
            print(f"step {progress['step']}: loss {loss.item():.4f}, {group.size} ranks", flush=True)

    if options.local_steps > 0:
        local.finish()
    group.leave()
    images, labels = digits("t10k")
    test_loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    right = (model(images).argmax(1) == labels).float().mean()
    print(f"test accuracy {100 * right:.2f} %, loss {test_loss}", flush=True)


if __name__ == "__main__":
    main()
