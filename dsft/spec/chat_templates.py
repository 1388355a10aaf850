"""Names of the chat templates that dsft has (dsft/data/templates/NAME.jinja). Pure."""

from __future__ import annotations

CHAT_TEMPLATES = ("chatml",)
