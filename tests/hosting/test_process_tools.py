"""Tools in child processes that can be killed, with real children."""

import asyncio
import os
import select
import time

import pytest

from agentrl_core.api import (
    ConfigError,
    DeadlineError,
    NoConfig,
    PluginBrokenError,
    RewardResult,
    ToolCall,
    ToolError,
    ToolUnavailableError,
)
from agentrl_core.config.schema import RewardFunctionSlot, ToolSlot
from agentrl_core.hosting.rewards import HostedRewardFunction
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.hosting.wire import decode, encode
from agentrl_core.serving.clients import AbsentClient

TOOLS = '''
import os, time
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema

SCHEMA = {"x": {"type": "string"}}

class Odd(Exception):
    def __str__(self):
        raise SystemExit("no text")

class Stateless(Tool):
    isolation = "process"
    schema = function_schema("stateless", "Does what x says.", SCHEMA)

    async def execute(self, instance_id, parameters, **kwargs):
        x = parameters["x"]
        if x == "pid":
            return ToolResult(ToolResponse(str(os.getpid())), 0.5, {"calls": 1.0})
        if x == "file":
            return ToolResult(ToolResponse(__file__))
        if x == "unavailable":
            from agentrl_core.api import ToolUnavailableError
            raise ToolUnavailableError("no sandbox")
        if x == "spin":
            while True:
                pass
        if x == "die":
            os._exit(3)
        if x == "raise":
            raise ValueError("no such city")
        if x == "raise odd":
            raise Odd
        if x == "raise megabytes":
            raise ValueError("m" * 3_000_000)
        if x == "no metrics":
            return ToolResult(ToolResponse("x"), metrics=[1.0])
        if x == "large":
            return ToolResult(ToolResponse("x"), 10**400)
        if x == "many":
            return [[]] * 600_000
        if x == "print":
            print("noise on stdout")
            return ToolResult(ToolResponse("quiet"))
        if x == "megabytes":
            return ToolResult(ToolResponse("m" * 3_000_000))
        if x == "unpicklable":
            return lambda: None
        return x

class Starter(Tool):
    isolation = "process"
    schema = function_schema("starter", "Starts other processes.", SCHEMA)

    async def execute(self, instance_id, parameters, **kwargs):
        import subprocess
        x = parameters["x"]
        if x == "environment":
            return ToolResult(ToolResponse(" ".join(os.environ)))
        own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        shell = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"])
        return ToolResult(ToolResponse(f"{own.pid} {shell.pid}"))

class Counter(Tool):
    isolation = "process"
    stateful = True
    schema = function_schema("counter", "Counts.", SCHEMA)

    async def create(self, instance_id, start=0, **kwargs):
        self.count = start

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["x"] == "spin":
            while True:
                pass
        self.count += 1
        return ToolResult(ToolResponse(f"{self.count} {os.getpid()}"))

    async def calc_reward(self, instance_id, factor=1.0, **kwargs):
        return self.count * factor

class Broken(Tool):
    isolation = "process"
    schema = function_schema("broken", "Cannot be built in a child.", SCHEMA)

    def __init__(self, config, context):
        super().__init__(config, context)
        if os.environ.get("AGENTRL_TEST_PARENT") != str(os.getpid()):
            raise RuntimeError("no licence here")

    async def execute(self, instance_id, parameters, **kwargs):
        raise AssertionError

def shout(x: str, times: int = 1) -> str:
    """Says it louder."""
    return x.upper() * times
'''


@pytest.fixture
def hosted(make_slot):
    made: list[HostedTool] = []

    def make(name: str, **fields) -> HostedTool:
        made.append(HostedTool(make_slot(ToolSlot, TOOLS, name, **fields), seed=0))
        return made[-1]

    yield make
    assert not any(tool._owned for tool in made)


def run(tool: HostedTool, scenario, loop_factory=None) -> None:
    async def closed_at_the_end() -> None:
        try:
            await scenario()
        finally:
            await tool.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(closed_at_the_end())


