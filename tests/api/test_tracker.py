"""Tables of trajectories, as trackers get them."""

from agentrl_core.api import EndedTrajectory, trajectory_table
from agentrl_core.api.message_parts import image_part


def test_an_image_of_a_message_is_a_mark_in_its_text() -> None:
    content = [{"type": "text", "text": "what?"}, image_part("0" * 32 + "-4x3.png")]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ended = EndedTrajectory("t", "u", "train", "x", "completed", 1.0, {}, messages, 1, 3, 1, {}, None)
    columns, (row,) = trajectory_table([ended], 1, 5)["train"]
    text = dict(zip(columns, row, strict=True))["messages"]
    assert text.startswith("user: what?<image>\n\nassistant: ") and '"look"' in text
