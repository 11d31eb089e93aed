"""``ds_pulse profile`` as a person uses it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DModel

from deepspeed_pulse.cli import main
from deepspeed_pulse.ir.profile import Profile

PROGRESS = r"\d of 3, \d+ s: layer \d: .+"
"""Told where a machine is so busy that a short command takes ten seconds."""

LAYERS = """
import torch
from deepspeed_pulse import LayerSpec, spec

class Join(torch.nn.Linear):
    def forward(self, hidden, skip):
        return super().forward(hidden + skip)

def keep(hidden):
    return hidden, hidden

def model(microbatch_size=3):
    layers = [LayerSpec(torch.nn.Linear, 8, 8), spec(keep, stash="skip"), LayerSpec(Join, 8, 4, pop="skip")]
    return layers, ({"hidden": torch.randn(microbatch_size, 8)}, None)

def wrong():
    return model()[0]

def broken():
    raise ValueError("on purpose")

def empty():
    return [], ({"hidden": torch.randn(3, 8)}, None)

def misfit():
    return [torch.nn.Linear(7, 8)], ({"hidden": torch.randn(3, 8)}, None)

def nameless():
    return [spec(keep, stash="skip"), spec(Join(8, 8), pop=("skip", "mask"))], ({"hidden": torch.randn(3, 8)}, None)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder without weights, a pipeline folder around it, and a module of layer lists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with torch.device("meta"):
        model = UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 8),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
        )
    model.save_config("pipeline/unet")
    Path("pipeline/model_index.json").write_text("{}")
    config = json.loads(Path("pipeline/unet/config.json").read_text())
    Path("flux.json").write_text(json.dumps({**config, "_class_name": "FluxControlNetModel"}))
    Path("bad.json").write_text(json.dumps({**config, "block_out_channels": [7, 8]}))
    Path("sizeless.json").write_text(json.dumps({**config, "sample_size": None}))
    Path("text.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("bare").mkdir()
    Path("listed.py").write_text(LAYERS)
    sys.modules.pop("listed", None)
    return tmp_path


def run(line: str) -> int:
    return main(line.split())


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 7), ("bfloat16", 15)])
@pytest.mark.usefixtures("folder")
def test_an_estimate_may_count_the_optimizer(dtype: str, num_bytes: int) -> None:
    """By what passes through the memory of a device that is told of, for each byte of parameters."""
    assert run(f"profile pipeline --estimate --memory-gb-per-s 2000 --dtype {dtype} --out p.json") == 0
    assert Profile.load("p.json").optimizer_ms_per_gb == num_bytes / 2


@pytest.mark.parametrize("model", ["pipeline", "pipeline/unet", "pipeline/unet/config.json"])
@pytest.mark.usefixtures("folder")
def test_estimate_of_a_folder(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"profile {model} --estimate --tflops 100 --microbatch-size 2 --dtype float16 --out p.json") == 0
    profile = Profile.load("p.json")
    assert (profile.name, profile.device) == (f"{model} (estimate)", "estimated at 100 TFLOP/s")
    assert (profile.microbatch_size, profile.dtype, profile.layers[0].name) == (2, "float16", "conv_in")
    assert profile.layers[0].output_bytes == 2 * 8 * 8 * 8 * 2
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r"resnets\.0 +[\d.]+ +", printed.out), "the end of a long name"
    assert "estimated: operations at 100 TFLOP/s" in printed.out
    assert "named values: skip0, temb, skip1" in printed.out


@pytest.mark.usefixtures("folder")
def test_measured_on_the_accelerator_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile pipeline --dtype float32 --out p.json") == 0
    profile = Profile.load("p.json")
    assert (profile.name, profile.device[:3], profile.dtype) == ("pipeline", "cpu", "float32")
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)
    assert "measured on cpu (" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["", " --estimate"])
