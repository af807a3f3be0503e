"""Scripts of the shapes that verl publishes, with the files that they name: nothing of a task is lost in silence."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_compat_verl.conversion import Conversion
from agentrl_compat_verl.convert import convert
from agentrl_compat_verl.reading import read
from agentrl_compat_verl.shell import Script
from agentrl_core.api import ConfigError

ROOT = Path(__file__).parents[4]
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"

LAUNCH = r"""
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/examples/turns/config"
N=${N:-4}

CONFIG=(
    --config-path="$CONFIG_PATH"
    --config-name='turns'
)
DATA=(
    data.train_files=$HOME/train.parquet   # a comment
    data.train_batch_size=$((N * 16))
    algorithm.adv_estimator=grpo
)
MODEL=( actor_rollout_ref.model.path=org/small )
EXTRA=()
python3 -m verl.trainer.main_ppo "${CONFIG[@]}" "${DATA[@]}" "${MODEL[@]}" "${EXTRA[@]}" \
    MORE "$@"
"""
PRIMARY = {
    "hydra": {"searchpath": ["file://verl/trainer/config"]},
    "defaults": ["ppo_trainer", {"limits@data": "short"}, "_self_"],
    "data": {"max_response_length": 1024, "seed": "${oc.env:SEED,5}", "val_files": "${data.train_files}"},
    "actor_rollout_ref": {"rollout": {"name": "sglang", "multi_turn": {"enable": True, "max_assistant_turns": 5}}},
}
SCHEMA = {"type": "function", "function": {"name": "check", "description": "Checks.", "parameters": {}}}
TOOLS = {
    "check": [
        {"class_name": "my.pack.checks.Check", "config": {"type": "native", "penalty": 1}, "tool_schema": SCHEMA}
    ],
    "sandbox": [
        {
            "class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool",
            "config": {"sandbox_fusion_url": "http://h:1/run_code", "num_workers": 9, "default_timeout": 40, "rate": 1},
            "tool_schema": SCHEMA,
        }
    ],
    "search": [
        {
            "class_name": "verl.tools.search_tool.SearchTool",
            "config": {"retrieval_service_url": "http://h:2/retrieve", "num_workers": 7, "timeout": 11, "topk": 4},
        }
    ],
    "mcp": [
        {
            "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
            "config": {"timeout": 50, "type": "mcp"},
            "mcp": {"mcp_servers_config_path": "./servers.json", "tool_selected_list": ["find"]},
        }
    ],
}
SERVERS = {"mcpServers": {"web": {"url": "http://h:3/mcp", "auth_token": "t0ken"}}}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one configuration and the files that scripts name."""
    config = tmp_path / "examples/turns/config"
    (config / "limits").mkdir(parents=True)
    (config / "turns.yaml").write_text(yaml.safe_dump(PRIMARY))
    (config / "limits/short.yaml").write_text("max_prompt_length: 77\nmax_response_length: 1\n")
    for name, tools in TOOLS.items():
        (config / f"{name}.yaml").write_text(yaml.safe_dump({"tools": tools}))
    (config / "servers.json").write_text(json.dumps(SERVERS))
    (config / "user.yaml").write_text(
        "interaction:\n- {name: user, class_name: my.users.User, config: {patience: 3}}\n"
    )
    (config / "loops.yaml").write_text("- {name: mine, _target_: my.loops.Mine}\n")
    (config / "functions.py").write_text("@function_tool\ndef add(a: int) -> int: ...\n\ndef helper(): ...\n")
    return tmp_path


def script(checkout: Path, *more: str, name: str = "run.sh") -> Path:
    path = checkout / "examples/turns" / name
    path.write_text(LAUNCH.replace("MORE", " \\\n    ".join(more)))
    return path


def converted(checkout: Path, *more: str) -> Conversion:
    return convert(read([str(script(checkout, *more))], {"HOME": "/home/me"}))


