"""Chooses by measurement what `launch.serve --tuning` reads: batch sizes, chunk size, drafts, plans of kernels."""
