"""Wire protocols that agents speak: OpenAI chat completions and responses, Anthropic messages."""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AnthropicAdapter", "OpenAIAdapter"]
