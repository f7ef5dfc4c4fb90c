"""Request and response types of OpenAI's and Anthropic's APIs, with limits, and their errors."""
