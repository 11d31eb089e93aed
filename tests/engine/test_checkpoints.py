"""A job can stop and go on under any plan, with the same losses; what cannot go on says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.launch import launch
from support.quantized import Linear4bit
from torch import nn

from deepspeed_pulse.engine.checkpoints.claim import LOCK_FILE
from deepspeed_pulse.engine.checkpoints.files import CheckpointFolder, beside, find_tag, rename
from deepspeed_pulse.engine.checkpoints.reading import check_layer, load_safely
from deepspeed_pulse.errors import FileError

WAVE4, LINEAR4 = {"ranks": 4}, {"ranks": 4, "placement": "linear"}
WAVE2, TWO_WAVES = {"ranks": 2}, {"ranks": 2, "waves": 2}
OFF4, OFF2 = {"ranks": 4, "off": True}, {"ranks": 2, "off": True}


def with_zero(*jobs: dict) -> list[dict]:
    return [{**job, "zero": 1} for job in jobs]


def test_any_plan_resumes_any_checkpoint(tmp_path: Path) -> None:
    """World of 4: P = 2 means two replicas, so data-parallel size changes with P."""
    sgd, groups = {"optimizer": "sgd"}, {"optimizer": "two groups"}
    in_turn = {**WAVE2, "zero": 1, "in_turn": True}
    cases = [
        (WAVE4, [WAVE4, LINEAR4, WAVE2, TWO_WAVES, OFF4, *with_zero(WAVE2)]),
        ({**WAVE2, "zero": 1}, [*with_zero(WAVE2, TWO_WAVES, WAVE4, LINEAR4, OFF2), WAVE4, in_turn]),
        (in_turn, [in_turn, *with_zero(WAVE2, LINEAR4)]),
        ({**OFF2, "zero": 1}, with_zero(WAVE4, WAVE2)),
        ({**TWO_WAVES, **sgd}, [{**LINEAR4, **sgd}]),
        ({**WAVE4, **groups}, [{**LINEAR4, **groups}, *with_zero({**WAVE2, **groups})]),
    ]
    launch("support.resume_ranks:resumes", 4, {"folder": str(tmp_path), "cases": cases, "naive": True}, timeout=280)


def test_bf16_resumes_under_another_plan(tmp_path: Path) -> None:
    bf16 = {"dtype": "bfloat16"}
    cases = [
        ({**WAVE2, **bf16, "zero": 1}, with_zero({**WAVE2, **bf16}, {**LINEAR4, **bf16})),
        ({**WAVE2, **bf16, "zero": 1, "in_turn": True}, with_zero({**WAVE2, **bf16})),
        ({**WAVE4, **bf16}, [{**WAVE4, **bf16}, {**TWO_WAVES, **bf16}, *with_zero({**LINEAR4, **bf16})]),
    ]
    case = {"folder": str(tmp_path), "cases": cases, "tolerance": 1e-2}
    launch("support.resume_ranks:resumes", 4, case, timeout=200)


@pytest.mark.soak
def test_fp16_and_its_loss_scale_resume_under_another_plan(tmp_path: Path) -> None:
    """Without ZeRO, for fused Adam too, and with it; the same plan bit for bit."""
    fp16, fused = {"dtype": "float16"}, {"dtype": "float16", "optimizer": "fused"}
    cases = [
        ({**WAVE2, **fp16, "zero": 1}, [*with_zero({**WAVE2, **fp16}, {**LINEAR4, **fp16}), {**WAVE4, **fp16}]),
        (
            {**WAVE4, **fp16},
            [{**WAVE4, **fp16}, {**TWO_WAVES, **fp16}, {**OFF4, **fp16}, *with_zero({**LINEAR4, **fp16})],
        ),
        ({**WAVE4, **fused}, [{**WAVE4, **fused}, {**TWO_WAVES, **fused}, *with_zero({**LINEAR4, **fused})]),
    ]
    case = {"folder": str(tmp_path), "cases": cases, "tolerance": 2e-3}
    launch("support.resume_ranks:resumes", 4, case, timeout=200)


def test_state_of_other_shapes_resumes_under_another_plan(tmp_path: Path) -> None:
    """Of a weight without dimensions, whose moments have none either; of rows and columns of matrices."""
    gain, rows = {"ranks": 2, "gain": True}, {"ranks": 2, "optimizer": "adafactor"}
    linear = {"placement": "linear"}
    cases = [
        (gain, [gain, {**gain, **linear}, *with_zero({**gain, **linear})]),
        ({**gain, "zero": 1}, [{**gain, **linear}]),
        (rows, [rows, {**rows, **linear}]),
    ]
    launch("support.resume_ranks:resumes", 2, {"folder": str(tmp_path / "fp32"), "cases": cases}, timeout=200)
    fp16 = {**gain, "dtype": "float16"}
    case = {"folder": str(tmp_path / "fp16"), "cases": [(fp16, [{**fp16, **linear}])], "tolerance": 2e-3}
    launch("support.resume_ranks:resumes", 2, case, timeout=200)


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    launch("support.resume_ranks:refuses", 2, {"folder": str(tmp_path)}, timeout=200)


class Stranger:
    """A class that no checkpoint of ours holds."""


def test_only_tensors_and_plain_data_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "note": [1, "x"]}, tmp_path / "plain.pt")
    assert load_safely(tmp_path / "plain.pt")["note"] == [1, "x"]
    torch.save({"a": Stranger()}, tmp_path / "stranger.pt")
    with pytest.raises(FileError, match=r"stranger\.pt: cannot be read safely.*Stranger.*add_safe_globals"):
        load_safely(tmp_path / "stranger.pt")
    with pytest.raises(FileError, match="found none; it was not saved whole"):
        load_safely(tmp_path / "absent.pt")


def test_what_is_saved_and_not_loaded_must_be_the_same() -> None:
    """Constants of quantized weights: torch would refuse them, and weights would be read with others."""
    layer, other = (nn.Sequential(Linear4bit(nn.Linear(4, 4)), nn.Linear(4, 2)) for _ in "ab")
    state = layer.state_dict()
    check_layer(layer, state, Path("file"), strict=True)
    layer.load_state_dict(state)
    with pytest.raises(FileError, match=r"file: does not fit its layer Sequential: 0\.weight\.absmax.*save_lora\(\)"):
        check_layer(layer, other.state_dict(), Path("file"), strict=False)
    with pytest.raises(FileError, match=r"missing 0\.weight\.absmax"):
        check_layer(layer, state, Path("file"), strict=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK_FILE)


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "step1")
    folder.prepare()
    assert find_tag(tmp_path, None) is None and not (tmp_path / "step1").exists()
    (tmp_path / folder.writing / "file").write_text("one")
    folder.commit(save_latest=True)
    assert find_tag(tmp_path, None) == "step1"
    assert names_in(tmp_path) == ["latest", "step1"]


def test_saving_over_a_checkpoint_never_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, "step1")

    def write(text: str) -> None:
        folder.prepare()
        (tmp_path / folder.writing / "file").write_text(text)

    def dies(source: Path, target: Path) -> None:
        if source.name == folder.writing:
            raise KeyboardInterrupt
        source.rename(target)

    write("one")
    folder.commit(save_latest=True)
    write("two")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("deepspeed_pulse.engine.checkpoints.files.rename", dies)
        folder.commit(save_latest=True)
    assert not (tmp_path / "step1").exists()
    folder.recover()
    assert (tmp_path / "step1" / "file").read_text() == "one"
    folder.discard()
    assert names_in(tmp_path) == ["latest", "step1"]


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    for text in "ab":
        rename(beside(tmp_path / "latest", text), tmp_path / "latest")
    assert names_in(tmp_path) == ["latest"] and (tmp_path / "latest").read_text() == "b"
