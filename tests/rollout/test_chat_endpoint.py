"""The endpoint as the official client meets it, in a whole rollout with the scripted engine."""

import json

import pytest

from agentrl_core.api import Termination

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
IMPORTS = """
    import asyncio, json, os
    import httpx
    from openai import APIConnectionError, APIStatusError, AsyncOpenAI

    TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]

    def seen(**values):
        with open(os.path.join(os.path.dirname(__file__), "seen.jsonl"), "a") as file:
            file.write(json.dumps(values) + "\\n")

    def client(base_url, api_key):
        return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
"""


@pytest.fixture
def run_agent(make_rollout, make_row, tiny_run):
    """Run one trajectory of an agent; returns its result and what the agent has ``seen``."""

    def run(body: str, turns=("four",), options=None, **changes):
        agent = tiny_run.folder / "agent.py"
        loop = {"name": "openai_agent", "config": {"agent": f"{agent}:solve", **(options or {})}}
        settings = {
            "rollout.agent": {"loops": [loop]},
            "rollout.engine": {"name": "scripted", "config": {"turns": list(turns)}},
            "rollout.retries": 0,
            "rollout.max_failed_fraction": 1.0,
            **changes,
        }
        rollout = make_rollout(settings, {"agent.py": IMPORTS + body})
        (result,) = rollout([make_row()])
        lines = (tiny_run.folder / "seen.jsonl").read_text().splitlines()
        return result, [json.loads(line) for line in lines], rollout

    return run


def test_a_conversation_with_a_tool_is_recorded_token_by_token(run_agent) -> None:
    result, (seen,), rollout = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        async with client(base_url, api_key) as openai:
            first = await openai.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            call = first.choices[0].message.tool_calls[0]
            arguments = json.loads(call.function.arguments)
            messages = [*messages, first.choices[0].message.model_dump(),
                        {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}]
            second = await openai.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            seen(reason=first.choices[0].finish_reason, name=call.function.name, text=second.choices[0].message.content,
                 usage=second.usage.model_dump(), models=[m.id for m in (await openai.models.list()).data], model=model)
        return 0.75
        """,
        turns=(CALL, "four"),
    )
    assert (seen["reason"], seen["name"], seen["text"]) == ("tool_calls", "add", "four")
    assert seen["models"] == [seen["model"]]
    (output,) = result.outputs
    assert result.termination is Termination.COMPLETED and result.reward.score == 0.75
    tokenizer = rollout.workers[0]._environment.renderer.chat.tokenizer
    sampled = [i for i, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == f"{CALL}<|im_end|>four<|im_end|>"
    assert "<tool_response>\n4\n</tool_response>" in tokenizer.decode(output.response_ids)
    assert len(output.response_logprobs) == len(output.response_ids) == len(output.policy_versions)
    total = len(output.prompt_ids) + len(output.response_ids)
    assert seen["usage"]["total_tokens"] == total and seen["usage"]["completion_tokens"] == len("four") + 1
    assert output.metrics["endpoint_forks"] == 0


def test_a_stream_gives_the_same_as_one_piece(run_agent) -> None:
    result, (seen,), _ = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        async with client(base_url, api_key) as openai:
            text, calls, reasons, usage = "", {}, [], None
            stream = await openai.chat.completions.create(
                model=model, messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True})
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    for call in choice.delta.tool_calls or []:
                        calls[call.index] = [call.id, call.function.name, call.function.arguments]
                    reasons.append(choice.finish_reason)
            seen(text=text, calls=list(calls.values()), reason=reasons[-1], completion=usage.completion_tokens)
        """,
        turns=("x" * 200 + CALL,),
    )
    assert seen["text"] == "x" * 200 and seen["reason"] == "tool_calls"
    ((identifier, name, arguments),) = seen["calls"]
    assert identifier and name == "add" and json.loads(arguments) == {"a": 2, "b": 2}
    assert seen["completion"] == sum(result.outputs[0].response_mask)


