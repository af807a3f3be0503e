"""Starting a server, and what is said when that fails."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl_core.api import EngineContext, SamplingParams, WeightUpdate
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Broadcast
from agentrl_core.engine_kit.ports import held_port
from agentrl_engine_sglang import engine as engine_module
from agentrl_engine_sglang.client import SGLangClient
from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.engine import SGLangEngine
from agentrl_engine_sglang.launch import server_arguments
from agentrl_engine_sglang.process import ServerProcess
from agentrl_engine_sglang.weights import ServerWeights


def arguments(log: Path) -> list[str]:
    (line,) = (line for line in log.read_text().splitlines() if line.startswith("arguments "))
    words: list[str] = json.loads(line.removeprefix("arguments "))
    return words


def test_the_server_gets_what_the_context_and_the_options_say(serve, run, tmp_path) -> None:
    log = tmp_path / "logs" / "server.log"

    async def main() -> None:
        options = {"mem_fraction": 0.5, "server_args": {"attention_backend": "triton"}}
        async with serve(log_file=str(log), **options) as engine:
            await engine.health()

    run(main())
    words = arguments(log)
    pairs = dict(zip(words, words[1:], strict=False))
    expected = {
        "--dtype": "float32", "--context-length": "116", "--random-seed": "4", "--tp-size": "2", "--device": "cpu",
        "--mem-fraction-static": "0.5", "--attention-backend": "triton", "--max-total-tokens": str(64 * 116),
    }  # fmt: skip
    assert {name: pairs[name] for name in expected} == expected
    assert {"--skip-tokenizer-init", "--sleep-on-idle"} <= set(words)


def test_the_key_is_not_on_the_command_line(serve, run, tmp_path) -> None:
    log = tmp_path / "server.log"

    async def main() -> None:
        async with serve(log_file=str(log)) as engine:
            await engine.generate([1, 2, 3], SamplingParams(max_tokens=2), "a")
            key = engine._client._session.headers["Authorization"].removeprefix("Bearer ")
            assert key and key not in " ".join(arguments(log))
            command = Path(f"/proc/{engine._process.pid}/cmdline").read_text()
            assert "--config" in command and key not in command

    run(main())


def test_somebody_else_on_the_machine_cannot_use_the_server(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            await engine.generate([1, 2, 3], SamplingParams(max_tokens=2), "a")
            for key in ("", "guessed"):
                stranger = SGLangClient(engine._client.url, 5.0, engine._explain_end, key)
                with pytest.raises(EngineError, match="status 401: Unauthorized"):
                    await stranger.update_weights_from_disk("/tmp", 1)
                await stranger.close()

    run(main())


def test_on_a_gpu_that_it_shares_sglang_takes_what_the_trainer_leaves() -> None:
    """SGLang's fraction is of the memory that is free as it starts, and leaves activations and CUDA graphs out."""
    context = EngineContext("m", device="cuda", memory_share=0.4, memory_free=0.5)
    assert server_arguments(SGLangConfig(), context, "m", 1)["mem_fraction_static"] == 0.68
    assert server_arguments(SGLangConfig(mem_fraction=0.2), context, "m", 1)["mem_fraction_static"] == 0.2
    own = server_arguments(SGLangConfig(), EngineContext("m", device="cuda"), "m", 1)
    assert "mem_fraction_static" not in own and own["max_running_requests"] == 256
    assert server_arguments(SGLangConfig(), EngineContext("m"), "m", 1)["max_running_requests"] == 64


def test_hosts_of_a_replica_meet_where_the_core_says() -> None:
    place = {"tensor_parallel": 4, "nodes": 2, "rendezvous": "10.0.0.1:777"}
    head = server_arguments(SGLangConfig(), EngineContext("m", **place), "m", 1)
    other = server_arguments(SGLangConfig(), EngineContext("m", **place, node_rank=1), "m", 1)
    assert {name: value for name, value in other.items() if value != head[name]} == {"node_rank": 1}
    assert (head["nnodes"], head["node_rank"], head["dist_init_addr"]) == (2, 0, "10.0.0.1:777")


def test_a_replica_that_no_transport_reaches_is_refused_as_it_starts() -> None:
    with pytest.raises(EngineError, match="broadcast with tensor_parallel only.*pipeline_parallel=2.*or nodes to 1"):
        ServerWeights(EngineContext("m", pipeline_parallel=2, nodes=2))


def test_files_are_refused_where_they_do_not_reach_every_host() -> None:
    weights = ServerWeights(EngineContext("m", tensor_parallel=2, nodes=2))
    with pytest.raises(EngineError, match="files reach one host.*nodes=2; set weight_transfer to auto"):
        weights.check(WeightUpdate(files=("a",)))
    weights.check(WeightUpdate(broadcast=Broadcast("a:1", "gloo", 3, 1, ())))
    weights.close()


def test_the_served_folder_is_the_model_without_an_end_of_sequence(serve, run, model_path, tmp_path) -> None:
    log = tmp_path / "server.log"
    served: dict[str, object] = {}

    async def main() -> Path:
        async with serve(log_file=str(log)):
            words = arguments(log)
            folder = Path(words[words.index("--model-path") + 1])
            served.update({path.name: path.read_bytes() for path in folder.iterdir()})
            return folder

    folder = run(main())
    assert not folder.exists()
    original = {path.name: path.read_bytes() for path in Path(model_path).iterdir()}
    config = json.loads(original.pop("config.json"))
    assert config["eos_token_id"] is not None
    assert json.loads(served.pop("config.json")) == config | {"eos_token_id": None}
    original.pop("generation_config.json")
    assert served == original


