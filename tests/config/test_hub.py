"""Models that are named as on the Hugging Face hub; the cache is made here, and nothing is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from agentrl_core.api.errors import ConfigError

COMMIT, OLDER = "a" * 40, "b" * 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A HF_HOME that has two revisions of org/name, and of org/empty a tokenizer only."""
    for name, refs in (("name", {"main": COMMIT, "v1": OLDER}), ("empty", {"main": COMMIT})):
        folder = tmp_path / "home" / "hub" / f"models--org--{name}"
        (folder / "refs").mkdir(parents=True)
        for ref, commit in refs.items():
            (folder / "refs" / ref).write_text(commit)
            snapshot = folder / "snapshots" / commit
            snapshot.mkdir(parents=True)
            for file in ("config.json", "model.safetensors") if name == "name" else ("tokenizer.json",):
                (snapshot / file).write_text("{}")
    return tmp_path / "home"


@pytest.fixture
def offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What HF_HOME and HF_HUB_OFFLINE=1 mean to this process, which has imported huggingface_hub already."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home / "hub" / "models--org--name" / "snapshots"


@pytest.fixture
def path_of(write, valid, load):
    """A loaded configuration with this ``model.path``."""
    write("{}", "train.jsonl")
    return lambda value: load(valid, f"model.path={value}", check_files=True)


@pytest.mark.parametrize(
    ("name", "commit"), [("org/name", COMMIT), ("org/name@v1", OLDER), (f"org/name@{OLDER}", OLDER)]
)
def test_a_name_of_the_hub_is_its_directory_in_the_cache(offline, path_of, name, commit):
    assert path_of(name).model.path == str(offline / commit)


def test_critic_and_reference_too(offline, load, write, valid):
    write("{}", "train.jsonl")
    write("{}", "model/config.json")
    overrides = ("critic.path=org/name", "reference.path=org/name", "algorithm.advantage=gae", "algorithm.kl_coef=0.1")
    config = load(valid, *overrides, check_files=True)
    assert config.critic.path == config.reference.path == str(offline / COMMIT)


def test_a_directory_wins(offline, load, write, valid, tmp_path):
    write("{}", "train.jsonl")
    write("{}", "org/name/config.json")
    found = load(valid.replace("path: model", "path: org/name"), check_files=True)
    assert found.model.path == str(tmp_path / "org" / "name")


def test_a_configuration_is_shown_without_the_hub(load, valid, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert load(valid, "model.path=org/name").model.path == "org/name"


def test_a_name_that_is_neither_is_one_clear_error(offline, path_of):
    with pytest.raises(ConfigError) as caught:
        path_of("org/other")
    (problem,) = caught.value.problems
    assert problem.startswith("model.path (override 'model.path=org/other'): 'org/other' is neither a directory")
    assert "HF_HUB_OFFLINE is set, and the cache" in problem and "`hf download org/other`" in problem


def test_what_the_hub_says_is_part_of_the_error(path_of, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("401: Repository\n  not found")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=r"'org/other' is neither .*does not give it \(401: Repository not found\)"):
        path_of("org/other")


def test_a_snapshot_without_weights_is_refused(offline, path_of):
    with pytest.raises(ConfigError, match=r"'org/empty' is a model of the Hugging Face hub, and .* has no config.json"):
        path_of("org/empty")


def test_nothing_is_fetched_for_a_configuration_with_another_problem(load, valid, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ConfigError) as caught:
        load(valid, "model.path=org/name", "rollout.n=1", check_files=True)
    assert [problem.split()[0] for problem in caught.value.problems] == ["rollout.n", "data.train_files.0"]


def test_only_what_a_run_reads_is_asked_for(path_of, offline, monkeypatch):
    asked = {}

    def record(name, **options):
        asked.update(options, name=name)
        return str(offline / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    path_of("org/name@v1")
    assert asked["name"] == "org/name" and asked["revision"] == "v1"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(asked["allow_patterns"])
    assert "*.bin" not in asked["allow_patterns"]


def test_the_environment_says_where_the_cache_is(home):
    """As a user sets it, in a process of its own."""
    command = "import sys; from agentrl_core.config.hub import hub_directory; print(hub_directory(sys.argv[1]))"
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)

    def resolve(name):
        return subprocess.run(
            [sys.executable, "-c", command, name], env=environment, capture_output=True, text=True, timeout=120
        )

    found = resolve("org/name")
    assert found.stdout.strip() == str(home / "hub" / "models--org--name" / "snapshots" / COMMIT), found.stderr
    assert "HF_HUB_OFFLINE is set" in resolve("org/other").stderr