def tool_config(name: str) -> str:
    return f'{TURNS}.tool_config_path="$PROJECT_DIR/examples/turns/config/{name}.yaml"'


def test_the_files_of_hydra_are_read_in_their_order(checkout: Path) -> None:
    result = converted(checkout, f"{TURNS}.max_assistant_turns=3")
    expected = {
        "data.train_files": ["/home/me/train.parquet"],
        "data.validation_files": ["/home/me/train.parquet"],
        "data.batch_size": 64,
        "data.max_prompt_length": 77,
        "data.max_response_length": None,
        "rollout.max_response_length": 1024,
        "rollout.engine.name": "sglang",
        "trainer.seed": 5,
        "rollout.agent.loops.0.config.max_assistant_turns": 3,
    }
    assert {key: result.values.get(key) for key in expected} == expected
    assert not result.incomplete


@pytest.mark.parametrize(
    ("name", "slot", "said"),
    [
        (
            "check",
            {"name": "./checks.py:Check", "config": {"penalty": 1, "tool_schema": SCHEMA}},
            "port my.pack.checks.Check into checks.py",
        ),
        (
            "sandbox",
            {
                "name": "remote_python",
                "config": {"url": "http://h:1", "max_concurrent": 9, "timeout": 40, "answer_timeout": 55.0},
                "timeout": 70.0,
            },
            "sees python(code) instead of check",
        ),
        (
            "search",
            {
                "name": "remote_search",
                "config": {"url": "http://h:2/retrieve", "max_concurrent": 7, "timeout": 11, "documents": 4},
                "timeout": 41.0,
            },
            "sees search(query)",
        ),
        (
            "mcp",
            {
                "name": "mcp",
                "config": {
                    "servers": {
                        "web": {
                            "url": "http://h:3/mcp",
                            "headers": {"Authorization": "Bearer ${oc.env:MCP_TOKEN}"},
                            "tools": ["find"],
                        }
                    }
                },
                "timeout": 50.0,
            },
            "export MCP_TOKEN",
        ),
    ],
)
def test_tool_configs_become_tools(checkout: Path, name: str, slot: dict[str, Any], said: str) -> None:
    result = converted(checkout, tool_config(name))
    assert result.tree["tools"] == [slot] and not result.incomplete
    assert said in " ".join(result.decisions.values())
    assert "t0ken" not in yaml.safe_dump(result.tree)
    unmentioned = {"rate"} if name == "sandbox" else set()
    assert all(any(key.endswith(f"config.{each}") for key in result.missing) for each in unmentioned)


def test_functions_interactions_and_loops(checkout: Path) -> None:
    folder = "examples/turns/config"
    result = converted(
        checkout,
        f"{TURNS}.function_tool_path={folder}/functions.py",
        f"{TURNS}.interaction_config_path={folder}/user.yaml",
        f"{ROLLOUT}.agent.agent_loop_config_path={folder}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=mine",
    )
    assert result.tree["tools"] == ["./functions.py:add"]
    assert result.tree["interactions"] == [{"name": "./users.py:User", "config": {"patience": 3}}]
    assert result.tree["rollout"]["agent"]["loops"] == ["./loops.py:Mine"]
    said = " ".join(result.decisions.values())
    assert all(text in said for text in ("port my.users.User", "port my.loops.Mine", "copy functions.py"))
    assert not result.incomplete


@pytest.mark.parametrize("value", ["nowhere.yaml", "$SOMEWHERE/tools.yaml", "$(find . -name tools.yaml)"])
@pytest.mark.parametrize(
    "key", [f"{TURNS}.{name}" for name in ("tool_config_path", "function_tool_path", "interaction_config_path")]
)
def test_a_file_that_is_not_found_never_makes_a_task_of_one_turn(checkout: Path, key: str, value: str) -> None:
    path = checkout / "plain.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m {key}={value}\n")
    result = convert(read([str(path)], {}))
    assert key in result.incomplete
    assert result.tree["rollout"]["agent"]["loops"][0]["name"] == "tool_agent"