def execute(tool: HostedTool, x: str, instance: str = "i"):
    return tool.call("execute", instance, {"x": x}, kwargs={})


def test_an_unavailable_tool_says_so_through_its_process(hosted) -> None:
    tool = hosted("Stateless", processes=1)

    async def scenario() -> None:
        with pytest.raises(ToolUnavailableError, match="^no sandbox$"):
            await execute(tool, "unavailable")

    run(tool, scenario)


def test_a_process_is_killed_on_the_event_loop_that_ray_uses_where_it_is_installed(hosted) -> None:
    uvloop = pytest.importorskip("uvloop")
    tool = hosted("Stateless", processes=1)

    async def scenario() -> None:
        pid = int((await execute(tool, "pid")).response.text)
        tool.timeout = 0.3
        with pytest.raises(DeadlineError):
            await execute(tool, "spin")
        tool.timeout = 30.0
        assert int((await execute(tool, "pid")).response.text) != pid

    run(tool, scenario, uvloop.new_event_loop)


def test_a_tool_in_a_child_process_finds_what_lies_next_to_its_file(hosted, tmp_path) -> None:
    tool = hosted("Stateless", processes=1)

    async def scenario() -> None:
        found = (await execute(tool, "file")).response.text
        assert (found, os.path.isfile(found)) == (str(tmp_path / "plugin_1.py"), True)

    run(tool, scenario)


def test_tool_that_raises_returns_megabytes_or_nonsense_is_an_observation(hosted, make_session) -> None:
    """And the same child goes on: none of these costs the process."""
    tool = hosted("Stateless", processes=1)

    async def scenario() -> None:
        session = make_session([tool])
        await session.open_tools()

        async def call(x: str):
            return await session.call_tool(ToolCall("stateless", {"x": x}, "call00001"))

        pid = (await call("pid")).response.text
        raised = await call("raise")
        assert raised.failed and raised.response.text == "Error: ValueError: no such city"
        big = await call("megabytes")
        assert not big.failed and len(big.response.text) == 3_000_000
        wrong = await call("anything")
        assert wrong.failed and "returned str, not a ToolResult" in wrong.response.text
        assert (await call("unpicklable")).failed
        odd = await call("raise odd")
        assert odd.response.text == "Error: Odd: its message or traceback raised SystemExit"
        assert len((await call("raise megabytes")).response.text) < 2_000_000
        for x, problem in {
            "no metrics": "metrics [1.0], which are no dict",
            "large": "0, which is not a finite number",
            "many": "a result of more than 524,288 values cannot leave",
        }.items():
            found = await call(x)
            assert found.failed and problem in found.response.text
        assert (await call("print")).response.text == "quiet"
        assert (await call("pid")).response.text == pid != str(os.getpid())
        died = await call("die")
        assert died.failed and "its process died with exit code 3" in died.response.text
        assert (await call("pid")).response.text != pid
        assert session.report.metrics["tool_calls"] == 14 and session.report.metrics["tool_failures"] == 9
        assert [call.reward for call in session.report.calls].count(0.5) == 3 and session.report.metrics[
            "tool/stateless/calls"
        ] == 3
        assert max(len(call.response) for call in session.report.calls) <= 2000
        await session.close()

    run(tool, scenario)


def test_a_tool_that_spins_for_ever_is_killed_within_its_deadline_and_its_neighbours_are_unharmed(hosted) -> None:
    tool = hosted("Stateless", processes=2)

    async def scenario() -> None:
        async def pid(instance: str) -> str:
            return (await execute(tool, "pid", instance)).response.text

        before = set(await asyncio.gather(pid("a"), pid("b")))
        tool.timeout = 0.3
        start = time.monotonic()
        spinning = asyncio.create_task(execute(tool, "spin", "spinner"))
        await asyncio.sleep(0)
        (neighbour,) = {await pid(f"n{number}") for number in range(3)}
        assert neighbour in before and not spinning.done()
        with pytest.raises(DeadlineError, match="no answer within 0.3 s; its process was killed"):
            await spinning
        assert time.monotonic() - start < 30
        tool.timeout = 30.0
        after = set(await asyncio.gather(pid("c"), pid("d")))
        assert len(after) == 2 and after & before == {neighbour}

    run(tool, scenario)


