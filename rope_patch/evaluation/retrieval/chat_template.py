"""Finds what a chat template writes around a user's message."""

from __future__ import annotations

import datetime
import re
import warnings
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError

TEMPLATE_DATE = datetime.datetime(2024, 7, 26, 12)
"""The day that a chat template prints as today's date: the one that Llama's template falls back on."""


def chat_frame(tokenizer: Any, chat_template: str = "on") -> tuple[str, str] | None:
    """Return what a chat template writes before a user's message, and after it up to the start of the assistant's turn.

    A template that prints today's date (``strftime_now``) is made to print :data:`TEMPLATE_DATE`, so that a run that is
    resumed on another day has the same prompts. Transformers passes the clock to templates itself and accepts no other
    function, so the day is written into the template.

    Args:
        tokenizer: the tokenizer whose chat template is read.
        chat_template: ``"on"`` to use the template, ``"off"`` to return None, or ``"auto"`` to return None if there is
            no template.

    Raises:
        ValueError: the template that is asked for is missing, or does not show the message as it was written.
    """
    missing = getattr(tokenizer, "chat_template", None) is None
    if chat_template == "off" or (missing and chat_template == "auto"):
        return None
    if missing:
        raise ValueError(
            "this tokenizer has no chat template: leave the chat out (chat_template='off', --chat-template off), or "
            "load the tokenizer of an instruction-tuned model"
        )
    try:
        dated = re.sub(
            r"""strftime_now\((["'])(.*?)\1\)""",
            lambda call: repr(TEMPLATE_DATE.strftime(call[2])),
            tokenizer.get_chat_template(),
        )
        options = {"tokenize": False, "add_generation_prompt": True, "chat_template": dated}
        return frame_of(lambda chat: str(tokenizer.apply_chat_template(chat, **options)))
    except (ValueError, TemplateError) as error:
        message = f"the chat template of this tokenizer cannot be used: {error}"
        if chat_template == "on":
            raise ValueError(f"{message}. chat_template='off' (--chat-template off) leaves it out") from error
        # Under "auto" nobody asked for this template, so a broken one is no error.
        warnings.warn(f"{message}. Prompts are plain text", stacklevel=2)
        return None


def frame_of(render: Callable[[list[dict[str, str]]], str]) -> tuple[str, str]:
    """Return what a chat template writes before and after a user's message.

    Args:
        render: function that writes a chat as text, up to the start of the assistant's turn.

    Raises:
        ValueError: the message does not appear in the text as it was written.
    """
    message = "the message of the user"
    before, shown, after = render([{"role": "user", "content": message}]).partition(message)
    if not shown:
        raise ValueError("it does not show the message of the user as it is written")
    return before, after