def test_what_cannot_be_answered_is_refused_with_a_reason(run_agent) -> None:
    _, seen, _ = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        async with client(base_url, api_key) as openai:
            async def refused(**request):
                try:
                    await openai.chat.completions.create(**{"model": model, "messages": messages, **request})
                except APIStatusError as error:
                    seen(status=error.status_code, code=error.code, message=error.body["message"])
            await refused(model="gpt-9")
            await refused(messages=[])
            await refused(n=0)
            await refused(frequency_penalty=1)
            await refused(extra_body={"beam_width": 4})
            await refused(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
            await refused(messages=[{"role": "user", "content": "x" * 3000}])
            openai.api_key = "wrong"
            await refused()
            async with httpx.AsyncClient() as http:
                answer = await http.post(base_url + "/chat/completions", content=b"{",
                                         headers={"authorization": f"Bearer {api_key}"})
                seen(status=answer.status_code, message=answer.json()["error"]["message"], code=None)
                seen(status=(await http.get(base_url + "/models")).status_code, message="", code=None)
        """,
        options={"max_body_bytes": 2000},
    )
    got = [(item["status"], item["code"]) for item in seen]
    assert got == [
        (404, "model_not_found"), (400, None), (400, None), (400, None), (400, None), (400, "invalid_image"),
        (413, None), (401, "invalid_api_key"), (400, None), (401, None),
    ]  # fmt: skip
    messages = [item["message"] for item in seen]
    assert "there is no model 'gpt-9'; there is 'policy'" in messages[0]
    assert "messages" in messages[1] and "n:" in messages[2] and "frequency_penalty" in messages[3]
    assert "beam_width" in messages[4] and "takes text alone" in messages[5]
    assert "max_body_bytes=2000" in messages[6]


def test_an_agent_that_asks_nothing_fails_its_trajectory(run_agent) -> None:
    result, _, _ = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        seen()
        """
    )
    assert result.status == "failed" and "returned without asking the endpoint" in result.error


def test_a_spent_budget_ends_with_length(run_agent) -> None:
    result, (seen,), _ = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        async with client(base_url, api_key) as openai:
            try:
                for _ in range(100):
                    answer = await openai.chat.completions.create(model=model, messages=messages)
                    messages = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
            except APIStatusError as error:
                seen(code=error.code)
                raise
        """,
        **{"rollout.max_response_length": 60},
    )
    assert result.termination is Termination.LENGTH and seen["code"] == "context_length_exceeded"
    assert len(result.outputs[0].response_ids) <= 60


def test_an_engine_error_reaches_the_result_even_if_the_agent_swallows_it(run_agent) -> None:
    result, (seen,), _ = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        async with client(base_url, api_key) as openai:
            try:
                await openai.chat.completions.create(model=model, messages=messages)
            except APIStatusError as error:
                seen(status=error.status_code)
        """,
        **{"rollout.engine": {"name": "scripted", "config": {"turns": ["four"], "fail_every": 1}}},
    )
    assert seen["status"] == 500 and result.termination is Termination.ENGINE_ERROR
    assert "fails, as scripted" in result.error


def test_a_client_that_gave_up_gets_the_answer_of_its_second_try_on_the_same_record(run_agent) -> None:
    result, (seen,), rollout = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        body = {"model": model, "messages": messages}
        headers = {"authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient() as http:
            first = asyncio.create_task(http.post(base_url + "/chat/completions", json=body, headers=headers))
            while not [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Reply.generate"]:
                await asyncio.sleep(0.01)
            headers["x-stainless-retry-count"] = "1"
            answer = (await http.post(base_url + "/chat/completions", json=body, headers=headers)).json()
            assert "choices" in answer, answer
            text = answer["choices"][0]["message"]["content"]
            seen(own=answer["agentrl"], text=text, first=(await first).status_code)
        """,
        **{"rollout.engine": {"name": "scripted", "config": {"turns": ["four"], "delay": 0.3}}},
    )
    assert seen["own"] == {"branch": 0, "forked": False, "replayed": False}
    assert (seen["text"], seen["first"]) == ("four", 409)
    (output,) = result.outputs
    assert sum(output.response_mask) == len("four") + 1


def test_a_client_that_leaves_a_stream_ends_its_generation(run_agent) -> None:
    result, (seen,), rollout = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        body = {"model": model, "messages": messages, "stream": True}
        headers = {"authorization": f"Bearer {api_key}"}
        sampling = []
        async with httpx.AsyncClient() as http:
            async with http.stream("POST", base_url + "/chat/completions", json=body, headers=headers) as answer:
                while not sampling:
                    await asyncio.sleep(0.01)
                    tasks = asyncio.all_tasks()
                    sampling = [task for task in tasks if task.get_coro().__qualname__ == "Reply.generate"]
        await asyncio.wait(sampling, timeout=10)
        seen(ended=[task.cancelled() for task in sampling])
        """,
        **{"rollout.engine": {"name": "scripted", "config": {"turns": ["four"], "delay": 3600.0}}},
    )
    assert seen["ended"] == [True]
    assert result.outputs == [] or not any(result.outputs[0].response_mask)


def test_a_prompt_above_the_context_is_refused_and_trains_no_row(run_agent) -> None:
    result, (seen,), _ = run_agent(
        """
    async def solve(base_url, api_key, model, messages, row):
        async with client(base_url, api_key) as openai:
            await openai.chat.completions.create(model=model, messages=messages)
            try:
                await openai.chat.completions.create(model=model, messages=[{"role": "user", "content": "x" * 9000}])
            except APIStatusError as error:
                seen(status=error.status_code, code=error.code)
        """,
    )
    assert seen == {"status": 400, "code": "context_length_exceeded"}
    (output,) = result.outputs
    assert result.termination is Termination.LENGTH and any(output.response_mask)
