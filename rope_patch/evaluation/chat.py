"""What a chat template writes around a user's message."""

from __future__ import annotations

import datetime
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError

TEMPLATE_DATE = datetime.datetime(2024, 7, 26, 12)
"""The day that prompts state where a chat template prints today's date: the one that Llama's template falls back on."""


def chat_turns(tokenizer: Any, chat_template: str = "on") -> tuple[str, str] | None:
    """Return what a tokenizer's chat template writes before and after a user's message, the assistant's turn begun.

    A template that prints today's date (``strftime_now``) prints :data:`TEMPLATE_DATE`: prompts do not change with the
    day, so that a run that goes on tomorrow asks the same. Transformers gives templates the clock itself and takes no
    other function, so the day is written into the template.

    Args:
        tokenizer: of the model.
        chat_template: ``"on"``, ``"off"`` for None, or ``"auto"`` for None where there is no template.

    Raises:
        ValueError: no template though one is asked for, or one that does not show the message as it is.
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
        options = {"tokenize": False, "add_generation_prompt": True, **_dated(tokenizer.chat_template)}
        return turns_of(lambda chat: str(tokenizer.apply_chat_template(chat, **options)))
    except (ValueError, TemplateError) as error:
        message = f"the chat template of this tokenizer cannot be used: {error}"
        if chat_template == "on":
            raise ValueError(f"{message}. chat_template='off' (--chat-template off) leaves it out") from error
        warnings.warn(f"{message}. Prompts are plain text", stacklevel=2)
        return None


def _dated(template: str | Mapping[str, str]) -> dict[str, str]:
    """Return the option with which a chat template is rendered at a fixed day; none where it does not ask for one.

    Args:
        template: of a tokenizer; of several by name the one called ``"default"`` is rendered.
    """
    text = template if isinstance(template, str) else template.get("default", "")
    dated = re.sub(r"""strftime_now\((["'])(.*?)\1\)""", lambda call: repr(TEMPLATE_DATE.strftime(call[2])), text)
    return {} if dated == text else {"chat_template": dated}


def turns_of(render: Callable[[list[dict[str, str]]], str]) -> tuple[str, str]:
    """Return what a chat template writes before and after a user's message.

    Args:
        render: writes a chat as text, the assistant's turn begun.

    Raises:
        ValueError: the message does not appear as it is.
    """
    message = "the message of the user"
    before, shown, after = render([{"role": "user", "content": message}]).partition(message)
    if not shown:
        raise ValueError("it does not show the message of the user as it is written")
    return before, after
