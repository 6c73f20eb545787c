"""The typed configuration of a recipe: every file is valid, every mistake is named, all at once."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_examples import recipes
from intune_callbacks.config import MODES, TunerConfig
from intune_callbacks.errors import ConfigError

pytest.importorskip("yaml")

from dlrm_examples.recipes.config import Config, Model, dump, load

DLRM = recipes.source("dlrm-lightning")


def write(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def test_there_are_recipes() -> None:
    assert "dlrm-lightning" in recipes.names()


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_valid_and_short(name: str) -> None:
    text = recipes.source(name).read_text()
    load(recipes.source(name))
    assert 15 <= len(text.splitlines()) <= 40
    assert f"intune run {name}" in text, "the header holds the command"


def test_overrides_win_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "batch_size: 64\nmodel:\n  embedding_dim: 8\n")
    resolved = load(file, ["model.embedding_dim=4", "trainer.learning_rate=1e-3"])
    assert resolved.config.batch_size == 64
    assert resolved.config.model == replace(Model(), embedding_dim=4)
    assert resolved.config.trainer.learning_rate == 1e-3
    assert resolved.sources == {
        "batch_size": "recipe",
        "model.embedding_dim": "command line",
        "trainer.learning_rate": "command line",
    }


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load(write(tmp_path, "")).config == Config()


@pytest.mark.parametrize("mode", MODES)
def test_mode_sources(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, f"intune: {{mode: {mode}}}\n")  # YAML reads a bare off as false
    assert load(file).mode == (mode, "recipe")
    assert load(file, [f"intune.mode={mode}"]).mode == (mode, "command line")
    monkeypatch.setenv("INTUNE_MODE", "advise")
    assert load(file, [f"intune.mode={mode}"]).mode == ("advise", "INTUNE_MODE")


def test_the_report_says_where_each_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "intune:\n  policy: even\n  cpus: 3\n  warmup_batches: 20\n")
    resolved = load(file, ["intune.cpus=5", "intune.mode=advise"])
    settings = resolved.settings
    assert set(settings) == {field.name for field in fields(TunerConfig)} | {"warm_start"}
    assert settings["mode"] == {"value": "advise", "source": "command line"}
    assert settings["policy"] == {"value": "even", "source": "recipe"}
    assert settings["cpus"] == {"value": 5.0, "source": "command line"}
    assert settings["warmup_batches"] == {"value": 20, "source": "recipe"}  # though it is the default, too
    assert settings["memory_soft_limit"] == {"value": 0.90, "source": "default"}
    monkeypatch.setenv("INTUNE_MODE", "off")
    assert resolved.settings["mode"] == {"value": "off", "source": "INTUNE_MODE"}


def test_mode_defaults_to_tune(tmp_path: Path) -> None:
    assert load(write(tmp_path, "seed: 3\n")).mode == ("tune", "default")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batchsize=4", "batchsize: no such key; did you mean 'batch_size'?"),
        ("intune.polcy=even", "intune.polcy: no such key; did you mean 'intune.policy'?"),
        ("embedding_dim=4", "did you mean 'model.embedding_dim'?"),
        ("intune.mode=tun", "did you mean 'tune'?"),
        ("batch_size=x", "batch_size='x': expected an integer, got str"),
        ("batch_size=1.5", "batch_size=1.5: expected an integer, got float"),
        ("batch_size=true", "batch_size=True: expected an integer, got bool"),
        ("batch_size=0", "batch_size=0: expected a number from 1"),
        ("read_latency_ms=nan", "read_latency_ms=nan: expected a number"),
        ("model.top_mlp=[4, x]", "expected a list of positive integers"),
        ("model=4", "model=4: expected a section with the keys network, embedding_dim"),
        ("seed.x=4", "'seed' holds a value"),
        ("batch_size", "expected key=value"),
        ("batch_size=[1", "not valid YAML"),
        ("model.tables=criteo-1tb", "did you mean 'criteo-1tb-"),
        ("model.interaction=dcnv2", "model.interaction='dcnv2': expected one of dot, dcn; did you mean 'dcn'?"),
        ("model.bag_sizes=[1, 2]", "model.bag_sizes: 2 numbers given, expected 26, one per table"),
        ("model.bag_sizes=3", "model.bag_sizes=3: expected a list of positive integers"),
        ("trainer.optimizer=adam", "did you mean 'adagrad'?"),
        ("trainer.strategy=ddp", "trainer.strategy='ddp': expected one of auto, hybrid"),
        ("trainer.devices=2", "trainer.devices=2: strategy=auto trains on one device; expected strategy=hybrid"),
        ("trainer.decay_start_step=5", "there is no decay without decay_steps"),
        ("data=/no/such/file", "data=/no/such/file: no such file or directory"),
    ],
)
def test_a_mistake_is_named(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(DLRM, [override, "batch_sise=1"])
    assert sentence in str(error.value)
    assert any("batch_sise" in problem for problem in error.value.problems), "the other problem is reported too"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.warmup_steps=9", "trainer.decay_steps=3"], "decay_start_step=0: expected warmup_steps=9 or later"),
        (["trainer.devices=3", "trainer.strategy=hybrid"], "batch_size=128: expected a multiple of trainer.devices=3"),
        (["framework=keras", "trainer.optimizer=rowwise-adagrad"], "Keras has no such optimiser"),
    ],
)
def test_values_that_do_not_go_together(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(DLRM, overrides)
    assert len(error.value.problems) == 1
    assert sentence in str(error.value)


def test_values_that_do() -> None:
    hybrid = ["trainer.strategy=hybrid", "trainer.devices=4", "trainer.optimizer=rowwise-adagrad"]
    assert load(DLRM, [*hybrid, "framework=keras"]).config.trainer.devices == 4
    bags = load(DLRM, [f"model.bag_sizes={[2] * 26}", "model.interaction=dcn"]).config.model
    assert (bags.bag_sizes, bags.interaction) == ((2,) * 26, "dcn")
    rates = ["trainer.warmup_steps=9", "trainer.decay_start_step=9", "trainer.decay_steps=3"]
    assert load(DLRM, rates).config.trainer.decay_steps == 3


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 'key: value' lines, got list"):
        load(write(tmp_path, "- 1\n"))


@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 10**7),
    st.floats(0, 60_000),
    st.lists(st.integers(1, 4096), min_size=1, max_size=5).map(tuple),
)
def test_dump_and_load_are_inverse(
    tmp_path_factory: pytest.TempPathFactory, seed: int, batch_size: int, latency_ms: float, widths: tuple[int, ...]
) -> None:
    config = Config(seed=seed, batch_size=batch_size, read_latency_ms=latency_ms, model=Model(top_mlp=widths))
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump(config))
    assert load(file).config == config
