"""No file that this package reads can run code: pickles under every name are refused, or made anew, unexecuted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage_ranks import EXECUTED, Malicious
from support.small_models import small_unet
from support.thread_ranks import on_ranks

from deepspeed_pulse.cli import main
from deepspeed_pulse.engine.checkpoints.digests import read_sums
from deepspeed_pulse.engine.checkpoints.files import SafeCheckpointEngine, find_tag
from deepspeed_pulse.engine.checkpoints.reading import load_safely
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord
from deepspeed_pulse.engine.plans import kept
from deepspeed_pulse.errors import PulseError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.frozen import FrozenParts
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.run import Run
from deepspeed_pulse.models import EMA, from_config, from_pretrained, save_pretrained, to_layers
from deepspeed_pulse.planner import cache

Read = Callable[[Path], Any]


def as_torch(path: Path) -> None:
    torch.save({"module": Malicious(path.parent)}, path)


def as_old_torch(path: Path) -> None:
    torch.save({"module": Malicious(path.parent)}, path, _use_new_zipfile_serialization=False)


def as_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Malicious(path.parent)))


def as_text_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Malicious(path.parent), protocol=0))


WRITERS = (as_torch, as_old_torch, as_pickle, as_text_pickle)

TORCH_FILES: dict[str, Read] = {
    "layer_00-model_states.pt": load_safely,
    "mp_rank_00_model_states.pt": lambda path: SafeCheckpointEngine().load(str(path)),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": lambda path: SafeCheckpointEngine().stage([path]),
}

TEXTS: dict[str, Read] = {
    "pulse_checkpoint.json": lambda path: CheckpointRecord.read(path.parent),
    "SHA256SUMS": lambda path: read_sums(path.parent),
    "latest": lambda path: find_tag(path.parent, None),
    "plan.json": Plan.load,
    "profile.json": Profile.load,
    "cluster.json": Cluster.load,
    "frozen.json": FrozenParts.load,
    "pulse_run.json": Run.load,
    "config.json": lambda path: from_config(path),
    "ema.json": lambda path: on_ranks(to_layers(small_unet()), lambda engine: EMA(engine).load(path.parent)),
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", [*TORCH_FILES, *TEXTS])
def test_a_file_that_is_a_pickle_is_refused(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / name)
    with pytest.raises(PulseError, match=name):
        (TORCH_FILES | TEXTS)[name](tmp_path / name)
    assert not (tmp_path / EXECUTED).exists()


@pytest.mark.parametrize("write", WRITERS)
def test_kept_files_that_are_pickles_are_made_anew(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "kept")
    assert kept.read_cluster(tmp_path / "kept", 1, 2) is None
    assert "is not this job's" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):  # made
        cache.kept(tmp_path / "kept", Plan, lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert not (tmp_path / EXECUTED).exists()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "config.json", "index"])
def test_a_models_folder_runs_nothing(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    on_ranks(to_layers(small_unet()), lambda engine: save_pretrained(engine, tmp_path))
    write(tmp_path / name.replace("index", "diffusion_pytorch_model.safetensors.index.json"))
    with pytest.raises(PulseError):
        from_pretrained(tmp_path)
    for suffix in (".bin", ".ckpt"):
        (tmp_path / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
        (tmp_path / "diffusion_pytorch_model.safetensors.index.json").unlink(missing_ok=True)
        write(tmp_path / f"diffusion_pytorch_model{suffix}")
        with pytest.raises(PulseError):
            from_pretrained(tmp_path)
    assert not (tmp_path / EXECUTED).exists()


@pytest.mark.parametrize("write", WRITERS)
def test_averages_run_nothing(write: Callable[[Path], None], tmp_path: Path) -> None:
    on_ranks(to_layers(small_unet()), lambda engine: EMA(engine).save(tmp_path))
    write(next(tmp_path.glob("layer_*")))
    with pytest.raises(PulseError, match="is damaged"):
        on_ranks(to_layers(small_unet()), lambda engine: EMA(engine).load(tmp_path))
    assert not (tmp_path / EXECUTED).exists()


@pytest.mark.parametrize("write", WRITERS)
def test_the_command_line_runs_nothing(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "pulse_run.json")
    for command in ("report", "show", "simulate"):
        costs = ["--profile", f"{tmp_path}/pulse_run.json", "--cluster", f"{tmp_path}/pulse_run.json"]
        assert main([command, f"{tmp_path}/pulse_run.json", *(costs if command == "simulate" else [])]) == 2
        assert capsys.readouterr().err.startswith("ds_pulse: error: ")
    assert not (tmp_path / EXECUTED).exists()


def test_the_pickle_would_run(tmp_path: Path) -> None:
    """These tests are able to fail."""
    for write in WRITERS[2:]:
        write(tmp_path / "file")
        pickle.loads((tmp_path / "file").read_bytes()).close()
        (tmp_path / EXECUTED).unlink()
    for write in WRITERS[:2]:
        write(tmp_path / "file")
        torch.load(tmp_path / "file", weights_only=False)["module"].close()
        (tmp_path / EXECUTED).unlink()
