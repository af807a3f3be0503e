"""Rows of a step, overlong prompts, chat templates and their renderer."""
