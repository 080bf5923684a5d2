"""What type checkers must refuse under PyTorch, every line that is marked: test_types.py."""

import skim
import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
skim.atach(model)  # refused
skim.attach(model, densty=0.1)  # refused
skim.attach(model, density="high")  # refused
skim.attach(model, optimizer=0.1)  # refused
skim.attach(optimizer)  # refused
skim.report(model).sent_byte  # refused
skim.Aggregator(model.parameters(), value_cod="q4")  # refused
skim.LocalSteps(model, optimizer, every="often")  # refused
skim.LocalSteps(model, optimizer, ahed=1.0)  # refused
skim.ElasticGroup("localhost:29400", {"model": model}, minranks=2)  # refused
