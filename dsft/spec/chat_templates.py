"""Names of the chat templates that dsft has (dsft/data/render/templates/NAME.jinja). Pure."""

from __future__ import annotations

CHAT_TEMPLATES = (
    "chatml",
    "cohere",
    "deepseek",
    "gemma",
    "glm",
    "llama2",
    "llama3",
    "llama3_1",
    "mistral",
    "phi3",
    "qwen2_5",
    "qwen3",
    "zephyr",
)