def test_turns_of_the_user_bound_those_of_the_policy(checkout: Path) -> None:
    """verl counts the answers of tools: after the last one the policy has one turn more."""
    result = converted(checkout, tool_config("check"), f"{TURNS}.max_user_turns=1")
    assert result.tree["rollout"]["agent"]["loops"][0]["config"]["max_assistant_turns"] == 2


def test_images_are_converted(checkout: Path) -> None:
    result = converted(
        checkout,
        "data.image_key=pictures",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B",
        "data.return_multi_modal_inputs=True",
        "actor_rollout_ref.actor.freeze_vision_tower=True",
        "actor_rollout_ref.rollout.limit_images=4",
    )
    assert not result.incomplete and not result.missing
    assert result.tree["data"]["dataset"]["config"]["image_key"] == "pictures"
    assert result.tree["model"]["freeze"] == ["vision"] and result.tree["model"]["images"] == {"max_count": 4}
    plain = converted(checkout, "data.image_key=images", "actor_rollout_ref.rollout.limit_images=null")
    assert not {"freeze", "images"} & plain.tree["model"].keys()
    assert "image_key" not in plain.tree["data"].get("dataset", {}).get("config", {})


@pytest.mark.parametrize("key", ["data.video_key", "data.audio_key"])
def test_videos_and_audio_have_no_counterpart(checkout: Path, key: str) -> None:
    result = converted(checkout, f"{key}=clips")
    assert "no counterpart: agentrl has images, and no videos or audio" in result.incomplete["videos"]
    assert key in result.incomplete["videos"] and key in result.missing
    assert "videos" not in converted(checkout, f"{key}=null").incomplete


@pytest.mark.parametrize("argument", ["--config-name=other", "--config-name=$WHICH", "-cn other"])
def test_a_configuration_that_is_not_found_is_said(checkout: Path, argument: str) -> None:
    result = converted(checkout, argument)
    assert any(
        "other.yaml was not found" in text or "only the running script" in text for text in result.incomplete.values()
    )


def test_a_training_of_another_kind_is_said(tmp_path: Path) -> None:
    path = tmp_path / "sft.sh"
    path.write_text("torchrun -m verl.trainer.fsdp_sft_trainer data.train_batch_size=4\n")
    assert "reinforcement learning only" in " ".join(convert(read([str(path)], {})).incomplete.values())


def test_groups_and_deletions_of_hydra(checkout: Path) -> None:
    result = converted(checkout, "model_engine=other", "~data.seed")
    assert "model_engine" in result.decisions and "trainer.seed" not in result.values


