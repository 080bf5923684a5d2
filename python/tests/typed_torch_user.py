"""A user's file under PyTorch, for type checkers: test_types.py."""

import skim
import torch
from torch.nn.parallel import DistributedDataParallel


def two_lines(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    compression = skim.attach(model, density=0.01, optimizer=optimizer, value_code="q4", total_steps=1000)
    compression.epoch = 1.0
    state: dict[str, torch.Tensor] = skim.state_dict(model)
    skim.load_state_dict(model, state)
    return skim.report(model).sent_bytes


def beforehand(model: DistributedDataParallel) -> None:
    skim.attach(model, dry_run=True)


def without_ddp(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    aggregator = skim.Aggregator(model.named_parameters(), density=skim.listed_density([0.1], 0.01), residual_decay=0.9)
    if aggregator.step(scale=2.0):
        optimizer.step()


def local_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int]) -> None:
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    with skim.ElasticGroup("localhost:29400", state, min_ranks=2) as group:
        local = skim.LocalSteps(model, optimizer, every=15, ahead=1.0, process_group=group, value_code="q2")
        local.step()
        with local.shared() as shared:
            shared.eval()
        local.finish()