def test_a_stateful_tool_owns_its_process_and_calls_come_in_order(hosted, make_session) -> None:
    """Parallel calls of one turn too: one conversation over one pipe."""
    tool = hosted("Counter")

    async def scenario() -> None:
        one = make_session([tool], tools_kwargs={"counter": {"create_kwargs": {"start": 10}}})
        two = make_session([tool], key=one._key.next_attempt())
        await asyncio.gather(one.open_tools(), two.open_tools())
        call = ToolCall("counter", {"x": "count"})
        outcomes = await asyncio.gather(*(one.call_tool(call) for _ in range(5)), two.call_tool(call))
        texts = [outcome.response.text.split() for outcome in outcomes]
        assert [int(count) for count, _ in texts] == [11, 12, 13, 14, 15, 1]
        assert len({pid for _, pid in texts[:5]}) == 1 and texts[5][1] != texts[0][1]
        await one.collect_rewards()
        assert [reward.value for _, reward in one.report.earned("tool")] == [15.0]
        process = tool._owned[one._key.request_id]._process
        await one.close()
        await two.close()
        assert tool._owned == {}
        assert process.poll() is not None

    run(tool, scenario)


def test_a_stateful_tool_whose_process_was_killed_says_so_and_is_not_begun_anew(hosted, make_session) -> None:
    """A new process would know nothing of what the trajectory had built up in the old one."""
    tool = hosted("Counter")

    async def scenario() -> None:
        session = make_session([tool])
        await session.open_tools()
        tool.timeout = 0.2
        assert "killed" in (await session.call_tool(ToolCall("counter", {"x": "spin"}))).response.text
        lost = await session.call_tool(ToolCall("counter", {"x": "count"}))
        assert lost.failed and "its state is lost" in lost.response.text
        with pytest.raises(ToolError, match="its state is lost"):
            await session.collect_rewards()
        await session.close()
        assert tool._owned == {} and "release_failures" not in session.report.metrics

    run(tool, scenario)