def test_the_command_fails_where_the_task_would_be_another(checkout: Path) -> None:
    for name, code in (("check", 0), ("nowhere", 1)):
        output = checkout / "config.yaml"
        path = script(checkout, tool_config(name))
        command = [sys.executable, "-m", "agentrl_core.cli.main", "from-verl", str(path), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        assert ("INCOMPLETE, the configuration is not the same task (1):" in done.stderr) == bool(code)
        assert yaml.safe_load(output.read_text())["rollout"]["agent"]["loops"][0]["name"] == "tool_agent"


def test_damaged_files_are_named(checkout: Path) -> None:
    (checkout / "examples/turns/config/check.yaml").write_text("tools: {a: 1}")
    assert "expected a list" in " ".join(converted(checkout, tool_config("check")).incomplete.values())
    (checkout / "examples/turns/config/check.yaml").write_text("tools: [")
    with pytest.raises(ConfigError, match="check.yaml: not valid YAML"):
        converted(checkout, tool_config("check"))


def words(text: str, **environment: str) -> list[list[str]]:
    return [[word.text for word in command] for command in Script(text, environment).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 'b c' \"d $X\" e\\ f", [["a", "b c", "d 1", "e f"]]),
        ("Y='two\nlines'\nrun \"$Y\"", [["run", "two\nlines"]]),
        ("run ${Z:-$X} ${X:+set} ${Z:+set} $((X + 2 * 3)) `date`", [["run", "1", "set", "", "7", "`date`"]]),
        ("A=(p 'q r')\nA+=(s)\nrun \"${A[@]}\" \"$@\" ${A[*]}", [["run", "p", "q r", "s", "p", "q r", "s"]]),
        ("cat <<EOF\nrun no\nEOF\nrun yes", [["cat"], ["run", "yes"]]),
        ("if [ $X = 1 ]; then V=a; else V=b; fi; run $V", [["run", "a"]]),
        ("if [ -z \"$X\" ]; then V=a; elif [ $X != 2 ]; then V=b; else V=c; fi\nrun $V", [["run", "b"]]),
        ("case \"$X\" in\n 0) V=a;;\n 1|2) V=b;;\n *) V=c;;\nesac\nrun $V", [["run", "b"]]),
        ("export V=3 W=4; X=5 run $V$W", [["X=5", "run", "34"]]),
        ("run a && run b || run c | run d", [["run", "a"], ["run", "b"], ["run", "c"], ["run", "d"]]),
        ("run $UNSET ${UNSET} '$X' \\$X", [["run", "$UNSET", "${UNSET}", "$X", "$X"]]),
    ],
)  # fmt: skip
def test_words_of_a_shell(text: str, expected: list[list[str]]) -> None:
    assert words(text, X="1") == expected


