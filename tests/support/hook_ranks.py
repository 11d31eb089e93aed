"""What ranks run in the tests of the hook."""

from __future__ import annotations

import importlib.util
import itertools
import json
from functools import partial
from typing import Any

import torch
from support.parity import run_case
from support.toy import WIDTH
from torch import nn


def plain_layers(count: int = 8) -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)]


def plain_batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


def losses_of(module_class: Any, config: dict[str, Any], **arguments: Any) -> list[float]:
    import deepspeed

    module = module_class(
        layers=plain_layers(),
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        seed_layers=True,
        partition_method="uniform",
        **arguments,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data = map(plain_batch, itertools.count())
    found = [float(engine.train_batch(data).detach()) for _ in range(3)]
    return [*found, type(engine).__name__]


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.1,
    "steps_per_print": 10**9,
}


def upstream_modules(ours_too: bool) -> None:
    """Losses of upstream's modules, with or without this package's hook in the process."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    found = {}
    if ours_too:
        import deepspeed_pulse
        from deepspeed_pulse.engine import hook

        found["ours, no names, no block"] = losses_of(partial(deepspeed_pulse.PipelineModule, config=CONFIG), CONFIG)
        assert hook.installed() is hook.needed()
    else:
        found["ours, no names, no block"] = [*losses_of(PipelineModule, CONFIG)[:-1], "RelayEngine"]
    found["PipelineModule"] = losses_of(PipelineModule, CONFIG)
    if importlib.util.find_spec("deepspeed.runtime.pipe.dualpipev") is not None:
        from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

        found["DualPipeVModule"] = losses_of(DualPipeVModule, CONFIG)
    print("FOUND", json.dumps(found), flush=True)


def patched_upstream(case: dict[str, Any]) -> None:
    """Train under a patched upstream: the engine is ours and the hook is not installed."""
    import os

    import deepspeed

    assert deepspeed.__file__.startswith(os.environ["PATCHED"]), deepspeed.__file__
    run_case(case)
    from support import auto_ranks

    from deepspeed_pulse.engine import hook

    config = auto_ranks.config_of({})
    engine, _ = auto_ranks.engine_of(config, example_batch=auto_ranks.batch_of(0, range(1)))
    auto_ranks.shape_of(engine)
    found = auto_ranks.losses_of(engine, range(auto_ranks.STEPS))
    assert auto_ranks.close(found, auto_ranks.expected_losses())
    assert not hook.needed() and not hook.installed()
    print("PASSED", flush=True)