@pytest.mark.usefixtures("folder")
def test_layers_and_batch_of_a_function(how: str) -> None:
    assert run(f"profile listed:model --out p.json{how}") == 0
    profile = Profile.load("p.json")
    assert [layer.name for layer in profile.layers] == ["0.Linear", "1.keep", "2.Join"]
    assert [(skip.name, skip.source, skip.target, skip.bytes) for skip in profile.skips] == [("skip", 1, 2, 96)]
    assert profile.microbatch_size == 3
    assert profile.layers[2].param_bytes == 4 * (8 * 4 + 4)
    assert run(f"profile listed:model --microbatch-size 5 --out p.json{how}") == 0
    assert Profile.load("p.json").microbatch_size == 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("folder")
def test_a_terminal_shows_the_layer_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert run("profile listed:model --estimate --out p.json") == 0
    text = screen.getvalue()
    assert "building the model" in text
    assert re.search(r"2/3 \d:\d\d:\d\d layer 3: 2\.Join", re.sub(r"\x1b\[[\d;]*m", "", text)), "beside a bar"
    assert "\x1b[2K" in text[-20:], "the line is erased at the end"


ERRORS = {
    "sdlx --out p.json": 'found neither a file nor a name (did you mean "sdxl"?)',
    "missing/folder --out p.json": "missing/folder: expected a diffusers model folder",
    "bare --out p.json": "bare: expected config.json in the folder or in its unet or transformer/",
    "text.json --out p.json": "text.json: not a JSON file",
    "list.json --out p.json": "list.json: expected a JSON object, found list",
    "flux.json --out p.json": "flux.json: no family knows a FluxControlNetModel, so it is traced",
    "bad.json --out p.json": "bad.json: UNet2DModel refuses the config: ",
    "sizeless.json --out p.json": "sample_size is null",
    "pipeline --out missing/p.json": "cannot write missing/p.json",
    "flux.json --estimate --out ./flux.json": "./flux.json is read and would be written",
    "pipeline": "required: --out",
    "pipeline --tflops 3 --out p.json": "--tflops goes with --estimate",
    "pipeline --estimate --fused-optimizer --out p.json": "--fused-optimizer goes with measured times",
    "pipeline --memory-gb-per-s 3 --out p.json": "--memory-gb-per-s goes with --estimate",
    "pipeline --estimate --tflops 0 --out p.json": "--tflops: expected a number > 0",
    "pipeline --dtype int8 --out p.json": "--dtype: invalid choice",
    "pipeline --microbatch-size 0 --out p.json": "--microbatch-size: expected an integer >= 1",
    "nowhere:model --out p.json": "cannot import nowhere",
    "listed:modle --out p.json": "module listed has no 'modle'",
    "listed:number --out p.json": "expected a function, found int",
    "listed:wrong --out p.json": "expected it to return (layers, example_batch), found list",
    "listed:broken --out p.json": "listed:broken failed: ValueError: on purpose",
    "listed:empty --out p.json": "expected at least one layer",
    "listed:misfit --estimate --out p.json": "(in layer 0.Linear)",
    "listed:misfit --out p.json": "(in layer 0.Linear)",
    "listed:nameless --out p.json": "example batch: layer 1.Join pops 'mask'",
    "listed:model --dtype float16 --out p.json": "listed:model takes no dtype: leave --dtype out",
}


@pytest.mark.parametrize("line", ERRORS)
def test_unusable_input_is_one_line_and_status_2(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert run(f"profile {line}") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ds_pulse: error: ")
    assert printed.err.count("\n") == 1
    assert ERRORS[line] in printed.err
    assert [name for name in sorted(path.name for path in folder.iterdir()) if name != "__pycache__"] == before


@pytest.mark.usefixtures("folder")
def test_frameworks_leave_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process without DS_ACCELERATOR, where deepspeed would say what it found."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    result = subprocess.run(
        [sys.executable, "-m", "deepspeed_pulse", "profile", "listed:model", "--estimate", "--out", "p.json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    others = [line for line in result.stderr.splitlines() if not re.fullmatch(PROGRESS, line)]
    assert (result.returncode, others) == (0, [])
    assert result.stdout.startswith("listed:model (estimate): 3 layers")