def test_words_are_those_that_bash_makes(tmp_path: Path) -> None:
    text = LAUNCH.replace("python3", "printf '%s\\n'").replace("MORE", "a=\"b c\" 'd e' \\\n f=${G:-h}")
    (tmp_path / "run.sh").write_text(text)
    command = ["bash", "run.sh"]
    environment = {"HOME": "/h", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    (ours,) = words(text, **environment)
    assert [word.replace("./", f"{tmp_path}/") for word in ours[2:]] == done.stdout.splitlines()


def test_branches_that_cannot_be_known_are_listed(checkout: Path) -> None:
    path = checkout / "branches.sh"
    path.write_text(
        "D=$(probe)\nLR=1e-6\nif [ $D = gpu ]; then N=8; else N=16; fi\nif [ $D = npu ]; then LR=1e-5; fi\n"
        "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$N actor_rollout_ref.actor.optim.lr=$LR\n"
    )
    result = convert(read([str(path)], {}))
    assert result.values["cluster.processes_per_node"] == 8 and "taken: 8, not: 16" in str(result.decisions)
    assert "taken: 1e-6, not: 1e-5" in result.decisions["actor_rollout_ref.actor.optim.lr"]


def test_the_table_of_scripts(checkout: Path) -> None:
    """`benchmarks/verl_scripts.py`, which makes the table of the docs from a checkout of verl."""
    script(checkout, tool_config("check"), name="a.sh")
    script(checkout, tool_config("search"), name="b.sh")
    script(checkout, "data.video_key=videos", name="c.sh")
    (checkout / "examples/plain.sh").write_text("python3 -m verl.trainer.main_ppo data.seed=1\n")
    command = [sys.executable, str(ROOT / "benchmarks/verl_scripts.py"), str(checkout), "examples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[2:] == [
        "| `examples/turns/a.sh` | to decide | port `Check` |",
        "| `examples/turns/b.sh` | converted | `remote_search` |",
        "| `examples/turns/c.sh` | no counterpart | videos |",
    ]


ENTRY = "python3 -m verl.trainer.main_ppo "
ALIASES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"c.yaml": "defaults: [d]", "d.yaml": "defaults: [c]"}, "lead back to it: c.yaml -> d.yaml -> c.yaml"),
        ({"c.yaml": "defaults: [1]"}, "expected NAME or GROUP: NAME, found 1"),
        ({"c.yaml": "defaults: 5"}, "defaults: expected a list, found int"),
        ({"c.yaml": "hydra: [a]"}, "hydra: expected a mapping"),
        ({"c.yaml": "hydra: {searchpath: 4}"}, "hydra: expected a mapping"),
        ({"c.yaml": ALIASES}, "more than 100000 values"),
        ({"c.yaml": "trainer: &a {b: *a}"}, "nested more than 50 deep"),
        ({"c.yaml": "trainer: {logger: &a [*a]}"}, "nested more than 50 deep"),
        ({"c.yaml": "trainer: {logger: !!set {a}}"}, "it holds a set"),
        ({"c.yaml": "{a: " * 2000 + "1" + "}" * 2000}, "RecursionError"),
        ({"c.yaml": "a: 2020-99-99"}, "month must be in 1..12"),
        ({"c.yaml": "a: !!int b"}, "invalid literal"),
        ({"c.yaml": "a: !!timestamp b"}, "not valid YAML"),
        ({"c.yaml": f"a: {'9' * 6000}"}, "4300 digits"),
        ({"c.yaml": "#" * 300_000}, "larger than 262144 bytes"),
        ({"run.sh": "#" * 300_000}, "larger than 262144 bytes"),
        ({"run.sh": "A=aaaaaaaaaa\n" + "A=$A$A$A$A\n" * 30}, "the variable A has more than 100000 characters"),
        ({"run.sh": f"{ENTRY} trainer.a={'${A:-' * 3000}x{'}' * 3000}"}, "nested too deeply"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_and_ends(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in {"run.sh": f"{ENTRY} --config-path=. --config-name=c data.seed=1", **files}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read([str(tmp_path / "run.sh")])


SERVICE = "verl.tools.sandbox_fusion_tools.SandboxFusionTool"


@pytest.mark.parametrize(
    "tool",
    [
        {"class_name": SERVICE, "config": [1]},
        {"class_name": SERVICE, "config": {"default_timeout": "soon"}},
        {"class_name": SERVICE, "tool_schema": [2]},
        {"class_name": SERVICE, "config": {1: 2, "b": 3}, "tool_schema": {"function": "x"}},
        {"class_name": "my.Tool", "config": "x"},
        {1: 2},
        {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "mcp": [1]},
    ],
)
def test_a_tool_of_another_form_is_reported_as_missing(tmp_path: Path, tool: dict[Any, Any]) -> None:
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"tools": [tool]}))
    (tmp_path / "run.sh").write_text(f"{ENTRY} {TURNS}.enable=True {TURNS}.tool_config_path=t.yaml")
    result = convert(read([str(tmp_path / "run.sh")]))
    assert [key for key in result.incomplete if key.endswith("t.yaml: tools.0")]


@pytest.mark.parametrize("code", [b"def f(:", b"x = 1\0", b"x = \xff", b"x = " + b"-" * 100_000 + b"1"])
def test_function_tools_that_are_no_python_are_reported_as_missing(tmp_path: Path, code: bytes) -> None:
    (tmp_path / "t.py").write_bytes(code)
    (tmp_path / "run.sh").write_text(f"{ENTRY} {TURNS}.enable=True {TURNS}.function_tool_path=t.py")
    result = convert(read([str(tmp_path / "run.sh")]))
    assert "no Python that can be read" in result.incomplete[f"{TURNS}.function_tool_path"]


def test_words_that_are_not_understood_are_noted_and_what_is_only_printed_is_no_override(tmp_path: Path) -> None:
    script = f"{ENTRY} trainer.{{total_epochs,save_freq}}=3 data.seed=4 'trainer.logger={'[' * 3000}'\n"
    (tmp_path / "run.sh").write_text(f"{script}N=$((9**9**9))\necho data.seed=$N data.seed=9\n")
    found = read([str(tmp_path / "run.sh")])
    assert found.values["data.seed"] == 4
    assert "not read" in found.notes["trainer.{total_epochs,save_freq}=3"]
