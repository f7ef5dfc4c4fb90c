"""OpenAI's API: `http` talks to clients, `answers` makes answers, `engine` is the process that computes them."""
