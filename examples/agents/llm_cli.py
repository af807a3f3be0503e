"""A command-line agent: the program `llm` runs its own loop of tool calls, one process per trajectory."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

TOOLS = """
def calculator(a: int, operator: str, b: int) -> int:
    "Calculates a + b, a - b or a * b."
    return {"+": a + b, "-": a - b, "*": a * b}[operator]
"""


async def solve(base_url, api_key, model, messages, row):
    with tempfile.TemporaryDirectory() as home:
        known = {
            "model_id": model,
            "model_name": model,
            "api_base": base_url,
            "api_key_name": "openai",
            "supports_tools": True,
        }
        # JSON is YAML.
        Path(home, "extra-openai-models.yaml").write_text(json.dumps([known]))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llm", "-m", model, "--key", api_key, "--functions", TOOLS, "--chain-limit", "3",
            "--no-log", "--no-stream", messages[-1]["content"],
            env={**os.environ, "LLM_USER_PATH": home}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, problems = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode and b"Chain limit" not in problems:
            raise RuntimeError(f"llm ended with {process.returncode}: {problems.decode()[-500:]}")
