"""Trains one task by one method on the ranks that torchrun started, and prints a line of JSON with losses and bytes.

  torchrun --nproc-per-node 4 studies/quality_run.py gpt correction --density 0.014 --value-code q4 --lr 0.01

studies/quality.py runs many of these. Every method sees the same examples: rank and seed decide them. A task's
data have three parts: train, validation (which may choose rates), and test. Needs SKIM_DATA.
"""

import argparse
import contextlib
import gzip
import json
import math
import os
import pathlib
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional

import skim
from dct import Blocks

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
import gpt_text

DATA = pathlib.Path(os.environ["SKIM_DATA"]) if "SKIM_DATA" in os.environ else None


def bytes_of(*path):
    if DATA is None:
        sys.exit("quality: SKIM_DATA must name the folder with the data sets")
    return np.frombuffer(gzip.open(DATA.joinpath(*path)).read(), np.uint8)


class Text:
    """Letters of tiny Shakespeare: 8 tenths to train, one to validate, one to test. The metric is nats a letter."""

    metric = "loss"

    def __init__(self):
        data, self.letters = gpt_text.text()
        tenth = len(data) // 10
        self.train, self.validation, self.test = data.split([len(data) - 2 * tenth, tenth, tenth])

    def move_to(self, device):
        self.train, self.validation, self.test = (part.to(device) for part in (self.train, self.validation, self.test))

    def batch(self, size):
        return gpt_text.batch_of(self.train, size)

    def evaluate(self, model, part):
        return {"loss": gpt_text.validation_loss(model, getattr(self, part))}


