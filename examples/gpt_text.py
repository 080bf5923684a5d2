"""Trains a small GPT on single characters with AdamW. Gradients go through Skim, or for comparison another way.

torchrun --nproc-per-node 2 examples/gpt_text.py --density 0.01
SKIM_DATA names the folder that holds tinyshakespeare/input.txt. Without it the text is random words.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

import skim

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 4


def text():
    """The text as character numbers [n], and the number of different characters."""
    if "SKIM_DATA" in os.environ:
        try:
            raw = pathlib.Path(os.environ["SKIM_DATA"], "tinyshakespeare", "input.txt").read_bytes()
        except OSError as e:
            sys.exit(f"SKIM_DATA: {e}")
    else:
        words = "the and of to a in he she it was said night day king queen love sword mountain river".split()
        drawn = torch.Generator().manual_seed(0)
        raw = " ".join(words[i] for i in torch.randint(len(words), (50_000,), generator=drawn)).encode()
    letters = {c: i for i, c in enumerate(sorted(set(raw)))}
    return torch.tensor([letters[c] for c in raw]), len(letters)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):  # [batch, time, WIDTH]
        heads = self.qkv(self.before_attention(x)).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters, bias=False)

    def forward(self, x, y):  # both [batch, time]; returns the mean loss
        x = self.letter(x) + self.place.weight[: x.shape[1]]
        return functional.cross_entropy(self.head(self.last(self.blocks(x))).flatten(0, 1), y.flatten())


def batch_of(data, size):
    starts = torch.randint(len(data) - CONTEXT, (size, 1))
    return data[starts + torch.arange(CONTEXT)], data[starts + torch.arange(1, CONTEXT + 1)]


def mean_over_ranks(value):
    value = torch.as_tensor(value).detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def validation_loss(model, data):
    """The mean loss over data, in pieces of CONTEXT characters. Each rank evaluates an equal number of pieces."""
    pieces = data[: (len(data) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    following = data[1 : pieces.numel() + 1].view(-1, CONTEXT)
    share = slice(dist.get_rank(), len(pieces) // dist.get_world_size() * dist.get_world_size(), dist.get_world_size())
    pairs = zip(pieces[share].split(64), following[share].split(64))
    losses = [(len(x) * model(x, y)) for x, y in pairs]
    return mean_over_ranks(sum(losses) / len(pieces[share]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--exchange", choices=["auto", *skim.exchanges], default="auto")
    parser.add_argument("--value-code", choices=skim.value_codes, default="q4", help="value code")
    parser.add_argument("--gradients", choices=["skim", "dense", "fp16", "alone"], default="skim",
                        help="sent by Skim; whole, by DDP; whole, as 16-bit floats; not at all: each rank trains alone")
    parser.add_argument("--keep-momentum", action="store_true", help="skim: leave the momentum to the optimizer")
    parser.add_argument("--local-steps", type=int, default=0, metavar="H",
                        help="skim: exchange updates every H steps, instead of gradients")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate; warm-up, then cosine")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1 or options.batch < 1:
        parser.error("--steps and --batch must be at least 1")
    if options.local_steps < 0 or (options.local_steps > 0 and options.gradients != "skim"):
        parser.error("--local-steps must be at least 1, with --gradients skim")

    data, letters = text()
    train, held_out = data.split([len(data) * 9 // 10, len(data) - len(data) * 9 // 10])
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    ddp = nn.parallel.DistributedDataParallel(GPT(letters))
    torch.manual_seed(1000 * options.seed + 1 + dist.get_rank())  # for batches that differ between ranks
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=options.lr, weight_decay=0.1)
    # Of 10 steps, OneCycleLR would divide by the 0 steps between the first and the end of the warm-up.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, max(11, options.steps), pct_start=0.1, cycle_momentum=False
    )
    if options.gradients == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    compression = {"density": options.density, "exchange": options.exchange, "value_code": options.value_code}
    model = ddp
    local = None
    try:
        if options.local_steps > 0:
            model = ddp.module
            local = skim.LocalSteps(model, optimizer, options.local_steps, **compression)
        elif options.gradients == "skim":
            skim.attach(ddp, **compression, **({} if options.keep_momentum else {"optimizer": optimizer}))
    except skim.InvalidArgument as e:
        sys.exit(str(e))
    step_of = local if local is not None else optimizer
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        with ddp.no_sync() if options.gradients == "alone" else contextlib.nullcontext():
            loss = model(*batch_of(train, options.batch))
            optimizer.zero_grad()
            loss.backward()
        step_of.step()
        schedule.step()
        if step % max(1, options.steps // 10) == 0 or step == 1:
            mean = mean_over_ranks(loss)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean:.4f}, {time.perf_counter() - start:.1f} s", flush=True)
    if local is not None:
        local.finish()
    loss = validation_loss(ddp.module, held_out)
    if dist.get_rank() == 0:
        print(f"validation loss {loss:.4f}")
        if local is not None:
            print(local.report())
        elif options.gradients == "skim":
            print(skim.report(ddp))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when the model is gone (docs/pytorch.md)
