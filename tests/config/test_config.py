"""A config is read completely or refused with its line and the closest valid key. A saved config is reproducible."""

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freescale import config
from freescale.cli.main import main
from freescale.config import RECIPES, DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.config.load import sections
from freescale.errors import ConfigError

POSITIVE = st.integers(1, 2**40)
DATA = st.builds(
    DataConfig,
    path=st.text(),
    order=st.sampled_from(["shuffle", "log"]),
    global_batch=POSITIVE,
    shards=POSITIVE,
    columns=st.lists(st.text()).map(tuple),
    split=st.sampled_from(["none", "last"]),
)
RUNS = st.builds(
    RunConfig,
    seed=st.integers(0, 2**63 - 1),
    data=DATA,
    model=st.builds(ModelConfig, dim=POSITIVE.map(lambda n: 4 * n), heads=st.just(1)),
)


@given(run=RUNS)
@example(run=RunConfig(train=TrainConfig(lr=1 / 3)))
def test_a_saved_config_round_trips(run: RunConfig) -> None:
    assert config.parse(config.to_toml(run)) == run


@given(run=RUNS)
def test_an_explained_config_round_trips(run: RunConfig) -> None:
    assert config.parse(config.to_toml(run, explain=True)) == run


def test_the_config_command_explains_every_field_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "hstu-ranking-synth", "--data.path", "somewhere"]) == 0
    text = capsys.readouterr().out
    assert config.parse(text) == config.override(RECIPES["hstu-ranking-synth"], ["--data.path", "somewhere"])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    fields = [place for place, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert len(fields) == sum(
        not (isinstance(value := getattr(part(), field.name), dict) or dataclasses.is_dataclass(value))
        for name, part in sections(RunConfig)
        for field in dataclasses.fields(part)
        if "NAME" not in name  # the recipe has no features
    )
    assert all(lines[place - 1].startswith("# ") for place in fields), "each has its documentation above it"
    assert '# Architecture. One of: "hstu", "sasrec".\nkind = "hstu"' in text


@pytest.mark.parametrize("name", ["hstu-kuairand", "hstu-large", "dlrm-v4"])
def test_recipes_for_gpus_state_their_precision(name: str) -> None:
    assert RECIPES[name].train.precision == "bf16"
    assert RECIPES[name].train.tf32


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_complete_config(name: str, tmp_path: Path) -> None:
    config.save(RECIPES[name], tmp_path / "deep" / "run.toml")
    assert config.resolve(str(tmp_path / "deep" / "run.toml")) == RECIPES[name]
    written = (tmp_path / "deep" / "run.toml").read_text()
    for section in (RECIPES[name].data, RECIPES[name].model, RECIPES[name].train, RECIPES[name].tables):
        for field in dataclasses.fields(section):
            assert f"{field.name} = " in written, "every field is written, so that later defaults have no effect"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("seed = 1\n[data]\nglobal_bach = 3\n", 3, "unknown key 'data.global_bach'.*did you mean 'global_batch'"),
        ("seed = 1\n\n[modl]\ndim = 3\n", 3, "unknown key 'modl'.*did you mean 'model'"),
        ("data.ordr = 'log'\n", 1, "unknown key 'data.ordr'.*did you mean 'order'"),
        ("[model]\n# dim = 1\nlayers = 2\ndim = 'wide'\n", 4, "model.dim = 'wide' has the wrong type.*whole number"),
        ("[data]\norder = 'shufle'\n", 2, "not one of its values.*did you mean 'shuffle'"),
        ("[data]\ncolumns = 'a'\n", 2, "write a list"),
        ("[data]\nworkers = true\n", 2, "whole number"),
        ("data = 3\n", 1, "write a table"),
        ("[model]\nheads = 3\ndim = 50\n", 2, "model.heads = 3 is not valid.*divisor of model.dim = 50"),
        ("[data]\n\nglobal_batch = 0\n", 3, "at least 1"),
        ("[data]\nsplit = 'time'\n", 1, "split_time"),
        ("seed = -1\n", 1, "between 0 and"),
        ("[model]\ndim = 50\n", 2, "multiple of 4.*replicated"),
        ("[tables]\nreplicated_rows = 'aut'\n", 2, "not one of its values.*did you mean 'auto'"),
        ("[tables]\nreplicated_rows = 1.5\n", 2, "write a whole number"),
        ("[tables]\nreplicated_rows = -1\n", 2, "replicated_rows = -1 is not valid.*0 or more"),
        ("[tables]\nreplicated_rows = 9\nplacement = 'replicated'\n", 2, "has all rows so"),
        ("[tables]\nreplicated_rows = 9\n[features.tag]\nids = 'dynamic'\nrows = 8\n", 2, "dynamic ids of tag"),
        ("[task]\nkind = 'ranking'\n", 1, "names of label columns"),
        ("[train]\nbeta2 = 1.0\n", 2, "below 1"),
        ("[train]\nkeep = 1\ntimeout = 0.0\n", 3, "train.timeout = 0.0 is not valid.*above 0"),
        ("[balance]\ncost = [1.0, -0.5, 1.0]\n", 2, "balance.cost.*none below 0"),
        ("[balance]\ntolerance = -0.01\n", 2, "balance.tolerance.*between 0 and 1"),
    ],
)
def test_an_invalid_key_or_value_is_reported_with_line_and_remedy(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert f"{path}, line {line}" in caught.value.where

    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("raw", [b"x = [", b"\xff\xfe", b"seed = 1\nseed = 2"])
def test_invalid_toml_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"TOML|UTF-8"):
        config.load(tmp_path / "run.toml")


@given(text=st.text() | st.text(alphabet="[]{}=\"'.#\n\\ abcdeimnortu0123456789"))
def test_any_text_gives_a_config_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(config.parse(text), RunConfig)


def test_any_field_can_be_set_by_a_flag() -> None:
    run = config.resolve(
        "tiny", ["--data.global-batch", "32", "--seed", "5", "--data.columns", "a", "b", "--model.kind", "sasrec"]
    )
    assert (run.data.global_batch, run.seed, run.data.columns, run.model.kind) == (32, 5, ("a", "b"), "sasrec")
    assert run.model.dim == RECIPES["tiny"].model.dim, "other fields come from the recipe"


@pytest.mark.parametrize("rows", [0, 7, "auto"])
def test_a_field_of_two_types_is_set_by_a_flag_or_a_file_and_round_trips(rows: int | str) -> None:
    run = config.resolve("tiny", ["--tables.replicated-rows", str(rows)])
    assert run.tables.replicated_rows == rows
    assert config.parse(config.to_toml(run)) == run


def test_a_misspelt_flag_exits_with_2_and_suggests_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config.resolve("tiny", ["--data.global-bach", "32"])
    assert caught.value.code == 2
    assert "--data.global-batch" in capsys.readouterr().err


def test_an_unknown_recipe_suggests_the_closest() -> None:
    with pytest.raises(ConfigError) as caught:
        config.resolve("hstu-ml1")
    assert "'hstu-ml1m'" in caught.value.remedy
    with pytest.raises(ConfigError, match="cannot be read"):
        config.resolve("no-such.toml")
