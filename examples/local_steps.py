"""Local steps: each rank trains by itself. Every H steps the ranks exchange how far their parameters have moved.

The options are SparseLoCo's (arXiv 2508.15706): AdamW on every rank, few entries of the changes, 2-bit values, a
residual that fades. SparseLoCo's selection in chunks is not part of this example. With --density 1 --value-code f32
--outer-lr 0.7 --outer-momentum 0.9 it is DiLoCo (arXiv 2311.08105).

torchrun --nproc-per-node 2 examples/local_steps.py
"""

import argparse
import sys

import torch
import torch.distributed as dist
from ddp_mnist import digits

import skim


def main():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=15, metavar="H")
    parser.add_argument("--density", type=float, default=0.0156, help="fraction of the changes that is sent")
    parser.add_argument("--value-code", choices=skim.value_codes, default="q2", help="value code of the changes")
    parser.add_argument("--residual-decay", type=float, default=0.95, help="factor of the residual in every round")
    parser.add_argument("--ahead", type=float, default=0.0, help="part of the residual that a rank applies at once")
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    options = parser.parse_args()
    if options.rounds < 1 or options.local_steps < 1:
        parser.error("--rounds and --local-steps must be at least 1")

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (part[rank::size] for part in digits("train"))  # each rank has its own part of the data
    torch.manual_seed(1 + rank)
    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        local = skim.LocalSteps(
            model, optimizer, options.local_steps, options.density, value_code=options.value_code, ahead=options.ahead,
            residual_decay=options.residual_decay, outer_lr=options.outer_lr, outer_momentum=options.outer_momentum,
        )  # fmt: skip
    except skim.InvalidArgument as e:
        sys.exit(str(e))

    for round_ in range(1, options.rounds + 1):
        mean_loss = 0.0
        for _ in range(options.local_steps):
            batch = torch.randint(len(images), (32,))
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            local.step()  # the last one of a round exchanges
            mean_loss += loss.item() / options.local_steps
        if rank == 0 and (round_ % 5 == 0 or round_ == 1):
            print(f"round {round_}: loss {mean_loss:.4f}", flush=True)

    local.finish()
    images, labels = digits("t10k")
    right = (model(images).argmax(1) == labels).float().mean()
    if rank == 0:
        sent = local.report()
        each = sent.sent_bytes / (options.rounds * options.local_steps)
        print(f"test accuracy {100 * right:.2f} %, {each:.0f} bytes sent a local step\n{sent}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when the model is gone (docs/pytorch.md)
