"""Skips over a pipeline, by name: ``deepspeed --num_accelerators 2 examples/skips/train.py``."""

import os
from pathlib import Path

import deepspeed
import torch
from torch import nn

from deepspeed_pulse import PipelineModule, spec


class Down(nn.Sequential):
    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden, hidden  # what the next layer gets, and what is stashed


class Up(nn.Sequential):
    def forward(self, hidden, skip):
        return super().forward(torch.cat([hidden, skip], dim=1))


down = [spec(Down(nn.Linear(64, 64), nn.GELU()), stash=f"skip{i}") for i in range(3)]
up = [spec(Up(nn.Linear(128, 64), nn.GELU()), pop=f"skip{i}") for i in (2, 1, 0)]
config, ranks = str(Path(__file__).with_name("ds_config.json")), int(os.environ["WORLD_SIZE"])
model = PipelineModule([*down, *up, nn.Linear(64, 64)], num_stages=ranks, loss_fn=nn.functional.mse_loss, config=config)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
images = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))  # the same on every rank
for _ in range(50):
    loss = engine.train_batch(iter([(images, images)] * 4))
if engine.global_rank == 0:
    print(f"loss {loss.item():.4f}; sent between ranks: {', '.join(engine.pulse_stats()['p2p_bytes'])}")