def test_cancelling_a_call_kills_its_process_so_that_no_answer_meets_the_next_question(hosted) -> None:
    tool = hosted("Stateless", processes=1)

    async def scenario() -> None:
        pid = (await execute(tool, "pid")).response.text
        waiting = asyncio.create_task(execute(tool, "megabytes"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await execute(tool, "pid")).response.text != pid

    run(tool, scenario)


def test_a_tool_that_cannot_be_built_in_its_process_is_an_error_each_time(hosted, monkeypatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_PARENT", str(os.getpid()))
    tool = hosted("Broken", processes=1)

    async def scenario() -> None:
        for _ in range(2):
            with pytest.raises(ToolError, match="no licence here"):
                await execute(tool, "x")

    run(tool, scenario)


def test_a_tools_process_gets_only_the_environment_variables_that_the_config_names(hosted, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET_API_KEY", "1")
    monkeypatch.setenv("WEATHER_KEY", "2")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    tool = hosted("Starter", env=["WEATHER_KEY"])

    async def scenario() -> None:
        names = (await execute(tool, "environment")).response.text.split()
        assert "WEATHER_KEY" in names and "PATH" in names and not {"MY_SECRET_API_KEY", "PYTHONPATH"} & {*names}

    run(tool, scenario)


def test_what_a_tool_has_started_ends_with_its_process(hosted) -> None:
    tool = hosted("Starter", processes=1)
    watched: list[int] = []

    async def scenario() -> None:
        pids = (await execute(tool, "children")).response.text.split()
        watched.extend(os.pidfd_open(int(pid)) for pid in pids)
        assert select.select(watched, [], [], 0)[0] == []

    run(tool, scenario)
    for each in watched:
        assert select.select([each], [], [], 30)[0] == [each], "it is still running"
        os.close(each)


@pytest.mark.parametrize(
    "value",
    [{"a": [1, 2.5, None, True, "half a pair: \ud83d"]}, [], RewardResult(1.0, {"m": 2.0}, {"part": 0.5}, [0.25], [])],
    ids=ascii,
)
def test_results_leave_a_process_as_they_are(value) -> None:
    assert decode(encode(value)) == value


def test_what_stands_in_texts_are_no_values() -> None:
    value = ["[{,\\" * 300_000, '\\"[,' * 100_000]
    assert decode(encode(value)) == value


def test_results_that_cannot_leave_a_process(hosted) -> None:
    deep: list = []
    for _ in range(100):
        deep = [deep]
    for value, message in ((deep, "nested more than 64"), ("x" * (65 << 20), "at most"), (object(), "object cannot")):
        with pytest.raises((TypeError, ValueError), match=message):
            encode(value)
    # Read into lists this would take some hundred times its bytes, and keep the run from everything else.
    many = b"[" + b"[]," * 600_000 + b"[]]"
    for data in (
        many,
        b"[" * 100_000,
        b'{"type": "os", "fields": {}}',
        b'{"type": "ToolResult", "fields": 1}',
        b"\xff",
    ):
        with pytest.raises(ValueError):
            decode(data)


def test_a_typed_function_of_a_file_is_a_tool_in_a_process(hosted, make_session) -> None:
    tool = hosted("shout")
    assert tool.tool.schema["function"]["parameters"]["properties"]["times"] == {"type": "integer"}

    async def scenario() -> None:
        session = make_session([tool])
        (schema,) = await session.open_tools()
        assert schema["function"]["description"] == "Says it louder."
        outcome = await session.call_tool(ToolCall("shout", {"x": "ab", "times": 2}))
        assert outcome.response.text == "ABAB" and not outcome.failed
        missing = await session.call_tool(ToolCall("shout", {"times": 2}))
        assert missing.failed and "missing: x" in missing.response.text
        await session.close()

    run(tool, scenario)


def test_what_is_not_a_tool_is_refused_when_the_worker_starts(make_slot) -> None:
    source = "class Odd:\n    def __init__(self, config, context): pass\n"
    with pytest.raises(PluginBrokenError, match="built a Odd, not a Tool"):
        HostedTool(make_slot(ToolSlot, source, "Odd"), seed=0)


COUNTED = """
from agentrl_core.api import NoConfig, Tool, ToolResponse, ToolResult, function_schema

def note():
    with open(PATH, "a") as file:
        file.write("built\\n")

class Counted(Tool):
    isolation = "process"
    schema = function_schema("counted", "Notes each build.", {})
    config_class = NoConfig

    def __init__(self, config, context):
        note()
        if ASKS:
            context.engines["judge"]

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse("done"))

class Score:
    config_class = NoConfig
    isolation = "process"

    def __init__(self, config, context):
        note()

    def __call__(self, trajectory):
        return 1.0
"""


@pytest.mark.parametrize("kind", ["tool", "reward function"])
def test_a_plugin_in_a_child_process_is_built_once_here_where_the_run_has_engines(make_slot, tmp_path, kind) -> None:
    code = COUNTED + f"\nASKS, PATH = False, {str(tmp_path / 'builds')!r}"
    clients = {"judge": AbsentClient()}
    if kind == "tool":
        HostedTool(make_slot(ToolSlot, code, "Counted", config=NoConfig()), 0, clients)
    else:
        HostedRewardFunction(make_slot(RewardFunctionSlot, code, "Score", config=NoConfig()), clients)
    assert (tmp_path / "builds").read_text() == "built\n"


def test_a_tool_in_a_child_process_that_asks_for_an_engine_is_refused(make_slot, tmp_path) -> None:
    code = COUNTED + f"\nASKS, PATH = True, {str(tmp_path / 'builds')!r}"
    with pytest.raises(ConfigError, match="asks for the engine 'judge', but it runs in a child process"):
        HostedTool(make_slot(ToolSlot, code, "Counted", config=NoConfig()), 0, {"judge": AbsentClient()})
