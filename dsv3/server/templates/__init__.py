"""Renders a model's chat template in processes of its own, which can be killed."""
