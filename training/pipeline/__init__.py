"""Trains a model whose layers are spread over pipeline ranks: schedules, their simulation, and their execution."""
