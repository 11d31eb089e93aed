"""Universal checkpoints: DeepSpeed's folders of whole tensors by parameter name, which fit any plan.

Upstream's ``ds_to_universal`` cuts the flat buffers of all ranks (ZeRO-1, bf16) into files ``zero/NAME/fp32.pt``,
``exp_avg.pt`` and so on. Upstream's engine unpickles them; here they are read like the other files of a checkpoint,
without running code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER, PARAM, PARAM_GROUPS

from deepspeed_pulse.engine.checkpoints.optimizer_state import MASTER, Groups, SavedState, keep_options
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.gradients.scaling import keep_scale
from deepspeed_pulse.errors import FileError, PlanError

LATEST = "latest_universal"
"""The file that names the last converted tag."""

Load = Callable[[str], Any]
"""Content of a file."""


def name_once(optimizer: Any, names: Mapping[Any, str]) -> None:
    """Leave each weight's address in the files of the first pipeline rank that has it, and no placeholder's.

    The converter puts together what all ranks name. Copies of one weight are cut elsewhere on each rank, so it could
    not tell which pieces belong together.
    """
    elsewhere = {n for p, n in names.items() if is_placeholder(n) or getattr(p, "ds_pipe_replicated", False)}
    for mapping in getattr(optimizer, "_param_slice_mappings", ()):
        for name in elsewhere & mapping.keys():
            del mapping[name]


def is_universal(where: Path, *, asked: bool) -> bool:
    """Whether a checkpoint is universal; a :class:`FileError` where the config asks for the other kind."""
    found = _common_file(where).is_file()
    if asked and not found:
        raise FileError(
            f"{where}: checkpoint.load_universal: expected a universal checkpoint, found another; remove "
            "load_universal from the config (any plan, number of ranks and ZeRO stage resumes it as it is), or convert "
            "it with python -m deepspeed.checkpoint.ds_to_universal"
        )
    if found and not asked:
        raise FileError(
            f'{where}: a universal checkpoint; to load it, write "checkpoint": {{"load_universal": true}} in the config'
        )
    return found


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A rank's parameters and saved buffers, by name; each weight once, without placeholders."""
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**{name: p for name, p in module.named_parameters() if not is_placeholder(name)}, **buffers}


def read_weights(where: Path, tensors: Mapping[str, torch.Tensor], load: Load) -> dict[str, torch.Tensor]:
    """Those of a rank's tensors that are in a universal checkpoint, in full precision; says which are not.

    What is trained must be there: a missing file, or one that holds something else, is a :class:`FileError`.
    """
    files = {name: where / "zero" / name / f"{MASTER}.pt" for name in tensors}
    there = [name for name, file in files.items() if tensors[name].requires_grad or file.is_file()]
    absent = [name for name in tensors if name not in there]
    if absent:
        print(
            f"pulse: warning: {where}: universal checkpoints hold what is trained only: {len(absent)} other tensors of "
            f"a rank stay as they are, the first is {absent[0]}",
            flush=True,
        )
    return {name: _whole(load(str(files[name])), tensors[name], files[name]) for name in there}


@torch.no_grad()
def write_weights(weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a rank's tensors what was read for them."""
    for name, weight in weights.items():
        tensors[name].copy_(weight)


def read_named_state(where: Path, groups: Groups, load: Load) -> SavedState:
    """Optimizer state of the parameters of ``groups``, those of this rank's optimizer.

    Raises:
        PlanError: it was trained with another number of parameter groups.
        FileError: a file holds something else.
    """
    saved, common = SavedState(), load(str(_common_file(where)))
    for name in (name for group in groups for name in group if not is_placeholder(name)):
        content = {file.stem: load(str(file)) for file in (where / "zero" / name).iterdir() if file.suffix == ".pt"}
        saved.tensors[name] = {key: one[PARAM].reshape(-1) for key, one in content.items() if isinstance(one, dict)}
        saved.scalars[name] = {key: one for key, one in content.items() if not isinstance(one, dict)}
    options = common[PARAM_GROUPS]
    if len(options) != len(groups):
        raise PlanError(
            f"{where}: trained with {len(options)} parameter groups, this job's optimizer has {len(groups)}; build the "
            "same groups, or load no optimizer state (load_optimizer_states=False)"
        )
    keep_options(saved, groups, options)
    saved.scale.update(keep_scale(vars(common[LOSS_SCALER]) if LOSS_SCALER in common else {}))
    return saved


def _common_file(where: Path) -> Path:
    return where / "zero" / "optimizer_state.pt"


def _whole(content: Any, mine: torch.Tensor, file: Path) -> torch.Tensor:
    found = content.get(PARAM) if isinstance(content, dict) else None
    if not isinstance(found, torch.Tensor) or found.shape != mine.shape:
        raise FileError(
            f"{file}: expected a tensor of shape {list(mine.shape)}, found {list(getattr(found, 'shape', ()))}; build "
            "the same model"
        )
    return found
