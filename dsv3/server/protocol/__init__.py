"""Request and response types of OpenAI's and Anthropic's APIs, with bounds, and their errors."""