class Gpt(Text):
    """0.8 million parameters under AdamW."""

    def model(self):
        return gpt_text.GPT(self.letters)

    def optimizer(self, parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


class Gpt10M(Gpt):
    """The same with 10.7 million parameters: 6 blocks of width 384."""

    def model(self):
        gpt_text.WIDTH, gpt_text.HEADS, gpt_text.LAYERS = 384, 6, 6
        return super().model()


class Lstm(Text):
    """One layer of 256, 0.36 million parameters, under Adam."""

    class Model(nn.Module):
        def __init__(self, letters):
            super().__init__()
            self.letter, self.lstm = nn.Embedding(letters, 64), nn.LSTM(64, 256, batch_first=True)
            self.head = nn.Linear(256, letters)

        def forward(self, x, y):
            return functional.cross_entropy(self.head(self.lstm(self.letter(x))[0]).flatten(0, 1), y.flatten())

    def model(self):
        return self.Model(self.letters)

    def optimizer(self, parameters, lr):
        return torch.optim.Adam(parameters, lr=lr)


class Images:
    """The metric is the accuracy in %. Statistics of batch norm are taken anew before an evaluation."""

    metric = "accuracy"

    class Loss(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x, y):
            return functional.cross_entropy(self.net(x), y)

    def move_to(self, device):
        parts = (self.train, self.validation, self.test)
        self.train, self.validation, self.test = ((x.to(device), y.to(device)) for x, y in parts)

    def batch(self, size):
        images, labels = self.train
        chosen = torch.randint(len(images), (size,))
        return self.augment(images[chosen]), labels[chosen]

    def augment(self, x):
        return x

    @torch.no_grad()
    def evaluate(self, model, part):
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
        model.train()
        for x in self.train[0][:5000].split(250) if norms else ():
            model.net(x)
        model.eval()
        images, labels = getattr(self, part)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        out = torch.cat([model.net(x) for x in images[mine].split(250)])
        right = (out.argmax(1) == labels[mine]).sum().double()
        loss = functional.cross_entropy(out, labels[mine], reduction="sum").double()
        size = len(images) / dist.get_world_size()
        return {
            "accuracy": 100.0 * gpt_text.mean_over_ranks(right) / size,
            "loss": gpt_text.mean_over_ranks(loss) / size,
        }

    def optimizer(self, parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4)


class Fashion(Images):
    """LeNet-5 on Fashion-MNIST: 50,000 images to train, 10,000 to validate."""

    def __init__(self):
        def part(name):
            images = bytes_of("fashion-mnist", f"{name}-images-idx3-ubyte.gz")[16:].reshape(-1, 1, 28, 28)
            labels = bytes_of("fashion-mnist", f"{name}-labels-idx1-ubyte.gz")[8:]
            pixels = (torch.from_numpy(images.copy()).float() / 255 - 0.286) / 0.353
            return pixels, torch.from_numpy(labels.astype(np.int64))

        images, labels = part("train")
        self.train, self.validation = (images[:50_000], labels[:50_000]), (images[50_000:], labels[50_000:])
        self.test = part("t10k")

    def model(self):
        return self.Loss(
            nn.Sequential(
                nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
            )
        )  # fmt: skip


class Resnet(Images):
    """A residual network (He et al. 2016) on two train batches of CIFAR-10: 18,000 images to train, with flips and
    crops, and 2,000 to validate. depth 20: 3 blocks of each width, 270 thousand parameters; depth 8: one. bf16: passes
    compute in bfloat16 where autocast does so (without effect: use_float32). Parameters, gradients and the exchange
    stay float32."""

    use_float32 = False

    class Block(nn.Module):
        def __init__(self, before, width):
            super().__init__()
            self.stride = 1 if before == width else 2
            self.more = width - before
            self.first, self.second = (
                nn.Sequential(nn.Conv2d(a, width, 3, s, 1, bias=False), nn.BatchNorm2d(width))
                for a, s in ((before, self.stride), (width, 1))
            )

        def forward(self, x):
            past = x[:, :, :: self.stride, :: self.stride]
            past = functional.pad(past, (0, 0, 0, 0, 0, self.more))
            return functional.relu(past + self.second(functional.relu(self.first(x))))

    class Autocast(nn.Sequential):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=not Resnet.use_float32):
                return super().forward(x.to(memory_format=torch.channels_last)).float()

    def __init__(self, depth, bf16=False):
        def part(name):
            records = bytes_of("cifar10", f"{name}.bin.gz").reshape(-1, 3073)
            images = torch.from_numpy(records[:, 1:].copy()).view(-1, 3, 32, 32).float()
            return (images / 255 - 0.47) / 0.25, torch.from_numpy(records[:, 0].astype(np.int64))

        images, labels = (torch.cat(both) for both in zip(part("data_batch_1"), part("data_batch_2")))
        self.train, self.validation = (images[:18_000], labels[:18_000]), (images[18_000:], labels[18_000:])
        self.test, self.depth, self.kind = part("test_batch"), depth, self.Autocast if bf16 else nn.Sequential

    def model(self):
        widths = [16] + [w for w in (16, 32, 64) for _ in range((self.depth - 2) // 6)]
        return self.Loss(
            self.kind(
                nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                *(self.Block(a, b) for a, b in zip(widths, widths[1:])),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
            )
        )  # fmt: skip

    def augment(self, x):
        if torch.rand(()) < 0.5:
            x = x.flip(3)
        top, left = torch.randint(9, (2,)).tolist()
        return functional.pad(x, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]


TASKS = {"gpt": Gpt, "gpt10m": Gpt10M, "lstm": Lstm, "fashion": Fashion, "resnet20": lambda: Resnet(20, bf16=True), "resnet8": lambda: Resnet(8)}
METHODS = (
    "dense",  # DDP
    "fp16",  # DDP, 16-bit gradients
    "powersgd",  # DDP's PowerSGD hook, rank 1, after 10 dense steps
    "alone",  # no communication
    "after-sum",  # skim.attach, momentum stays in the optimizer
    "correction",  # skim.attach(optimizer=...)
    "local",  # skim.LocalSteps
    "demo",  # DeMo: momentum is the residual of a DCT in blocks, and the sign of the mean is applied
)


class Runs:
    """Selects whole runs of neighbours, which are counted from the start of a bucket, by their norms.

    Of the last run only its largest entries are selected, so that there are k.
    """

    def __init__(self, length):
        self.length = length

    def select(self, accumulated, k, step, slot):
        padded = np.pad(accumulated, (0, -len(accumulated) % self.length)).reshape(-1, self.length)
        chosen = (np.square(padded, dtype=np.float64).sum(1)).argsort()[::-1][: -(-k // self.length)]
        indices = (self.length * chosen[:, None] + np.arange(self.length)).ravel()
        whole, last = indices[: -self.length], indices[-self.length :]
        last = last[last < len(accumulated)]
        return np.concatenate([whole, last[np.abs(accumulated[last]).argsort()[::-1]]])[:k]


class InTurn:
    """Selects every entry equally often, whatever its size, as SPARTA does: in each step the next ones, k for each rank."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def select(self, accumulated, k, step, slot):
        return ((step * self.ranks + self.rank) * k + np.arange(k)) % len(accumulated)


class Spent:
    """A schedule that spends the entries of a run as quality_run.py --spend says."""

    def __init__(self, how, density, steps):
        if how == "by-rate":
            weights = [rate_at(step, steps) for step in range(steps)]
        else:
            weights = [1.0 if how == "flush" or step < steps / 2 else 0.0 for step in range(steps)]
        self.densities = [min(1.0, max(2e-5, density * w * steps / sum(weights))) for w in weights]
        if how == "flush":
            self.densities[4 * steps // 5 - 1] = self.densities[-1] = 1.0

    def density(self, progress):
        return self.densities[min(progress.step, len(self.densities) - 1)]  # it is asked once more after the last step


class DeMo:
    """The optimizer of arXiv 2411.19870 on skim.Aggregator, which keeps the momentum as its residual.

    DeMo takes k entries of each block. Here the largest of a bucket are sent, by any of Skim's exchanges and codes.
    """

    def __init__(self, sgd, momentum, **compression):
        self.sgd = sgd  # without momentum
        self.parameters = sgd.param_groups[0]["params"]
        self.blocks = [Blocks(p.shape) for p in self.parameters]
        self.aggregator = skim.Aggregator(self.parameters, **(compression | {"residual_decay": momentum}))
        self.report = self.aggregator.report

    @torch.no_grad()
    def step(self):
        means = [b.forward(p.grad.flatten()) for b, p in zip(self.blocks, self.parameters)]
        self.aggregator.reduce(means)
        for b, p, mean in zip(self.blocks, self.parameters, means):
            p.grad.copy_(b.back(mean).sign().view_as(p))
        self.sgd.step()


def rate_at(step, steps):
    """Rises for 10 % of the steps, then falls along a cosine."""
    rise = max(1, steps // 10)
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="examples per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--exchange", choices=["auto", *skim.exchanges], default="allgather")
    parser.add_argument("--value-code", choices=skim.value_codes, default="f32")
    parser.add_argument("--residual-code", default="f32", help="f32, bf16 or q8")
    parser.add_argument("--residual-decay", type=float, default=1.0, help="a residual is multiplied by it before each exchange")
    parser.add_argument("--per-parameter", action="store_true", help="select in each parameter by itself")
    parser.add_argument("--runs-of", type=int, default=0, metavar="N", help="select whole runs of N neighbours")
    parser.add_argument("--in-turn", action="store_true", help="shared-indices: select every entry in turn, not the largest")
    parser.add_argument("--spend", choices=["even", "by-rate", "first-half", "flush"], default="even",
                        help="when entries are sent: in proportion to the learning rate, in the first half of the steps, or "
                        "evenly. flush: and all that is left after 80 %% of the steps and at the end")
    parser.add_argument("--every", type=int, default=1, help="local: steps of a round")
    parser.add_argument("--ahead", type=float, default=1.0, help="local")
    parser.add_argument("--outer-lr", type=float, default=0.0, help="local: factor of the mean; 0: by the density")
    parser.add_argument("--outer-momentum", type=float, default=0.0, help="local")
    parser.add_argument("--delay", type=int, default=0, help="local: steps until a mean is applied")
    parser.add_argument("--demo-momentum", type=float, default=0.95, help="demo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the ranks share one GPU")
    parser.add_argument("--float32", action="store_true", help="resnet20: compute in float32, as processors without bfloat16 do sooner")
    parser.add_argument("--islands", type=int, default=0, metavar="I",
                        help="dense, correction: shard the GPT by fully_shard inside I islands, with the exchange between "
                        "them. --batch is an island's then (0: DDP)")
    parser.add_argument("--one-group", action="store_true", help="--islands: fully_shard has one group, not one for each block")
    parser.add_argument("--bucket-mb", type=float, default=1000.0, help="bucket_cap_mb of DDP; 1000: one bucket")
    parser.add_argument("--curve", type=int, default=0, metavar="N",
                        help="validate every N steps, too; the row then has [step, seconds, metric] of each. The "
                        "seconds are of training alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Resnet.use_float32 = options.float32
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = TASKS[options.task]()
    task.move_to(options.device)

    torch.manual_seed(options.seed)
    model = task.model().to(options.device)
    island, place, places, mesh = rank, 0, 1, None
    if options.islands:
        places = ranks // options.islands
        island, place = divmod(rank, places)
        mesh = init_device_mesh(options.device, (options.islands, places), mesh_dim_names=("between", "inside"))
        for part in ((model,) if options.one_group else (*model.blocks, model)):
            fully_shard(part, mesh=mesh if options.method == "dense" else mesh["inside"])
    optimizer = task.optimizer(model.parameters(), options.lr)
    if options.method == "demo":
        optimizer = torch.optim.SGD(model.parameters(), options.lr, weight_decay=optimizer.defaults["weight_decay"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, options.steps))
    is_local = options.method == "local"
    if options.method == "powersgd":
        # One bucket: with several, gloo meets the hook's sums in another order on another rank.
        dist._DEFAULT_FIRST_BUCKET_BYTES = 2**30
    is_whole = is_local or options.method == "demo" or mesh is not None
    trained = model if is_whole else nn.parallel.DistributedDataParallel(model, bucket_cap_mb=options.bucket_mb)
    density = options.density if options.spend == "even" else Spent(options.spend, options.density, options.steps)
    compression = {"density": density, "exchange": options.exchange, "value_code": options.value_code,
                   "residual_code": options.residual_code, "residual_decay": options.residual_decay,
                   **({"per_parameter": True} if options.per_parameter else {}),
                   **({"selector": Runs(options.runs_of)} if options.runs_of else {}),
                   **({"selector": InTurn(rank, ranks)} if options.in_turn else {})}
    local = demo = None
    if is_local:
        local = skim.LocalSteps(
            model, optimizer, options.every, ahead=options.ahead, outer_lr=options.outer_lr,
            outer_momentum=options.outer_momentum, delay=options.delay, **compression,
        )  # fmt: skip
    elif options.method in ("after-sum", "correction"):
        between = {} if mesh is None else {"between": mesh["between"].get_group()}
        skim.attach(trained, **compression, **between, optimizer=optimizer if options.method == "correction" else None)
    elif options.method == "demo":
        demo = DeMo(optimizer, options.demo_momentum, **compression)
    elif options.method == "fp16":
        trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif options.method == "powersgd":
        power = PowerSGDState(None, 1, start_powerSGD_iter=10)
        trained.register_comm_hook(power, powerSGD_hook)

    torch.manual_seed(1000 * options.seed + 1 + island)  # for batches that differ between ranks, or islands
    began, last, curve = time.perf_counter(), [], []
    for step in range(options.steps):
        with trained.no_sync() if options.method == "alone" else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = trained(*(part[place::places] for part in task.batch(options.batch)))
            loss.backward()
        (local or demo or optimizer).step()
        schedule.step()
        last = [*last[-49:], loss.item()]
        if options.curve and (step + 1) % options.curve == 0:
            seconds = time.perf_counter() - began
            with local.shared() if local is not None else contextlib.nullcontext():
                value = task.evaluate(model, "validation")[task.metric]
            model.train()
            curve.append([step + 1, round(seconds, 2), round(value, 4)])
            dist.barrier()
            began = time.perf_counter() - seconds
    if local is not None:
        local.finish()
    seconds = time.perf_counter() - began
    row = {**vars(options), "ranks": ranks, "seconds": round(seconds, 1)}
    if curve:
        row["curve"] = curve
    row["train_loss"] = round(gpt_text.mean_over_ranks(sum(last) / len(last)), 4)
    for part in ("validation", "test"):
        for metric, value in task.evaluate(model, part).items():
            row[f"{part}_{metric}"] = round(value, 4)
    report = None
    if local is not None or demo is not None:
        report = (local or demo).report()
    elif options.method in ("after-sum", "correction"):
        report = skim.report(trained)
    if report is not None:
        # A step of the report is an exchange. Dense gradients are exchanged in every step.
        dense = report.dense_bytes / report.steps * options.steps
        busiest = torch.tensor(report.sent_bytes / dense)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        row["share"] = round(busiest.item(), 6)
    elif options.method == "powersgd":
        entries = sum(p.numel() for p in model.parameters())
        row["share"] = round((10 * entries + power.total_numel_after_compression) / (options.steps * entries), 6)
    else:
        row["share"] = {"dense": 1.0, "fp16": 0.5, "alone": 0.0}[options.method]
    if rank == 0:
        print(json.dumps(row), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when the model is gone (docs/pytorch.md)
    os._exit(0)  # a thread of gloo that frees its last tensor late would abort (docs/pytorch.md)
