"""Costs that benchmarks keep: made again when the sources that made them have changed, and never half a file."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


def test_what_is_kept_is_made_once_for_the_same_sources(tmp_path: Path) -> None:
    from sources import digest_of, kept

    counting = tmp_path / "counting.py"
    counting.write_text("TFLOPS = 1")
    path = tmp_path / "kept" / "sdxl, fine.json"
    assert [kept(path, lambda text=text: text, counting) for text in ("first", "second")] == ["first", "first"]
    digest_of.cache_clear()  # as in another process
    counting.write_text("TFLOPS = 2")
    assert kept(path, lambda: "third", counting) == "third"
    assert sorted(file.read_text() for file in path.parent.iterdir()) == ["first", "third"]


def test_a_run_that_ends_while_it_writes_leaves_no_cut_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sources import kept

    def killed(path: Path, text: str, **_: str) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    path = tmp_path / "unet.json"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            kept(path, lambda: "all of it")
    assert kept(path, lambda: "all of it") == "all of it"


def test_every_estimate_is_kept_under_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder of an older checkout nothing is read."""
    import estimated
    from backbones import costs
    from slow_network import cases

    from deepspeed_pulse.ir.profile import LayerCost, Profile

    layer = LayerCost(name="l", forward_ms=1.0, backward_ms=2.0, param_bytes=1, activation_bytes=1, output_bytes=1)
    made = Profile(name="new", device="none", dtype="float32", microbatch_size=1, layers=(layer,))
    monkeypatch.setattr(estimated, "_estimated", lambda name: made.to_json())
    monkeypatch.setattr(cases, "_estimated", lambda name: made.to_json())
    monkeypatch.setattr(costs, "_estimated", lambda name: [made, made])
    for name in ("sd15.json", "sd15 vae.json", "sd15 text0.json", "slow_network_uvit.json"):
        (tmp_path / name).write_text("older")
    assert estimated.Profiles(tmp_path)("sd15") == made
    assert costs.encoders("sd15", tmp_path) == {"sd15 vae": made, "sd15 text0": made}
    assert cases.profile("uvit", tmp_path)["name"] == "new"