def test_a_taken_port_is_passed_over(serve, run, tmp_path) -> None:
    log = tmp_path / "server.log"

    async def main(taken: int) -> None:
        async with serve(port=taken, log_file=str(log)) as engine:
            assert (await engine.generate([1], SamplingParams(3), "r")).token_ids == [1, 2, 4]

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        run(main(taken))
    words = arguments(log)
    assert words[words.index("--port") + 1] != str(taken)


def listening() -> socket.socket:
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    return other


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "lost"), [("", 1), ("bind-hangs", 1), ("bind-hangs", 3)])
def test_a_port_lost_while_the_server_starts_is_tried_again_elsewhere(
    mode, lost, make_engine, run, tmp_path, monkeypatch
) -> None:
    """A real server that finds its port taken says so and does not end."""
    log = tmp_path / "server.log"
    with ExitStack() as stack:
        taken = [stack.enter_context(listening()) for _ in range(lost)]
        ports = iter([*taken, held_port()])
        monkeypatch.setattr(engine_module, "held_port", lambda preferred: next(ports))
        engine = make_engine(mode, log_file=str(log), start_timeout=60.0)
        if lost == engine_module.PORT_ATTEMPTS:
            with pytest.raises(EngineError, match=r"found its port taken(.|\n)*address already in use"):
                run(engine.start())
        else:
            run(started_and_closed(engine))
    assert log.read_text().count("arguments ") == min(lost + 1, engine_module.PORT_ATTEMPTS)
    assert "address already in use" in log.read_text()


async def started_and_closed(engine: SGLangEngine) -> None:
    await engine.start()
    await engine.health()
    await engine.close()


def test_a_server_that_ends_shows_its_last_30_lines(make_engine, run) -> None:
    with pytest.raises(EngineError) as caught:
        run(make_engine("broken").start())
    message = str(caught.value)
    assert "ended with exit code 1" in message
    assert "['OddForCausalLM'] are not supported" in message
    assert len(message.split("its last lines:\n")[1].splitlines()) == 30


def test_a_server_that_is_never_ready_is_given_up(make_engine, run) -> None:
    engine = make_engine("silent", start_timeout=3.0)
    with pytest.raises(
        EngineError, match=r"not ready within 3 s \(rollout.engine.config.start_timeout\)(.|\n)*for ever"
    ):
        run(engine.start())
    with pytest.raises(EngineError, match="ended with exit code -9"):
        run(engine.health())


def test_an_interpreter_without_sglang_is_named(model_path, run, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    engine = SGLangEngine(SGLangConfig(), EngineContext(model_path))
    with pytest.raises(EngineError, match=f"{sys.executable} has no package sglang; .*pip install"):
        run(engine.start())


def test_bad_models_and_options_are_named(make_engine, run, tmp_path) -> None:
    with pytest.raises(EngineError, match="model.path: .*config.json cannot be read"):
        run(make_engine(model=str(tmp_path)).start())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="holds no .*safetensors"):
        run(make_engine(model=str(tmp_path)).start())
    with pytest.raises(EngineError, match="deterministic_inference: SGLang has no"):
        run(make_engine(deterministic_inference=True).start())


def test_an_engine_that_was_not_started_says_so(make_engine, run) -> None:
    engine = make_engine()
    with pytest.raises(EngineError, match="has not been started"):
        run(engine.health())
    run(engine.close())
    run(engine.close())


def test_a_server_that_is_killed_fails_its_requests_with_its_log(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(90), "r"))
            await engine.generate([1], SamplingParams(2), "clock")
            os.kill(engine._process.pid, signal.SIGKILL)
            for broken in (task, engine.health(), engine.generate([1], SamplingParams(1), "s")):
                with pytest.raises(EngineError, match=r"ended with exit code -9(.|\n)*arguments"):
                    await broken

    run(main())


def test_the_server_dies_with_the_process_that_started_it() -> None:
    script = textwrap.dedent("""
        import os, sys, time
        from agentrl_engine_sglang.process import ServerProcess
        child = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
        process = ServerProcess([sys.executable, "-c", child], dict(os.environ))
        process.start()
        while not process.log_path.read_text().strip():
            time.sleep(0.05)
        print(process.pid, process.log_path.read_text().strip(), process.log_path, flush=True)
        os.kill(os.getpid(), 9)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    server, grandchild, log = done.stdout.split()
    for pid in (server, grandchild):
        with open(os.devnull) as nothing:
            subprocess.run(["tail", f"--pid={pid}", "-f", os.devnull], stdin=nothing, timeout=30, check=True)
    Path(log).unlink()


def test_a_command_that_cannot_be_run_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        ServerProcess([str(tmp_path / "missing")], {}, str(tmp_path / "log")).start()


def test_experts_of_tokens_are_asked_for_and_need_all_layers_in_one_place() -> None:
    asked = server_arguments(SGLangConfig(), EngineContext("m", routed_experts=True, tensor_parallel=2), "m", 1)
    assert asked["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in server_arguments(SGLangConfig(), EngineContext("m"), "m", 1)
    with pytest.raises(EngineError, match="pipeline_parallel=2; set it to 1"):
        server_arguments(SGLangConfig(), EngineContext("m", routed_experts=True, pipeline_parallel=2), "m", 1)
