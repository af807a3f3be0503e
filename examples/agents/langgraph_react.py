"""A ReAct agent in LangGraph: the model and its tools in turns, until an answer calls nothing."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(a: int, operator: Literal["+", "-", "*"], b: int) -> int:
    """Calculates a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


async def solve(base_url, api_key, model, messages, row):
    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model).bind_tools([calculator])

    async def ask(state):
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    await graph.compile().ainvoke({"messages": messages}, {"recursion_limit": 6})
