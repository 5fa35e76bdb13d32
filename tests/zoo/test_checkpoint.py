"""Saving and loading a model."""

import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import zoo
from zoo import registry
from zoo.errors import ZooConfigError
from zoo.mixers.full_attention import FullAttention
from zoo.mixers.softmax_attention import AttentionOptions

TOKENS = torch.arange(40).reshape(2, 20)


@pytest.mark.parametrize("overrides", [(), ("tie_embeddings=true",)], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_model_is_the_same(tmp_path: Path, overrides: tuple[str, ...], dtype: torch.dtype) -> None:
    model = zoo.build("deltanet-global-tiny", ["layers.3.mixer.output_gate=true", *overrides], dtype=dtype)
    zoo.save(model, tmp_path / "model")
    loaded = zoo.load(tmp_path / "model")
    assert loaded.config == model.config
    assert loaded(TOKENS).equal(model(TOKENS))
    assert loaded.embedding.weight.requires_grad
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.yaml", "model.safetensors"]


def test_a_compiled_model_saves_and_an_earlier_save_is_replaced(tmp_path: Path) -> None:
    for seed in (0, 1):
        model = zoo.build("transformer-tiny", ["num_layers=1"], seed=seed)
        zoo.save(torch.compile(model), tmp_path)  # pyright: ignore[reportArgumentType]
        assert zoo.load(tmp_path)(TOKENS).equal(model(TOKENS))


def test_save_refuses_what_it_would_destroy_or_cannot_save(tmp_path: Path) -> None:
    model = zoo.build("transformer-tiny", ["num_layers=1"])
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds something other than a saved model \(thesis.tex\)"):
        zoo.save(model, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ValueError, match=r"thesis.tex is a file"):
        zoo.save(model, tmp_path / "thesis.tex")
    with pytest.raises(TypeError, match="expected a LanguageModel, got Linear"):
        zoo.save(torch.nn.Linear(1, 1), tmp_path / "new")
    with pytest.raises(ValueError, match="meta device"):
        zoo.save(zoo.build("transformer-tiny", device="meta"), tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    zoo.save(zoo.build("transformer-tiny", ["num_layers=1"]), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors"])
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ZooConfigError, match=f"{name} is missing"):
        zoo.load(saved)


def test_damaged_and_foreign_weights(saved: Path) -> None:
    config = (saved / "config.yaml").read_text()
    (saved / "config.yaml").write_text(config.replace("vocab_size: 256", "vocab_size: 300"))
    with pytest.raises(ValueError, match=r"embedding.weight has shape \[256, 128\], expected \[300, 128\]"):
        zoo.load(saved)
    (saved / "config.yaml").write_text(config.replace("tie_embeddings: false", "tie_embeddings: true"))
    with pytest.raises(ValueError, match=r"head.weight is not part of this model"):
        zoo.load(saved)
    (saved / "config.yaml").write_text(config)
    (saved / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        zoo.load(saved)


class Buffered(FullAttention):
    def __init__(self, options: AttentionOptions, dim: int) -> None:
        super().__init__(options, dim)
        self.register_buffer("decay", torch.ones(3), persistent=False)


def test_a_buffer_that_was_not_saved_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = dict(registry._entries())
    monkeypatch.setattr(registry, "_entries", lambda: entries)
    zoo.register_mixer("buffered")(Buffered)
    zoo.save(zoo.build("transformer-tiny", ["layers.0.mixer=buffered"]), tmp_path / "model")
    with pytest.raises(ValueError, match=r"blocks.0.mixer.decay is missing: only persistent buffers are saved"):
        zoo.load(tmp_path / "model")


def test_nothing_in_a_folder_is_executed_unless_trusted(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harmful.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = (saved / "config.yaml").read_text()
    (saved / "config.yaml").write_text(config.replace("full_attention", "harmful.Mixer"))
    with pytest.raises(ZooConfigError, match=r"layers.0.mixer.*class path"):
        zoo.load(saved)
    assert "harmful" not in sys.modules
    with pytest.raises(ZooConfigError, match=r"cannot import 'harmful.Mixer'.*it ran"):
        zoo.load(saved, trust_code=True)


@pytest.mark.parametrize("value", ["${evaluate:'1'}", "${oc.env:HOME}", "${vocab_size}"])
def test_nothing_is_looked_up_for_a_folder(saved: Path, value: str) -> None:
    called: list[str] = []
    OmegaConf.register_resolver("evaluate", called.append, replace=True)
    config = (saved / "config.yaml").read_text()
    (saved / "config.yaml").write_text(config.replace("name: transformer-tiny", f'name: "{value}"'))
    try:
        with pytest.raises(ZooConfigError, match=r"name: got .*values without \$\{...\} in a file that is not trusted"):
            zoo.load(saved)
    finally:
        OmegaConf.clear_resolver("evaluate")
    assert not called


def test_weights_may_be_read_by_whoever_may_read_the_configuration(saved: Path) -> None:
    assert (saved / "model.safetensors").stat().st_mode == (saved / "config.yaml").stat().st_mode


def test_weights_of_mixed_dtypes(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["norm.weight"] = weights["norm.weight"].half()
    save_file(weights, saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected one floating-point dtype, got torch.float16, torch.float32"):
        zoo.load(saved)
