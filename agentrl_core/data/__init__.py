"""Rows of a step: samplers, overlong prompts, chat templates and renderers."""
