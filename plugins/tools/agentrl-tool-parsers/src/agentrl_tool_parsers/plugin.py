"""What the entry points name."""

from dataclasses import dataclass
from typing import ClassVar

from agentrl_core.api import NoConfig, PluginSpec


@dataclass
class HermesConfig(NoConfig):
    obsolete: ClassVar[dict[str, str]] = {
        "starts_in_think": "A turn that begins inside the reasoning is recognised by itself."
    }


def _spec(name: str, summary: str, factory: str, config: type = NoConfig) -> PluginSpec:
    return PluginSpec("tool_parser", name, 1, summary, f"agentrl_tool_parsers.{factory}", config=config)


HERMES = _spec(
    "hermes",
    "<tool_call>{json}</tool_call>: Hermes, Qwen 2.5, Qwen 3 and Granite 4",
    "formats:HermesParser",
    HermesConfig,
)
QWEN3_CODER = _spec(
    "qwen3_coder",
    "<function=name><parameter=key>: Qwen 3 Coder, Qwen 3.5 and later, and Nemotron 3",
    "formats:Qwen3CoderParser",
)
LLAMA3_JSON = _spec("llama3_json", '{"name", "parameters"} as the turn: Llama 3.1 to 3.3', "formats:Llama3JsonParser")
LLAMA4_PYTHONIC = _spec("llama4_pythonic", "[name(key=value)] as the turn: Llama 4", "formats:Llama4PythonicParser")
MISTRAL = _spec("mistral", "[TOOL_CALLS]name[ARGS]{json}, and lists: Mistral", "formats:MistralParser")
HARMONY = _spec("harmony", "channels with a recipient: gpt-oss", "harmony:HarmonyParser")
GLM4 = _spec("glm4", "<tool_call>name<arg_key>: GLM 4.5 to 4.7", "formats:Glm4Parser")
KIMI_K2 = _spec("kimi_k2", "<|tool_call_begin|>functions.name:0: Kimi K2", "formats:KimiK2Parser")
DEEPSEEK_V3 = _spec("deepseek_v3", "<｜tool▁call▁begin｜>: DeepSeek V3, R1 and V3.1", "formats:DeepSeekV3Parser")
DEEPSEEK_V32 = _spec("deepseek_v32", "<｜DSML｜invoke>: DeepSeek V3.2 and V4", "formats:DeepSeekV32Parser")
GEMMA4 = _spec("gemma4", "<|tool_call>call:name{key:value}: Gemma 4", "formats:Gemma4Parser")
MINIMAX_M2 = _spec("minimax_m2", "<minimax:tool_call><invoke>: MiniMax M2", "formats:MiniMaxM2Parser")
SEED_OSS = _spec("seed_oss", "<seed:tool_call><function=name>: Seed-OSS", "formats:SeedOssParser")
OLMO3 = _spec("olmo3", "<function_calls> with a call per line: OLMo 3", "formats:Olmo3Parser")
GRANITE = _spec("granite", "<|tool_call|>[json]: Granite 3", "formats:GraniteParser")
NEMOTRON = _spec("nemotron", "<TOOLCALL>[json]</TOOLCALL>: Nemotron 2", "formats:NemotronParser")
LFM2 = _spec("lfm2", "<|tool_call_start|>[name(key=value)]<|tool_call_end|>: LFM 2", "formats:Lfm2Parser")
XLAM = _spec("xlam", '[{"name", "arguments"}] as the turn: xLAM', "formats:XlamParser")
PHI4_MINI = _spec("phi4_mini", "functools[json]: Phi-4-mini", "formats:Phi4MiniParser")
INTERNLM2 = _spec("internlm2", "<|action_start|><|plugin|>{json}: InternLM 2", "formats:InternLM2Parser")
