"""The whole model in one process, for sampling while the ranks train.

unet = gather_model(engine)  # every rank calls it
if engine.global_rank == 0:
    images = DDPMPipeline(unet=unet, scheduler=scheduler).to(engine.device)(batch_size=4).images
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models.families import construct
from deepspeed_pulse.models.units import Origin
from deepspeed_pulse.models.weights.shards import Part, gather
from deepspeed_pulse.models.weights.skeleton import Skeleton

if TYPE_CHECKING:
    from deepspeed_pulse.models.weights.ema import EMA

WHAT = "gather_model()"


def gather_model(
    engine: Any,
    *,
    dtype: torch.dtype | None = None,
    ema: EMA | None = None,
    model_class: type[nn.Module] | None = None,
    backbone: str | None = None,
) -> Any:
    """The trained diffusers model on the CPU of global rank 0, in evaluation mode; None on the other ranks.

    A collective call: every rank makes it. Weights are copies: training may go on. LoRA adapters are on the model.
    The other ranks wait for rank 0 at their next step, and no longer than ``timeout_seconds``. A model too large for
    one rank is sampled by all of them, with ``engine.eval_batch``.

    Args:
        engine: trains a list that ``to_layers``, ``from_pretrained`` or ``from_config`` made.
        dtype: of the floating-point weights, as for :func:`.save_pretrained`.
        ema: averages in place of the weights, in the dtype of those.
        model_class: which model, when the list was made of two (a U-Net and its ControlNet).
        backbone: which backbone, where the engine trains several.

    Raises:
        ConfigError: the layer list was not made from a diffusers model or layers of it were left out; it has several
            adapters, or parts that its config does not know; on every rank.
    """
    part = Part.asked(engine, WHAT, model_class, backbone)
    origin = part.origin
    if len(origin.peft_config) > 1:
        raise ConfigError(
            f"{WHAT}: expected one adapter at most, found {', '.join(origin.peft_config)}; write them with save_lora()"
        )
    floats = {
        key: weight.dtype if dtype is None else origin.dtype_of(key, dtype)
        for key, weight in part.own_tensors(engine, {}).items()
        if weight.is_floating_point()
    }
    tensors = part.own_tensors(engine, {} if ema is None else ema.averages_of(backbone))
    found = gather(engine, tensors, keys=origin.state_keys, dtypes=floats)
    made: list[Any] = []
    engine.module.ranks.decide_on_first(lambda: made.append(_model(origin, found)), WHAT)
    return made[0] if made else None


def _model(origin: Origin, tensors: dict[str, Tensor]) -> Any:
    model = Skeleton(lambda: construct(origin.model_class, json.loads(origin.config_json), WHAT)).model
    for name, config in origin.peft_config.items():
        from peft import inject_adapter_in_model

        bare = copy.copy(config)  # its weights come later: none are computed from the model's, which are not there yet
        if hasattr(bare, "init_lora_weights"):
            bare.init_lora_weights = False
        if hasattr(model, "add_adapter"):
            model.add_adapter(bare, name)
        else:
            inject_adapter_in_model(bare, model, name)
        model.peft_config[name] = config
    missing, unknown = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unknown:
        raise ConfigError(
            f"{WHAT}: the {origin.model_class.__name__} of the config has other parts than the one that trains, the "
            f"first is {[*missing, *unknown][0]}; build the model yourself and load what save_pretrained() wrote"
        )
    return model.eval().requires_grad_(False)
